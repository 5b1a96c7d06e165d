"""A drill: its scenario is a file that says what to run, which faults to cause, and what must be identical.

Begin with `Scenario`, which `read_scenario` checks, and with `rehearse`, which runs both twins and compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from ttprun.chaos.injected_faults import parse_fault
from ttprun.chaos.trial.compare import OutputComparison, compare_runs
from ttprun.chaos.trial.kills import Injection, pair
from ttprun.chaos.trial.twins import PLACES, Launch, Twin, clean_environment, words_of
from ttprun.config import Config, LaunchValue, Seconds
from ttprun.config_sources import ConfigSource, read_yaml, resolve, validated
from ttprun.errors import Complaints, ConfigError, counted, suggestion
from ttprun.observe.events import read_events

Text = Annotated[str, Field(min_length=1)]


class Scenario(BaseModel):
    """What a drill does. Paths are relative to the scenario's file, those of `compare` to each twin's own folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    script: Text = Field(description="the training script; relative to this file")
    arguments: list[str] = Field([], description="of the script; {folder} is the twin's own folder")
    directory: Text | None = Field(None, description="where the script runs; default: the twin's own folder")
    environment: dict[str, str] = Field({}, description="additional environment variables for both twins")
    launch: dict[str, LaunchValue] = Field({"nproc_per_node": 2}, description="torchrun's options for both twins")
    ttprun: dict[str, object] = Field({}, description="settings of ttprun for the disturbed twin, as in --config")
    faults: list[str] = Field(min_length=1, description="faults to cause, each as kill:rank=1,step=5,phase=backward")
    twin: Literal["torchrun", "ttprun"] = Field("torchrun", description="what runs the undisturbed twin")
    compare: list[Text] = Field([], description="files that must be identical; relative to the twin's folder")
    compare_output: bool = Field(True, description="whether each rank's lines on stdout must be identical")
    rungs: list[str] = Field([], description="kinds of recovery that are good enough, such as [replace]; default: any")
    limit_s: Seconds = Field(1800, description="seconds that each twin may take")

    @field_validator("faults")
    @classmethod
    def _faults_can_be_caused(cls, faults: list[str]) -> list[str]:
        for text in faults:
            if "=" in text.partition(":")[0]:
                raise ValueError(f"'{text}' is part of a fault; write faults one a line, or in quotes")
            fault = parse_fault(text)
            if "agent-kill" in fault.kinds:
                raise ValueError(f"fault '{text}' ends the whole run; use inject-fault for it")
            if fault.every is not None and fault.count is None:
                raise ValueError(f"fault '{text}' has no end, and a drill must have one; add a count")
        return faults

    @field_validator("launch", mode="before")
    @classmethod
    def _launch_is_as_in_a_configuration(cls, launch: object) -> object:
        return Config.model_validate({"launch": launch}).launch


def read_scenario(name: str) -> Scenario:
    """Read a scenario's file; its script and directory come back as full paths. Raises ConfigError, one line."""
    path = Path(name)
    content = read_yaml(path, f"scenario '{name}'")
    if not isinstance(content, dict):
        raise ConfigError(f"scenario '{name}' is not a mapping", "write one 'key: value' a line, as script: train.py")
    scenario = _check(name, {str(key): value for key, value in content.items()})
    script = path.parent / scenario.script
    if not script.is_file():
        raise ConfigError(f"{name}: script: there is no file '{script}'", "give its path relative to the scenario")
    directory = None if scenario.directory is None else path.parent / scenario.directory
    if directory is not None and not directory.is_dir():
        raise ConfigError(f"{name}: directory: there is no '{directory}'", "give its path relative to the scenario")
    if not scenario.compare and not scenario.compare_output:
        raise ConfigError(f"{name}: compare: nothing is to be compared", "name a file, or set compare_output: true")
    _check_settings(name, scenario)
    placed = {"script": str(script.resolve()), "directory": None if directory is None else str(directory.resolve())}
    return scenario.model_copy(update=placed)


