#!/bin/sh
# Sends a mail for an event: ttprun --on-event 'configs/notify/mail.sh me@example.org' ...; needs mail(1).
set -eu
event=$(cat)
subject=$(printf '%s' "$event" | python3 -c '
import json, sys
told = json.load(sys.stdin)
print("ttprun {}: {}".format(told.get("run_id", "?"), told["kind"]))')
printf '%s\n' "$event" | mail -s "$subject" "$1"
