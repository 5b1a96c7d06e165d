#!/usr/bin/env bash
# Make .venv if it is missing or outdated, then show how a killed rank is replaced: ./scripts/demo.sh [--help]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_venv
exec .venv/bin/ttprun demo "$@"
