#!/bin/sh
# Reports an event to a Slack channel: ttprun --on-event configs/notify/slack.sh ... with SLACK_WEBHOOK_URL in the environment.
set -eu
python3 -c '
import json, sys
reported = json.load(sys.stdin)
what = reported["event"].get("reason") or reported["event"].get("outcome") or ""
text = "ttprun {}: {} at step {}: {}".format(reported.get("run_id", "?"), reported["kind"], reported.get("step", "?"), what)
print(json.dumps({"text": text}))' |
    curl --silent --show-error --fail --max-time 8 -H 'content-type: application/json' --data @- "$SLACK_WEBHOOK_URL"
