#!/usr/bin/env bash
# On a machine with a GPU: kill and recover with CUDA tensors, and what a step costs: ./scripts/gpu_check.sh [--help]
# Uses the Python that PYTHON names if torch is in it (a torch with CUDA is not installed), else .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

python=${PYTHON:-python3}
if ! "$python" -c 'import torch, pydantic, msgpack, msgspec, xxhash' 2>/dev/null; then
    prepare_venv
    python=.venv/bin/python
fi
exec "$python" scripts/gpu_check/check.py "$@"
