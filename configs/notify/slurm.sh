#!/bin/sh
# Writes an event into the job's comment, for `squeue` and `sacct`: ttprun --on-event configs/notify/slurm.sh ...
set -eu
comment=$(python3 -c '
import json, sys
reported = json.load(sys.stdin)
what = reported["event"].get("reason") or reported["event"].get("outcome") or ""
print("ttprun: {} at step {}{}".format(reported["kind"], reported.get("step", "?"), what and ": " + what))')
exec scontrol update "JobId=$SLURM_JOB_ID" "Comment=$comment"
