"""Suites that nobody here wrote, run under torchrun and under ttprun with every hook in: what passes must be the same.

    ./scripts/conformance.sh                      all suites (an hour or two on 2 cores); renews results.json
    ./scripts/conformance.sh --quick              a few of them (some minutes)
    ./scripts/conformance.sh test_weakref numpy   these only; the others' results stay as they are
    ./scripts/conformance.sh --list               what there is

Each test is run between two steps of a small optimizer in the same process, and at its assertions (in_rank.py). A test
that differs is run again alone, in both. Whatever still differs needs a reason in reasons.json, by the names of the
suite and the test; without one the exit code is 1. Results: results.json. Begin with `SUITES` and `run_suite`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ttprun.chaos.trial.twins import Launch, clean_environment

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PACKAGES = REPOSITORY / ".conformance" / "packages"
LIMIT_S = 1500.0  # of one launch
DISTRIBUTED = "torch.testing._internal.distributed.distributed_test"
Outcomes = dict[str, tuple[str, str]]  # test -> passed, skipped or failed; and the error's last line


@dataclass(frozen=True)
class Suite:
    """One suite.

    kind     of in_rank.py; "script": the names are scripts, which are run to their end by themselves
    names    of modules, files or tests; of "distributed" all there are, if none is named
    follows  the module or package whose files count as the user's own code: their loops and frames are followed
    """

    name: str
    kind: str
    names: tuple[str, ...] = ()
    ranks: int = 1
    follows: str = ""
    is_quick: bool = False


def _of_cpython(module: str) -> Suite:
    return Suite(module, "unittest", (f"test.{module}",), follows="test", is_quick=module in _QUICK)


_QUICK = {"test_frame", "test_fork1", "test_generators"}
_CPYTHON = (
    "test_frame test_inspect test_generators test_coroutines test_weakref test_gc test_logging test_warnings test_sys "
    "test_signal test_threading test_fork1 test_io test_random test_traceback test_scope test_contextlib test_copy"
)
_NUMPY = ("numpy.random.tests.test_random", "numpy._core.tests.test_multiarray", "numpy.lib.tests.test_io")
_ACCELERATE = ("test_script", "test_sync", "test_ops")
SUITES = (
    *map(_of_cpython, _CPYTHON.split()),
    *(Suite(name, "script", (f"accelerate.test_utils.scripts.{name}",), ranks=2) for name in _ACCELERATE),
    Suite("numpy", "pytest", _NUMPY, follows="numpy._core.tests"),
    Suite("distributed_test", "distributed", ranks=3, follows=DISTRIBUTED),
)


@dataclass
class Launched:
    """What one suite came to under one launcher.

    problem      how its launches have ended, if not well
    protection   as ttprun reports it at the end
    """

    outcomes: Outcomes = field(default_factory=dict)
    steps: int = 0
    took_s: float = 0.0
    problem: str = ""
    protection: str = ""


def launch(suite: Suite, launcher: Literal["torchrun", "ttprun"], names: Sequence[str], place: Path) -> Launched:
    """Run tests of a suite by torchrun or ttprun; those that a launch has not come to are run by another one."""
    launched, names_left, started_s = Launched(), list(names), time.monotonic()
    while names_left:
        folder = place / f"{launcher}{len(list(place.iterdir()))}"
        code = _run(suite, launcher, names_left, folder)
        noted = list(_notes(folder, suite, code))
        for test, outcome, detail, steps in noted:
            launched.steps = max(launched.steps, steps)
            if test and launched.outcomes.get(test, ("passed",))[0] != "failed":
                launched.outcomes[test] = (outcome, detail)
        if launcher == "ttprun":
            launched.protection = _protection(folder / "run" / "status.json") or launched.protection
        come_to = [at for at, name in enumerate(names_left) if name in launched.outcomes]
        if code or not any(outcome == "ended" for _, outcome, _, _ in noted) or suite.kind != "distributed":
            launched.problem = "" if not code else f"exit code {code}: {_last_words(folder)}"
        if suite.kind != "distributed" or not come_to or len(launched.outcomes) >= len(names):
            break
        names_left = names_left[max(come_to) + 1 :]
    launched.took_s = time.monotonic() - started_s
    return launched


def _run(suite: Suite, launcher: Literal["torchrun", "ttprun"], names: Sequence[str], folder: Path) -> int:
    """One launch; returns its exit code, 124 if it took too long."""
    (folder / "work").mkdir(parents=True)
    ours = [] if suite.kind == "script" else [str(HERE / "in_rank.py"), str(folder), suite.kind]
    command = [*(ours or ["-m"]), *names]
    options = ["--standalone", "--nproc-per-node", str(suite.ranks)]
    twin = Launch(launcher, options, command, _environment(suite, folder), LIMIT_S, folder / "work").run(folder)
    return 124 if twin.problem else twin.exit_code


def _environment(suite: Suite, folder: Path) -> dict[str, str]:
    clean = clean_environment()
    clean |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "BACKEND": "gloo", "TEMP_DIR": str(folder / "temporary")}
    clean["ACCELERATE_USE_CPU"] = "true"  # else each rank trains alone where there is no GPU
    for name in ("barrier", "test_dir"):  # as distributed_test has them
        (folder / "temporary" / name).mkdir(parents=True)
    clean["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), str(REPOSITORY)])
    if suite.follows:
        clean["TTPRUN_USER_PATHS"] = _place_of(suite.follows)
    return clean


def _place_of(module: str) -> str:
    """The folder of a package, or the file of a module. Imports no more than the packages that it is in."""
    from importlib.util import find_spec

    spec = find_spec(module)
    assert spec is not None
    place = next(iter(spec.submodule_search_locations or ()), spec.origin)
    assert place is not None
    return place


def _notes(folder: Path, suite: Suite, code: int) -> Iterator[tuple[str, str, str, int]]:
    """Test, outcome, detail and steps so far, of all ranks; of a script that is run by itself its exit code."""
    if suite.kind == "script":
        yield suite.name, "passed" if code == 0 else "failed", "" if code == 0 else _last_words(folder), 0
        return
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            yield note["test"], note["outcome"], note["detail"], note["steps"]


def _last_words(folder: Path) -> str:
    logs = [folder / "launcher.log", *sorted(folder.glob("logs/*/attempt_*/*/stderr.log"))]
    lines = [line for path in logs for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"Error|error:|Signal|signal", line)]
    return (errors or lines or [""])[-1].strip()[:300]


def _protection(status: Path) -> str:
    try:
        return str(json.loads(status.read_text(encoding="utf-8")).get("protection", ""))[:300]
    except (OSError, ValueError):
        return ""


def run_suite(suite: Suite, reasons: dict[str, str], keep: Path | None) -> dict[str, Any]:
    """Run a suite under both, and what differs once more; returns its part of the results."""
    place = Path(tempfile.mkdtemp(prefix="ttprun-conformance-", dir=keep))
    try:
        names = suite.names or tuple(_all_distributed())
        plain, ours = (launch(suite, launcher, names, place) for launcher in ("torchrun", "ttprun"))
        differing = _differing(plain.outcomes, ours.outcomes)
        again = differing
        if differing and suite.kind in ("unittest", "distributed"):
            second = [launch(suite, launcher, differing, place).outcomes for launcher in ("torchrun", "ttprun")]
            again = _differing(*second)
    finally:
        if keep is None:
            shutil.rmtree(place, ignore_errors=True)
    differences = [
        {
            "test": test,
            "torchrun": ": ".join(filter(None, plain.outcomes.get(test, ("not run", "")))),
            "ttprun": ": ".join(filter(None, ours.outcomes.get(test, ("not run", "")))),
            "also alone": test in again,
            "reason": _reason(f"{suite.name} {test}", reasons),
        }
        for test in differing
    ]
    counts = {
        name: {
            what: sum(outcome == what for outcome, _ in launched.outcomes.values())
            for what in ("passed", "skipped", "failed")
        }
        for name, launched in (("torchrun", plain), ("ttprun", ours))
    }
    problems = {
        name: launched.problem for name, launched in (("torchrun", plain), ("ttprun", ours)) if launched.problem
    }
    return {
        **_circumstances(),
        "ranks": suite.ranks,
        **counts,
        "steps": ours.steps,
        "seconds": [round(plain.took_s), round(ours.took_s)],
        "problems": problems,
        "protection at the end": ours.protection,
        "differences": differences,
    }


def _all_distributed() -> Iterable[str]:
    """The tests of torch's distributed_test that need no GPU, read from its text: to import it takes seconds."""
    text = Path(_place_of(DISTRIBUTED)).read_text(encoding="utf-8")
    names = re.findall(r"^        def (test_\w+)\(self", text, re.MULTILINE)
    return [name for name in dict.fromkeys(names) if not re.search("cuda|nccl|gpu", name, re.IGNORECASE)]


