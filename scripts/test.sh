#!/usr/bin/env bash
# Make .venv if it is missing or outdated, then run the tests: ./scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_venv test
# The tests start some thousand interpreters: where none may write bytecode, each would compile all of ttprun.
.venv/bin/python -m compileall -q ttprun
# Two at a time: whole runs (tests/e2e) one after another, and everything else next to them. In one process: -n 0.
exec .venv/bin/python -m pytest -n 2 --dist loadgroup "$@"
