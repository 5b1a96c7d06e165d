#!/bin/sh
# Tells a Slack channel of an event: ttprun --on-event configs/notify/slack.sh ... with SLACK_WEBHOOK_URL in the environment.
set -eu
python3 -c '
import json, sys
told = json.load(sys.stdin)
what = told["event"].get("reason") or told["event"].get("outcome") or ""
text = "ttprun {}: {} at step {}: {}".format(told.get("run_id", "?"), told["kind"], told.get("step", "?"), what)
print(json.dumps({"text": text}))' |
    curl --silent --show-error --fail --max-time 8 -H 'content-type: application/json' --data @- "$SLACK_WEBHOOK_URL"
