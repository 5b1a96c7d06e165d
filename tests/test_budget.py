"""Nothing grows unnoticed: statements, names, and what one package uses of another are held to tests/budget.yaml."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests import budget

LOAN = "{what: state names, by: 1, why: a new kind of copy, mechanism: state/saves.py, until: 2027-01-31}"


def test_the_whole_tree_is_within_its_sums() -> None:
    over = budget.overdrawn(budget.sums(), budget.allowed_sums(yaml.safe_load(budget.BUDGET.read_text())))

    assert not over, "what is added here is taken out elsewhere: " + "; ".join(over)


def test_the_sums_have_only_fallen() -> None:
    now = yaml.safe_load(budget.BUDGET.read_text())["sums"]

    assert [risen for before in budget.earlier_versions() if (risen := budget.overdrawn(now, before["sums"]))] == []


def test_a_grant_is_one_that_the_tests_know() -> None:
    written = {"sums": {"statements": 10, "modules": 2}, "grants": ["steps"]}

    assert budget.allowed_sums(written) == {"statements": 610, "modules": 2}
    with pytest.raises(KeyError):
        budget.allowed_sums(written | {"grants": ["comfort"]})


def test_no_package_and_no_wall_is_over_its_budget() -> None:
    over = budget.overdrawn(budget.figures(), budget.allowed())

    assert not over, "use a mechanism that is there, or borrow in tests/budget.yaml: " + "; ".join(over)


def test_a_figure_over_its_budget_is_named() -> None:
    has = {"rank.comm statements": 12, "rank.comm -> protocol": 3, "state names": 1}

    assert budget.overdrawn(has, {"rank.comm statements": 12, "rank.comm -> protocol": 2}) == [
        "rank.comm -> protocol: 3, budget 2",
        "state names: 1, budget 0",
    ]


@pytest.mark.parametrize(
    ("now", "then", "lacks"),
    [
        ("mechanism: state/saves.py, ", "", "names no mechanism"),
        ("a new kind of copy", "''", "names no why"),
        ("a new kind of copy", "the same for the next", "a reason of its own"),
    ],
)
def test_a_loan_names_its_own_reason_and_the_mechanism_that_could_not_take_it(
    now: str, then: str, lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "budget.yaml"
    monkeypatch.setattr(budget, "BUDGET", written)
    written.write_text(f"figures: {{state names: 4}}\nloans: [{LOAN.replace(now, then)}]\n")

    with pytest.raises(ValueError, match=lacks):
        budget.allowed()
