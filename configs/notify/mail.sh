#!/bin/sh
# Sends a mail for an event: ttprun --on-event 'configs/notify/mail.sh me@example.org' ...; needs mail(1).
set -eu
event=$(cat)
subject=$(printf '%s' "$event" | python3 -c '
import json, sys
reported = json.load(sys.stdin)
print("ttprun {}: {}".format(reported.get("run_id", "?"), reported["kind"]))')
printf '%s\n' "$event" | mail -s "$subject" "$1"
