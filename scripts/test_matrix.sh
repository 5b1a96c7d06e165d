#!/usr/bin/env bash
# Run tests on other releases of torch, or on other Pythons:
#
#   ./scripts/test_matrix.sh --torch 2.6 newest --python 3.12    the smoke tests on each of these (newest: what pip takes)
#   ./scripts/test_matrix.sh --turn auto                         the pair of JOBS that is this commit's turn
#   ./scripts/test_matrix.sh                                     the ordinary tests on each Python that is installed
#   ./scripts/test_matrix.sh --torch 2.6 -- --record-version     further arguments of pytest: note it in the results
#
# Each pair has a virtual environment of its own in the user's cache folder (1 to 8 GB each; remove what you no longer
# need), kept for the next time. Exit code: 0 if all have passed; 1 if one has not; 3 if one could not be installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

PYTHONS=(3.11 3.12 3.13)
# "torch Python", in turns (tests/commits.py): the oldest release, one between, and the newest on two Pythons.
JOBS=("newest 3.11" "2.6 3.12" "newest 3.13" "2.9 3.11")
CACHE=${TTPRUN_TEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ttprun-tests}

main() {
    local what=python jobs=() releases=() words=() failed=() left_out=() job python=${PYTHON:-python3} release
    while (($#)); do
        case $1 in
            --torch) what=torch ;;
            --python) python=$2 && shift ;;
            --turn) what=jobs && jobs+=("${JOBS[$(turn "$2") % ${#JOBS[@]}]}") && shift ;;
            --) shift && words=("$@") && break ;;
            -*) echo "error: unknown option $1; see the head of $0" >&2 && return 2 ;;
            *) releases+=("$1") ;;
        esac
        shift
    done
    case $what in
        torch)
            ((${#releases[@]})) || read -ra releases <<<"$(tried)"
            for release in "${releases[@]}"; do jobs+=("$release $python"); done
            ;;
        python) for release in "${PYTHONS[@]}"; do jobs+=("newest $release"); done ;;
    esac
    for job in "${jobs[@]}"; do
        if ! python=$(python_of "${job#* }"); then
            left_out+=("${job#* }")
        else
            run_on "$what" "${job% *}" "$python" "${words[@]}" || failed+=("torch ${job% *}, ${job#* }: $?")
        fi
    done
    ((!${#left_out[@]})) || echo "not on this machine, so not tested: Python ${left_out[*]}"
    if ((${#failed[@]})); then
        (IFS=';' && echo "FAILED on (with exit code): ${failed[*]}")
        [[ "${failed[*]}" != *": 3" ]] || return 3
        return 1
    fi
    ((${#left_out[@]} == ${#jobs[@]})) || echo "passed on all"
}

# turn auto: the number of the turn, from 0, as with the slow tests.
turn() {
    [[ $1 != auto ]] || { "${PYTHON:-python3}" -m tests.commits && return; }
    echo $(($1 - 1))
}

# tried: the releases of torch with which ttprun was seen to work.
tried() {
    PYTHONPATH=. "${PYTHON:-python3}" -c 'from ttprun.torch_versions import TRIED; print(*TRIED)'
}

# python_of 3.12: the path of such an interpreter, if there is one that runs.
python_of() {
    local path
    for path in "python$1" ~/.pyenv/versions/"$1".*/bin/python "$1"; do
        path=$(command -v "$path") && "$path" -c 'import sys; print(sys.executable)' 2>/dev/null && return 0
    done
    return 1
}

# run_on WHAT RELEASE PYTHON ARGUMENT...: the smoke tests, or all ordinary ones, on that release and interpreter.
run_on() {
    local what=$1 release=$2 python=$3 venv
    shift 3
    venv=$CACHE/$("$python" -c 'import sys; print("python-%d.%d" % sys.version_info[:2])')-torch-$release
    mkdir -p "$CACHE"
    exec 8>"$venv.lock"
    flock 8 # another checkout may be at work with it
    prepare "$venv" "$python" "$([[ $release == newest ]] && echo torch || echo "torch==$release.*")" || return 3
    echo "tests on torch $("$venv/bin/python" -c 'import torch, sys; print(torch.__version__, "and Python", sys.version)') ..."
    if [[ $what == python ]]; then
        "$venv/bin/python" -m pytest -n 2 --dist loadgroup -p no:cacheprovider "$@"
    else
        "$venv/bin/python" -m pytest -q -n 0 -p no:cacheprovider -p tests.versions -m smoke tests/e2e "$@"
    fi
}

# prepare VENV PYTHON TORCH: make the environment unless it is there. Ours goes in without its bounds: a release may be
# newer than those that were tried, which is what this finds out. "torch": the newest, once a week.
prepare() {
    local venv=$1 python=$2 torch=$3 stamp needed
    stamp=$({ "$python" --version; echo "$torch"; [[ $torch != torch ]] || date +%G-%V; cat pyproject.toml; } | sha256sum)
    local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
    if [[ ! -f $venv/.installed || $(<"$venv/.installed") != "$stamp" ]]; then
        rm -f "$venv/.installed" "$venv/.checkout"
        [[ -x $venv/bin/python ]] || "$python" -m venv "$venv" || return 1
        readarray -t needed < <("$python" -c '
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
test = [name for one in extras["test"] for name in extras.get(one.removeprefix("ttprun[").rstrip("]"), [one])]
all = [*project["dependencies"], *test, "hatchling", "editables"]
print(*(name for name in all if not name.startswith("torch")), sep="\n")')
        # The tests' other pins hold here, too; only torch is to be another.
        grep -v '^torch\b' tests/constraints.txt >"$venv/constraints.txt"
        say_progress "installing $torch into $venv" \
            "${pip[@]}" --upgrade --constraint "$venv/constraints.txt" "$torch" "${needed[@]}" || return 1
        echo "$stamp" >"$venv/.installed"
    fi
    if [[ ! -f $venv/.checkout || $(<"$venv/.checkout") != "$PWD" ]]; then
        "${pip[@]}" --no-deps --no-build-isolation --editable . || return 1
        pwd >"$venv/.checkout"
    fi
}

main "$@"
