#!/usr/bin/env bash
# Build sdist and wheel into build/dist (the wheel from the sdist), install each into a new environment, and run what a
# user runs first. Dependencies come from .venv, so nothing large is installed: some ten seconds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

prepare_venv test
rm -rf build/dist build/package-venv
packages=$(.venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
if [[ ! -x build/tools/bin/hatchling ]]; then
    .venv/bin/python -m venv build/tools
    build/tools/bin/python -m pip install --quiet --disable-pip-version-check build "hatchling>=1.27"
fi
tools=$(build/tools/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
build/tools/bin/python -m build --no-isolation --outdir build/dist . >build/package.log ||
    { tail -n 20 build/package.log >&2 && exit 1; }
for package in build/dist/*.whl build/dist/*.tar.gz; do
    .venv/bin/python -m venv --clear --without-pip build/package-venv
    PYTHONPATH=$tools build/tools/bin/python -m pip --python build/package-venv/bin/python install --quiet --disable-pip-version-check \
        --no-deps --no-index --no-build-isolation "$package"
    # PYTHONPATH: folders in it have no .pth files, so that the checkout, which .venv has as an editable one, is not found.
    (
        cd build/package-venv
        export PYTHONPATH=$packages
        bin/ttprun --version
        bin/ttprun guide >/dev/null
        bin/ttprun guide support >/dev/null
        bin/ttprun guide configuration >/dev/null
        where=$(bin/python -c "import ttprun; print(ttprun.__file__)")
        [[ $where == "$PWD"/* ]] || { echo "error: $package was not tried, but $where" >&2 && exit 1; }
        shipped=$(bin/python -c "from ttprun.config_sources import shipped; print(shipped())")
        bin/ttprun drill "$shipped/drills/one_kill.yaml" --dry-run >/dev/null # what 'ttprun demo' runs
        bin/ttprun --config debug --dry-run -m ttprun >/dev/null
    )
    echo "installed and started: $package"
done
