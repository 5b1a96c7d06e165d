"""Nothing grows unnoticed: statements, names, and what one package uses of another are held to tests/budget.yaml."""

from __future__ import annotations

import yaml

from tests import budget


def test_the_whole_tree_is_within_its_sums() -> None:
    over = budget.overdrawn(budget.sums(), budget.allowed_sums(yaml.safe_load(budget.BUDGET.read_text())))

    assert not over, "what is added here is taken out elsewhere: " + "; ".join(over)


def test_the_sums_have_only_fallen() -> None:
    now = yaml.safe_load(budget.BUDGET.read_text())["sums"]

    assert [risen for before in budget.earlier_versions() if (risen := budget.overdrawn(now, before["sums"]))] == []


def test_no_package_and_no_wall_is_over_its_budget() -> None:
    over = budget.overdrawn(budget.figures(), budget.allowed())

    assert not over, "use a mechanism that is there, or borrow in tests/budget.yaml: " + "; ".join(over)
