# Sourced by demo.sh, test.sh and .ci/run. Needs Python 3.11 or newer with pip, and nothing else.

# prepare_venv [test]: make .venv in the current directory, or bring it up to date; if nothing is to be done, it takes no time.
# With "test" it gets the tools of the tests, too, and the frameworks that some of them train with. PYTHON names another
# interpreter than python3.
prepare_venv() {
    local extra=${1:-} python=${PYTHON:-python3} wanted stamp
    local stamps=(".venv/.installed-$extra" .venv/.installed-test) # the tests' environment holds everything
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: '$python' is not Python 3.11 or newer; name one that is: PYTHON=python3.12 $0" >&2
        return 2
    fi
    if command -v flock >/dev/null; then # two of these at once would install over each other
        exec 9>.venv.lock
        flock --nonblock 9 || { echo "waiting for another installation into .venv ..." && flock 9; }
    fi
    wanted=$({ pwd; "$python" --version; cat pyproject.toml tests/constraints.txt; } | sha256sum | cut -d ' ' -f 1)
    for stamp in "${stamps[@]}"; do
        if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
            exec 9>&-
            return 0
        fi
    done
    if [[ $(.venv/bin/python --version 2>/dev/null) != $("$python" --version) ]]; then
        say_progress "making .venv" "$python" -m venv --clear .venv
    fi
    rm -f .venv/.installed-*
    say_progress "installing ttprun, PyTorch${extra:+ and the tools of the tests} into .venv (some minutes the first time)" \
        .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        --constraint tests/constraints.txt --editable ".[web${extra:+,$extra,test-frameworks}]"
    echo "$wanted" >"${stamps[0]}"
    exec 9>&-
}

# say_progress TEXT COMMAND...: run a command, with a line at the start and one every ten seconds.
say_progress() {
    local text=$1 started=$SECONDS beat code=0
    shift
    echo "$text ..."
    (
        exec 9>&- >&2
        # The sleep outlives us for a moment: it must not hold a pipe that somebody reads to its end.
        while sleep 10 >/dev/null 2>&1; do echo "  still running, $((SECONDS - started)) s"; done
    ) &
    beat=$!
    trap 'kill "$beat" 2>/dev/null || true' EXIT
    "$@" || code=$?
    kill "$beat" 2>/dev/null || true
    wait "$beat" 2>/dev/null || true
    trap - EXIT
    if ((code)); then
        echo "error: this failed with exit code $code: $*" >&2
        return "$code"
    fi
    echo "  done in $((SECONDS - started)) s"
}