def _check(name: str, values: dict[str, object]) -> Scenario:
    names = list(Scenario.model_fields)
    wrong = Complaints()
    for key in values:
        if key not in names:
            cure = suggestion(key, names, f"use one of {', '.join(names)}")
            wrong.add(ConfigError(f"{name}: {key}: unknown", cure))
    with wrong.noted():
        values_known = {key: value for key, value in values.items() if key in names}
        scenario = validated(Scenario, values_known, lambda key: f"{name}: {key}", is_strict=True)
    wrong.raise_any()
    return scenario


def _check_settings(name: str, scenario: Scenario) -> None:
    """What is said about ttprun must be a configuration of its own. Raises ConfigError."""
    taken = {"faults", "allow_faults", "launch", "run_dir", "run_id"} & scenario.ttprun.keys()
    if taken:
        raise ConfigError(f"{name}: ttprun: {taken.pop()} is set by the drill", "take it out of this section")
    resolve([ConfigSource("file", f"{name}: ttprun", scenario.ttprun)], {}, {})


def command_of(scenario: Scenario, folder: Path) -> list[str]:
    """The script and its arguments, as they are for the twin that runs in `folder`."""
    return [scenario.script, *(argument.replace("{folder}", str(folder)) for argument in scenario.arguments)]


def run_twin(
    scenario: Scenario,
    folder: Path,
    kind: Literal["disturbed", "torchrun", "ttprun"],
    is_hopeless: Callable[[], str] = lambda: "",
) -> Twin:
    """Run the scenario's script to its end, at most `limit_s` seconds, and gather what it has left.

    kind         "disturbed": under ttprun with the faults; else without, under the launcher of that name
    is_hopeless  as for `Launch.run`
    """
    folder.mkdir(parents=True)
    return launch_of(scenario, folder, kind).run(folder, is_hopeless)


def launch_of(scenario: Scenario, folder: Path, kind: str) -> Launch:
    """What runs a twin; under ttprun settings.yaml is written into `folder`, which exists. `kind` as for `run_twin`."""
    options, environment = words_of(scenario.launch), clean_environment() | scenario.environment
    command, where = command_of(scenario, folder), scenario.directory
    if kind == "torchrun":
        if not PLACES & scenario.launch.keys():
            options.append("--standalone")  # else it takes a fixed port, which another job may have
        return Launch("torchrun", options, command, environment, scenario.limit_s, where)
    faults = {"allow_faults": True, "faults": scenario.faults} if kind == "disturbed" else {}
    (folder / "settings.yaml").write_text(yaml.safe_dump(scenario.ttprun | faults), encoding="utf-8")
    options += ["--config", str(folder / "settings.yaml")]
    return Launch("ttprun", options, command, environment, scenario.limit_s, where)


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
        problems.append(
            f"the undisturbed run fails on its own (exit code {undisturbed.exit_code}); "
            f"see {undisturbed.folder / 'launcher.log'}"
        )
    if disturbed.exit_code != undisturbed.exit_code and not disturbed.problem:
        problems.append(
            f"the disturbed run ended with exit code {disturbed.exit_code}, undisturbed {undisturbed.exit_code}; "
            f"see {disturbed.folder / 'launcher.log'}"
        )
    if not injections:
        problems.append("no fault was caused at all")
    return problems + misses(injections, ("recovered", "restarted"), scenario.rungs)


def misses(injections: Sequence[Injection], outcomes: Collection[str], rungs: Sequence[str] = ()) -> list[str]:
    """A sentence for each fault that was not caused, not noticed, or not recovered from.

    outcomes  of an incident that are good enough
    rungs     kinds of recovery that are; none: all
    """
    problems = []
    for injection in injections:
        if injection.failure:
            problems.append(f"{injection.fault} was not caused: {injection.failure}")
        elif not injection.is_accounted_for:
            problems.append(f"{injection.fault} struck, and ttprun did not notice")
        elif injection.incident is not None and injection.outcome not in outcomes:
            problems.append(f"{injection.fault}: incident {injection.incident} ended as {injection.outcome}")
        elif injection.incident is not None and rungs and injection.rung not in rungs:
            problems.append(
                f"{injection.fault}: recovered by {injection.rung}, and only {', '.join(rungs)} is good enough"
            )
    return problems
