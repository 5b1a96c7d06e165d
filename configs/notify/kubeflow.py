#!/usr/bin/env python3
"""Sends step and state to the status of a Kubeflow TrainJob: ttprun --on-event configs/notify/kubeflow.py ...

The Trainer (KEP-2779, feature gate TrainJobStatus) sets the three variables. Each message replaces the whole list of
metrics of the TrainJob, so leave this out where the script reports its own, as transformers' callback does.
"""

import json
import os
import ssl
import sys
import urllib.request
from datetime import UTC, datetime

reported = json.load(sys.stdin)
metrics = {name: str(reported[name]) for name in ("state", "step") if name in reported} | {"event": reported["kind"]}
status = {
    "metrics": [{"name": name, "value": value} for name, value in metrics.items()],
    "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
}
with open(os.environ["KUBEFLOW_TRAINER_SERVER_TOKEN"], encoding="ascii") as file:
    token = file.read().strip()
request = urllib.request.Request(
    os.environ["KUBEFLOW_TRAINER_SERVER_URL"],
    json.dumps({"trainerStatus": status}).encode(),
    {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
)
trusted = ssl.create_default_context(cafile=os.environ["KUBEFLOW_TRAINER_SERVER_CA_CERT"])
urllib.request.urlopen(request, timeout=8, context=trusted).close()
