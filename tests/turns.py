"""The slow list in turns: each commit runs one part of it, so that any eight successive commits run all of it.

    pytest -p tests.turns -m slow tests --turn auto --limit-s 720     the part of this commit, for 12 minutes
    pytest -p tests.turns -m slow tests --record -n 3                 all of it, and write down what came of it

What was seen is in tests/results/slow.json: of each case how long it took, when it was last green and with what. A case
that was never seen green, and one that not_green.yaml names, is run, and its failure reported, but blocks no change:
such a case is a claim less, not a fault of the change. Begin with `deal` and `order`, which are pure.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commits import REPOSITORY, RESULTS, TURNS, git, turn_of_head, with_what, write_results

SLOW = RESULTS / "slow.json"
NOT_GREEN = RESULTS / "not_green.yaml"
UNKNOWN_S = 12.0  # what cases are taken to last if none was ever run

# Of what was collected: test function (function_of) -> whether a case of it is not slow.
ORDINARY: pytest.StashKey[dict[str, bool]] = pytest.StashKey()

Results = dict[str, dict[str, Any]]


def deal(seconds: Mapping[str, float], turns: int = TURNS) -> list[set[str]]:
    """Deal cases out to turns that last about as long as each other; the same cases give the same turns.

    seconds  case -> how long it lasts
    returns  [turns]  sets of cases; each case is in one
    """
    parts: list[set[str]] = [set() for _ in range(turns)]
    loads = [0.0] * turns
    for case in sorted(seconds, key=lambda case: (-seconds[case], case)):
        least = min(range(turns), key=lambda turn: loads[turn])
        parts[least].add(case)
        loads[least] += seconds[case]
    return parts


def lasting(cases: Collection[str], results: Results) -> dict[str, float]:
    """How long each case lasts, in seconds; what was never run is taken to last as long as the median of the others."""
    known = {case: float(results[case]["seconds"]) for case in cases if "seconds" in results.get(case, {})}
    unknown_s = statistics.median(known.values()) if known else UNKNOWN_S
    return {case: known.get(case, unknown_s) for case in cases}


def order(cases: Collection[str], results: Results, changed: Collection[str], seed: str) -> list[str]:
    """The order in which to run them: what failed last, what was never run, what was changed, then everything else.

    changed  names of test files that the commit has changed
    seed     within each kind the order is drawn from it: where time runs out, it is not always for the same
    """

    def place(case: str) -> tuple[int, str]:
        result = results.get(case, {})
        kinds = ("failed" in result, not result, case.split("::")[0] in changed, True)
        return kinds.index(True), hashlib.sha256(f"{seed} {case}".encode()).hexdigest()

    return sorted(cases, key=place)


def why_no_block(case: str, results: Results, not_green: Mapping[str, str]) -> str:
    """Why a failure of this case blocks no change; "" if it does."""
    if case in not_green:
        return not_green[case]
    return "" if "green" in results.get(case, {}) else "never seen green"


def load_results() -> Results:
    """What was seen so far; {} if there is no file."""
    loaded: Results = json.loads(SLOW.read_text(encoding="utf-8")) if SLOW.exists() else {}
    return loaded


def load_not_green() -> dict[str, str]:
    """case -> why it is known to fail."""
    return yaml.safe_load(NOT_GREEN.read_text(encoding="utf-8")) or {}


def case_of(item: pytest.Item) -> str:
    """A test's name as ordinary.txt and slow.json have it."""
    return f"{item.path.name}::{item.name}"


def function_of(item: pytest.Item) -> str:
    """The function of a test, as support.yaml has it: e2e/test_replace.py::test_a_rank_..."""
    return f"{item.path.relative_to(REPOSITORY / 'tests')}::{item.name.partition('[')[0]}"


