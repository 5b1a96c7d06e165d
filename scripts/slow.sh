#!/usr/bin/env bash
# The slow tests, which CI runs in turns: whole runs that tests/e2e/ordinary.txt does not list, and what is marked slow.
#
#   ./scripts/slow.sh [options] [arguments of pytest]
#
#   ./scripts/slow.sh -n 3                          all of them, three at a time
#   ./scripts/slow.sh --record -k test_nodes        some, and write what came of each to tests/results/slow.json
#   ./scripts/slow.sh --turn auto --limit-s 720     the part of this commit (or --turn 3), for at most 12 minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_venv test
.venv/bin/python -m compileall -q ttprun
exec .venv/bin/python -m pytest -n 0 --xfail-tb -p tests.turns -m slow tests/e2e tests/alone tests/cli tests/device "$@"
