"""A whole drill: both twins, what differs, and which fault came to what. Begin with `rehearse`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ttprun.chaos.drill.compare import Injection, OutputComparison, compare_runs, pair
from ttprun.chaos.drill.scenario import Scenario
from ttprun.chaos.drill.twins import Twin, run_twin
from ttprun.errors import counted
from ttprun.observe.events import read_events


@dataclass(frozen=True)
class DrillReport:
    """What a drill has shown.

    problems   why it has not gone well, one sentence each; empty if it has
    """

    disturbed: Twin
    undisturbed: Twin
    injections: list[Injection]
    comparisons: list[OutputComparison]
    problems: list[str]

    @property
    def is_identical(self) -> bool:
        """Whether all that was compared is the same."""
        return bool(self.comparisons) and all(comparison.is_identical for comparison in self.comparisons)

    @property
    def has_passed(self) -> bool:
        """Whether every fault struck and was recovered from, and nothing differs."""
        return self.is_identical and not self.problems

    def to_json(self) -> dict[str, Any]:
        """Everything, for programs."""
        twins = {"disturbed": self.disturbed, "undisturbed": self.undisturbed}
        return {
            "passed": self.has_passed,
            "identical": self.is_identical,
            "problems": self.problems,
            "injections": [asdict(injection) for injection in self.injections],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
            "incidents": [asdict(past) for past in self.disturbed.status.incidents] if self.disturbed.status else [],
            **{
                name: {"exit_code": twin.exit_code, "took_s": round(twin.took_s, 3), "folder": str(twin.folder)}
                for name, twin in twins.items()
            },
        }


def rehearse(scenario: Scenario, folder: Path, say: Callable[[str], None]) -> DrillReport:
    """Run both twins, one after the other, and compare them. Blocks at most twice the scenario's `limit_s`.

    folder   empty or absent; keeps both runs
    say      hears how far the drill is
    """
    say(f"1/2  {scenario.twin} without faults ...")
    undisturbed = run_twin(scenario, folder / "undisturbed", scenario.twin)
    say(f"     done in {undisturbed.took_s:.1f} s, exit code {undisturbed.exit_code}")
    say(f"2/2  ttprun with {counted(len(scenario.faults), 'ordered fault')} ...")
    disturbed = run_twin(scenario, folder / "disturbed", "disturbed", _Story(folder, say).look)
    say(f"     done in {disturbed.took_s:.1f} s, exit code {disturbed.exit_code}")
    injections = pair(disturbed.events)
    comparisons = compare_twins(scenario, disturbed, undisturbed)
    problems = problems_of(scenario, disturbed, undisturbed, injections)
    return DrillReport(disturbed, undisturbed, injections, comparisons, problems)


class _Story:
    """Says what happens to the ranks of the disturbed twin while it runs."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._events, self._say = folder / "disturbed" / "run" / "events.jsonl", say
        self._count = 0

    def look(self) -> str:
        """Say what is new; returns "", for the twin is waited for."""
        events = list(read_events(self._events)) if self._events.exists() else []
        for event in events[self._count :]:
            if (text := _sentence(event)) is not None:
                self._say(f"     {text}")
        self._count = len(events)
        return ""


def _sentence(event: dict[str, Any]) -> str | None:
    """An event in a few words; None if the report at the end is enough."""
    match event["event"]:
        case "fault_injected":
            return f"{event['kind']} strikes rank {event['rank']} in step {event['step']}"
        case "rank_started" if event["is_replacement"]:
            return f"rank {event['rank']} has a new process, pid {event['pid']}"
        case "incident" if event["outcome"] != "open":
            return f"{event['outcome']} in {event['total_s']:.2f} s, {event['steps_lost']} steps lost"
    return None


def compare_twins(scenario: Scenario, disturbed: Twin, undisturbed: Twin) -> list[OutputComparison]:
    """Compare all that the scenario names: its files, and if it says so the output of each rank."""
    outputs = (disturbed.output, undisturbed.output) if scenario.compare_output else ({}, {})
    return compare_runs(scenario.compare, (disturbed.folder, undisturbed.folder), outputs)


def problems_of(scenario: Scenario, disturbed: Twin, undisturbed: Twin, injections: list[Injection]) -> list[str]:
    """What has not gone well, apart from differences: a sentence each.

    disturbed, undisturbed   both twins, which have ended
    injections               the faults of the disturbed one, as paired with its incidents
    """
    problems = []
    for name, twin in (("undisturbed", undisturbed), ("disturbed", disturbed)):
        if twin.problem:
            problems.append(f"the {name} run: {twin.problem}; see {twin.folder / 'launcher.log'}")
    if undisturbed.exit_code != 0 and not undisturbed.problem:
        log = undisturbed.folder / "launcher.log"
        problems.append(f"the undisturbed run fails on its own (exit code {undisturbed.exit_code}); see {log}")
    if disturbed.exit_code != undisturbed.exit_code and not disturbed.problem:
        both = f"{disturbed.exit_code}, undisturbed {undisturbed.exit_code}"
        problems.append(f"the disturbed run ended with exit code {both}; see {disturbed.folder / 'launcher.log'}")
    if not injections:
        problems.append("no fault was caused at all")
    for injection in injections:
        if injection.failure:
            problems.append(f"{injection.fault} was not caused: {injection.failure}")
        elif not injection.is_accounted_for:
            problems.append(f"{injection.fault} struck, and ttprun did not notice")
        elif injection.incident is not None and injection.outcome not in ("recovered", "restarted"):
            problems.append(f"{injection.fault}: incident {injection.incident} ended as {injection.outcome}")
        elif injection.incident is not None and scenario.rungs and injection.rung not in scenario.rungs:
            problems.append(
                f"{injection.fault}: recovered by {injection.rung}, and only {', '.join(scenario.rungs)} is good enough"
            )
    return problems