class Turn:
    """The cases of one run: which of them, in which order, for how long, and what came of them.

    turn     None: all that were asked for
    limit_s  no case is begun later than that; None: no limit
    """

    def __init__(self, turn: int | None, limit_s: float | None, is_recorded: bool) -> None:
        self._turn = turn
        self._limit_s = limit_s
        self._is_recorded = is_recorded
        self._began_s = 0.0
        self._left: list[str] = []
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}
        self._what = with_what()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep this turn's cases, in their order; mark those whose failure blocks nothing."""
        results, not_green = load_results(), load_not_green()
        cases = {case_of(item): item for item in items if self._turn is None or item.get_closest_marker("slow")}
        chosen = set(cases)
        if self._turn is not None:
            # Dealt out from all that there are, whatever was asked for, so that a turn is the same each time.
            chosen = deal(lasting(cases, results))[self._turn]
        changed = {Path(path).name for path in git("diff", "--name-only", "HEAD~1", "HEAD").splitlines()}
        kept = [cases[case] for case in order(chosen, results, changed, self._what["commit"])]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
        for case in chosen:
            if why := why_no_block(case, results, not_green):
                cases[case].add_marker(pytest.mark.xfail(reason=why, strict=False))

    @pytest.hookimpl(tryfirst=True)  # before xdist's, after which no other is called
    def pytest_runtestloop(self) -> None:
        """The time runs from the first case on."""
        self._began_s = time.monotonic()

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave a case out when the time is up."""
        if self._limit_s is None or time.monotonic() - self._began_s < self._limit_s:
            return None
        self._left.append(case_of(item))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what came of a case, of its fixtures, too; with workers, here come those of all of them."""
        case = f"{Path(report.nodeid.partition('::')[0]).name}::{report.nodeid.partition('::')[2]}"
        self._seconds[case] = self._seconds.get(case, 0.0) + report.duration
        outcome = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "failed" if report.skipped else "passed"
        if self._outcomes.get(case) not in ("failed", "skipped"):
            self._outcomes[case] = outcome
        if report.when == "teardown" and self._is_recorded:
            self._record(case)

    def _record(self, case: str) -> None:
        # Read anew each time: another run may have written, and this one may be ended at any moment.
        results = load_results()
        entry = results.setdefault(case, {})
        outcome = self._outcomes[case]
        for old in ("failed", "skipped"):
            entry.pop(old, None)
        if outcome == "passed":
            entry["green"] = self._what
            entry["seconds"] = round(self._seconds[case], 1)
        else:
            entry[outcome] = self._what
        write_results(SLOW, results)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line on what was run and what was left."""
        which = "all turns" if self._turn is None else f"turn {self._turn + 1} of {TURNS}"
        counts = [f"{list(self._outcomes.values()).count(kind)} {kind}" for kind in ("passed", "failed", "skipped")]
        spent_s = time.monotonic() - self._began_s
        terminalreporter.section("the slow list")
        terminalreporter.line(
            f"{which}: {len(self._outcomes)} cases in {spent_s:.0f} s ({', '.join(counts)}); "
            f"{len(self._left)} left for lack of time"
        )
        for case in self._left:
            terminalreporter.line(f"  left: {case}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of this module."""
    group = parser.getgroup("turns", "the slow list in turns")
    group.addoption("--turn", help=f"1 to {TURNS}; auto: that of the commit; without it, all")
    group.addoption("--limit-s", type=float, help="begin no case later than that")
    group.addoption("--record", action="store_true", help=f"write what came of each case to {SLOW.name}")


def pytest_configure(config: pytest.Config) -> None:
    """Take part in this run."""
    asked = config.getoption("--turn")
    turn = None if asked is None else turn_of_head() if asked == "auto" else int(asked) - 1
    if turn is not None and not 0 <= turn < TURNS:
        raise pytest.UsageError(f"--turn {asked}: not one of 1 to {TURNS}, and not auto")
    limit_s, workers = config.getoption("--limit-s"), config.getoption("numprocesses", None)
    if limit_s is not None and workers:
        raise pytest.UsageError(f"--limit-s goes with -n 0 only, not with -n {workers}")
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Turn(turn, limit_s, config.getoption("--record") and not is_worker))
