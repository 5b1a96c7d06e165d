#!/usr/bin/env bash
# On a machine with a GPU: what works there, in twelve minutes: ./scripts/gpu_check.sh [--help]
# Uses the Python that PYTHON names (default: python3) if all that ttprun needs is in it, or on PYTHONPATH; else .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

python=${PYTHON:-python3}
if ! missing=$("$python" -c 'import torch, numpy, typer, rich, psutil, yaml, pydantic, msgpack, msgspec, xxhash, safetensors' 2>&1); then
    echo "$python is not used: ${missing##*$'\n'}" >&2
    if "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then
        echo "error: its torch has CUDA, and .venv would get one without; put what is missing on PYTHONPATH (pip download)" >&2
        exit 2
    fi
    prepare_venv
    python=.venv/bin/python
fi
exec "$python" scripts/gpu_check/check.py "$@"