def _differing(first: Outcomes, other: Outcomes) -> list[str]:
    nothing = ("not run", "")
    return [test for test in {**first, **other} if first.get(test, nothing)[0] != other.get(test, nothing)[0]]


def _reason(name: str, reasons: dict[str, str]) -> str:
    return next((reason for pattern, reason in reasons.items() if re.search(pattern, name)), "")


def _circumstances() -> dict[str, str]:
    from importlib.metadata import version

    commit = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def main() -> int:
    """Run what is asked for, and renew its results; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE")
    parser.add_argument("--quick", action="store_true", help="a few suites")
    parser.add_argument("--list", action="store_true", help="print the suites' names")
    parser.add_argument("--results", type=Path, default=HERE / "results.json", help="the file to renew")
    parser.add_argument("--keep", type=Path, help="a folder for all that the launches leave")
    asked = parser.parse_args()
    suites = {suite.name: suite for suite in SUITES}
    unknown = [name for name in asked.suites if name not in suites]
    if unknown:
        print(f"error: there is no suite '{unknown[0]}'; --list names all", file=sys.stderr)
        return 2
    chosen = [suites[name] for name in asked.suites] or [suite for suite in SUITES if suite.is_quick or not asked.quick]
    if asked.list:
        print(*suites, sep="\n")
        return 0
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
    reasons = json.loads((HERE / "reasons.json").read_text(encoding="utf-8"))
    unexplained = 0
    for suite in chosen:
        print(f"{suite.name} ...", flush=True)
        result = run_suite(suite, reasons, asked.keep)
        results = json.loads(asked.results.read_text(encoding="utf-8")) if asked.results.exists() else {}
        results[suite.name] = result
        asked.results.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")
        print(f"  torchrun {result['torchrun']}, ttprun {result['ttprun']}, {result['seconds']} s", flush=True)
        for problem in result["problems"].items():
            print("  problem:", *problem)
        for row in result["differences"]:
            print(f"  DIFFERS: {row['test']}: torchrun {row['torchrun']}; ttprun {row['ttprun']}")
            print(f"    {row['reason'] or 'WITHOUT A REASON'}", flush=True)
        unexplained += sum(not row["reason"] for row in result["differences"]) + ("ttprun" in result["problems"])
    print("all the same, or with a reason" if not unexplained else f"{unexplained} without a reason")
    return int(unexplained > 0)


if __name__ == "__main__":
    raise SystemExit(main())
