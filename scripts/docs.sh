#!/usr/bin/env bash
# Build the handbook as a site: build/docs/site/index.html. A link that leads nowhere is an error (--strict).
# Its tools have an environment of their own, build/docs-venv, without torch, which no page needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=build/docs-venv/bin/python
if [[ ! -x $python ]]; then
    "${PYTHON:-python3}" -m venv build/docs-venv
    $python -m pip install --quiet --disable-pip-version-check \
        "mkdocs-material>=9.5,<10" typer rich psutil pyyaml "pydantic>=2" msgpack "msgspec>=0.20" numpy xxhash
fi
rm -rf build/docs
PYTHONPATH=. $python scripts/docs_pages.py build/docs
# Not --quiet: what is not shown is not counted by --strict either.
NO_MKDOCS_2_WARNING=1 $python -m mkdocs build --strict --config-file build/docs/mkdocs.yml
echo "built: build/docs/site/index.html"
