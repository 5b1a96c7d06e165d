#!/bin/sh
# Tells a Slack channel of an event: ttprun --on-event configs/notify/slack.sh ... with SLACK_WEBHOOK_URL in the environment.
set -eu
python3 -c '
import json, sys
event = json.load(sys.stdin)
what = event.get("reason") or event.get("outcome") or ""
text = "ttprun {run_id}: {kind} at step {step}: {what}".format(what=what, **{"step": "?", **event})
print(json.dumps({"text": text}))' |
    curl --silent --show-error --fail --max-time 8 -H 'content-type: application/json' --data @- "$SLACK_WEBHOOK_URL"
