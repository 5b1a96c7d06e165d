"""The scenario of a drill: a YAML file that says what to run, which faults to cause, and what must be identical.

Begin with `Scenario`; `read_scenario` checks a file and says in one line what is wrong with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ttprun.chaos.faults import parse_fault
from ttprun.config import Config, LaunchValue, Seconds
from ttprun.config_sources import ConfigSource, read_yaml, resolve, validated
from ttprun.errors import Complaints, ConfigError, suggestion

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
