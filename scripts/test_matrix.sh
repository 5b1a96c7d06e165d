#!/usr/bin/env bash
# Run tests on other releases of torch, or on other Pythons:
#
#   ./scripts/test_matrix.sh --torch 2.6 2.9 2.13 2.15    the smoke tests on each of these; without a number: TRIED
#   ./scripts/test_matrix.sh                              the ordinary tests on each Python that is installed (3.11 to 3.13)
#   ./scripts/test_matrix.sh --torch 2.6 -- -k killed     further arguments of pytest
#
# Each has a virtual environment of its own under .matrix/ (5 to 8 GB each; remove what you no longer need), kept for
# the next time. Exit code: 0 if all have passed; 1 if one has not, or could not be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

PYTHONS=(3.11 3.12 3.13)

main() {
    local what=python releases=() words=() failed=() left_out=()
    while (($#)); do
        case $1 in
            --torch) what=torch ;;
            --) shift && words=("$@") && break ;;
            -*) echo "error: unknown option $1; see the head of $0" >&2 && return 2 ;;
            *) releases+=("$1") ;;
        esac
        shift
    done
    if [[ $what == torch ]]; then
        ((${#releases[@]})) || read -ra releases <<<"$(tried)"
        for release in "${releases[@]}"; do
            on_torch "$release" "${words[@]}" || failed+=("torch $release")
        done
    else
        for release in "${PYTHONS[@]}"; do
            if python=$(python_of "$release"); then
                on_python "$release" "$python" "${words[@]}" || failed+=("Python $release")
            else
                left_out+=("$release")
            fi
        done
        ((!${#left_out[@]})) || echo "not on this machine, so not tested: Python ${left_out[*]}"
    fi
    if ((${#failed[@]})); then
        (IFS=, && echo "FAILED on: ${failed[*]}")
        return 1
    fi
    echo "passed on all"
}

# tried: the releases of torch with which ttprun was seen to work.
tried() {
    PYTHONPATH=. "${PYTHON:-python3}" -c 'from ttprun.torch_versions import TRIED; print(*TRIED)'
}

# python_of 3.12: the path of such an interpreter, if there is one that runs.
python_of() {
    local path
    for path in "python$1" ~/.pyenv/versions/"$1".*/bin/python; do
        path=$(command -v "$path") && "$path" -c 'import sys; print(sys.executable)' 2>/dev/null && return 0
    done
    return 1
}

# on_torch RELEASE ARGUMENT...: the smoke tests on that release. "newest": what the registry offers.
on_torch() {
    local release=$1 venv
    shift
    if [[ $release == newest ]]; then
        release=$(newest) && [[ -n $release ]] || { echo "error: the registry does not answer" && return 1; }
    fi
    venv=.matrix/torch-$release
    prepare "$venv" "${PYTHON:-python3}" "torch==$release.*" || return 1
    echo "smoke tests on torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)') ..."
    "$venv/bin/python" -m pytest -q -n 0 -p no:cacheprovider -m smoke tests/e2e "$@"
}

# newest: the newest release (2.15) that the registry offers.
newest() {
    "${PYTHON:-python3}" -m pip index versions torch 2>/dev/null | sed -n 's/^torch (\([0-9]*\.[0-9]*\).*/\1/p'
}

# on_python RELEASE PYTHON ARGUMENT...: the ordinary tests on that interpreter, with the newest torch that it can have.
on_python() {
    local release=$1 python=$2 venv=.matrix/python-$1
    shift 2
    prepare "$venv" "$python" torch || return 1
    echo "tests on Python $release ..."
    "$venv/bin/python" -m pytest -n 2 --dist loadgroup -p no:cacheprovider "$@"
}

# prepare VENV PYTHON TORCH: make the environment unless it is there. Ours goes in without its bounds: a release may be
# newer than those that were tried, which is what this finds out.
prepare() {
    local venv=$1 python=$2 torch=$3 stamp needed
    stamp=$({ pwd; "$python" --version; echo "$torch"; cat pyproject.toml; } | sha256sum | cut -d ' ' -f 1)
    [[ ! -f $venv/.installed || $(<"$venv/.installed") != "$stamp" ]] || return 0
    rm -f "$venv/.installed"
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv" || return 1
    readarray -t needed < <("$python" -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
all = [*project["dependencies"], *project["optional-dependencies"]["test"], "hatchling", "editables"]
print(*(name for name in all if not name.startswith("torch")), sep="\n")')
    # The tests' other pins hold here, too; only torch is to be another.
    grep -v '^torch\b' tests/constraints.txt >"$venv/constraints.txt"
    local pip=("$venv/bin/python" -m pip install --quiet --no-cache-dir --disable-pip-version-check
        --constraint "$venv/constraints.txt")
    say_progress "installing $torch into $venv" "${pip[@]}" "$torch" "${needed[@]}" || return 1
    "${pip[@]}" --no-deps --no-build-isolation --editable . || return 1
    echo "$stamp" >"$venv/.installed"
}

main "$@"
