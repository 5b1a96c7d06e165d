"""`ttprun drill` with twins that are no training: small scripts under the real launchers are in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ttprun.chaos.trial import drill
from ttprun.chaos.trial.drill import Scenario
from ttprun.chaos.trial.twins import Twin
from ttprun.cli.main import main

STRUCK = {"event": "fault_injected", "number": 1, "fault": "kill:rank=1,step=5", "kind": "kill", "rank": 1}
STRUCK |= {"phase": "backward", "step": 5, "at_s": 10.0, "pid": 7}
LOST = {"event": "rank_exited", "rank": 1, "pid": 7, "code": None, "at_s": 10.01}
INCIDENT = {
    "event": "incident",
    "id": 1,
    "ranks": [1],
    "opened_at_s": 10.01,
    "total_s": 0.5,
    "rung": "replace",
    "at_s": 10.5,
}


class FakeTwins:
    """Takes the place of `run_twin`: nothing is started, and each twin ends as it was ordered to."""

    def __init__(self, output: list[str], outcome: str = "recovered", exit_code: int = 0) -> None:
        self.output, self.outcome, self.exit_code = output, outcome, exit_code

    def __call__(self, scenario: Scenario, folder: Path, kind: str, is_hopeless: object = None) -> Twin:
        if kind != "disturbed":
            return Twin(folder, 0, 1.0, {0: ["loss 1"]})
        events = [STRUCK, LOST, INCIDENT | {"outcome": self.outcome}]
        return Twin(folder, self.exit_code, 2.0, {0: self.output}, events=events)


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "s.yaml").write_text("script: train.py\nfaults:\n  - kill:rank=1,step=5\nrungs: [replace]\n")
    return str(tmp_path / "s.yaml")


def test_a_drill_that_ends_identically_pairs_the_fault_with_its_recovery(
    scenario: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drill, "run_twin", FakeTwins(["loss 1"]))

    code = main(["drill", scenario])

    out = capsys.readouterr().out
    assert code == 0
    assert "incident 1, recovered" in out
    assert "0.010 s" in out
    assert "identical · 2.0 s with faults, 1.0 s without" in out


@pytest.mark.parametrize(
    ("twins", "problem"),
    [
        (FakeTwins(["loss 2"]), "NOT IDENTICAL"),
        (FakeTwins(["loss 1"], outcome="failed"), "incident 1 ended as failed"),
        (FakeTwins(["loss 1"], exit_code=137), "the disturbed run ended with exit code 137, undisturbed 0"),
    ],
)
def test_a_drill_that_goes_wrong_says_what_and_ends_with_1(
    scenario: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    twins: FakeTwins,
    problem: str,
) -> None:
    monkeypatch.setattr(drill, "run_twin", twins)

    code = main(["drill", scenario])

    assert code == 1
    assert problem in capsys.readouterr().out


def test_the_report_is_there_in_json(
    scenario: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drill, "run_twin", FakeTwins(["loss 2"]))

    code = main(["drill", scenario, "--json"])

    reported = json.loads(capsys.readouterr().out)
    assert code == 1
    assert not reported["identical"]
    assert reported["injections"][0]["incident"] == 1
    assert reported["comparisons"][0]["detail"] == "line 1: 'loss 2', undisturbed 'loss 1'"


def test_a_dry_run_shows_both_commands_and_starts_nothing(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["drill", scenario, "--dry-run"])

    out = capsys.readouterr().out
    assert code == 0
    assert "torchrun --nproc_per_node=2" in out
    assert "--fault kill:rank=1,step=5" in out


def test_each_error_of_a_bad_scenario_is_one_line_and_the_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.yaml").write_text("scrip: train.py\n")

    code = main(["drill", str(tmp_path / "s.yaml")])

    errors = capsys.readouterr().err.splitlines()
    assert code == 2
    assert errors[0].endswith("scrip: unknown; did you mean 'script'?")
    assert all(error.startswith("ttprun: error: ") for error in errors)
