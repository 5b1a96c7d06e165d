"""Where a replay stands, compared with a record."""

from __future__ import annotations

import pytest
import torch

from tests.rank.records import record_of
from ttprun.rank.replay.differences import difference_of_stepping
from ttprun.tensors import optimizer_registry


def test_another_optimizer_that_steps_at_the_same_place_is_another_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    monkeypatch.setattr(optimizer_registry, "optimizers", lambda: [first, second])

    assert difference_of_stepping(record_of(stepping=1), second) == ""
    assert "optimizer 0 steps there" in difference_of_stepping(record_of(stepping=1), first)
    assert difference_of_stepping(record_of(stepping=1), None) == ""
    assert difference_of_stepping(record_of(stepping=None), first) == ""
