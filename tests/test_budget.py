"""Nothing grows unnoticed: statements, names, and what one package uses of another are held to tests/budget.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import budget


def test_no_package_and_no_wall_is_over_its_budget() -> None:
    over = budget.overdrawn(budget.figures(), budget.allowed())

    assert not over, "use a mechanism that is there, or add a rise with its reason to tests/budget.yaml: " + "; ".join(
        over
    )


def test_what_is_counted(tmp_path: Path) -> None:
    for name, text in {
        "device/__init__.py": '"""A package."""\n',
        "device/errors.py": (
            '"""Errors."""\n\nLIMIT = 3\n_OWN = 4\n\n\ndef why() -> str:\n    """Say why."""\n    return ""\n'
        ),
        "state/saves.py": (
            "from ttprun.device import errors\nfrom ttprun.device.errors import why\n\n"
            "def save(known: str) -> str:\n    found = errors.why()\n    return why() + str(errors.LIMIT)\n\n\n"
            "class Note:\n    held: int\n"
        ),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert budget.figures(tmp_path) == {
        "device names": 2,
        "device signatures": 1,
        "device statements": 3,
        "state -> device": 2,
        "state names": 2,
        "state placeholders": 2,
        "state signatures": 2,
        "state statements": 3,
    }


def test_a_figure_over_its_budget_is_named() -> None:
    has = {"rank.comm statements": 12, "rank.comm -> protocol": 3, "state names": 1}

    assert budget.overdrawn(has, {"rank.comm statements": 12, "rank.comm -> protocol": 2}) == [
        "rank.comm -> protocol: 3, budget 2",
        "state names: 1, budget 0",
    ]


def test_a_rise_needs_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "budget.yaml"
    monkeypatch.setattr(budget, "BUDGET", written)
    written.write_text("figures: {state names: 4}\nrises: [{what: state names, by: 1, why: a new kind of copy}]\n")
    assert budget.allowed() == {"state names": 5}

    written.write_text("figures: {state names: 4}\nrises: [{what: state names, by: 1, why: ''}]\n")
    with pytest.raises(ValueError, match="names no reason"):
        budget.allowed()
