#!/usr/bin/env bash
# Make .venv if it is missing or outdated, then run the tests: ./scripts/test.sh [arguments of pytest]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_venv test
exec .venv/bin/python -m pytest "$@"
