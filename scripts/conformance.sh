#!/usr/bin/env bash
# Suites that nobody here wrote, under torchrun and under ttprun: see the head of scripts/conformance/conformance.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_venv test
# What torch's own tests import beside torch.
if [[ ! -d .conformance/packages/expecttest ]]; then
    say_progress "installing expecttest into .conformance" .venv/bin/python -m pip install --quiet \
        --disable-pip-version-check --no-deps --target .conformance/packages expecttest==0.3.0
fi
exec .venv/bin/python scripts/conformance/conformance.py "$@"
