"""Random trees of data, with random changes and losses: what comes out is what went in, or it is named."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.capture.values import test_kept_at_random
from tests.capture.values.carrying import Scope, are_alike, carry, look_at_few, record
from tests.capture.values.test_kept import afresh
from tests.capture.values.test_kept_at_random import MAKERS, Script
from ttprun.capture import values
from ttprun.capture.values import changes, data_trees

HISTORIES = 80
STEPS = 12
DATA = [*MAKERS[:22], lambda script, depth: {script.random.randrange(9) for _ in range(3)}]  # lists to small arrays


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(test_kept_at_random, "MAKERS", DATA)
    look_at_few(monkeypatch, 4)
    for name, most in {"MANY": 12, "DATA_BYTES": 100, "_MANY_ROWS": 4, "SMALL_BYTES": 100}.items():
        monkeypatch.setattr(data_trees, name, most)
    values.forget()
    yield
    changes.Clock.is_whole = False
    values.forget()


def scope_of(script: Script) -> Scope:
    return {f"{name} of {at}": value for at, scope in enumerate(script.scopes) for name, value in scope.items()}


def made_by(seed: int) -> Script:
    """The set-up of one script: with the same seed it makes the same."""
    script = Script(seed)
    script.scopes[0] |= {f"rows {at}": [script.value(1) for _ in range(14)] for at in range(3)}
    return script


@pytest.mark.parametrize("first", range(0, HISTORIES, 20))
def test_a_replacement_has_what_the_lost_rank_had_whatever_has_changed(first: int) -> None:
    n_trees = n_carried = 0
    for seed in range(first, first + 20):
        values.forget()
        draw, script = random.Random(seed + 1000), made_by(seed)
        for _ in range(STEPS):
            changes.Clock.is_whole = False
            values.begin_boundary()
            n_trees += repr(record(scope_of(script), key="random")[0]).count("DataTreeNode")
            if draw.random() < 0.3:
                script.change()
            if draw.random() > 0.25:
                continue
            changes.Clock.is_whole = True
            values.begin_boundary()
            lost, here = scope_of(script), scope_of(made_by(seed))
            try:
                doubts = carry(lost, here)
            except values.CannotRestoreError:  # an object that has moved in a list, say
                continue
            # In what refers to objects that have moved, the replay's own are others.
            assert all("is data that differs" in doubt for doubt in doubts), seed
            if not doubts:
                assert are_alike(afresh(here), afresh(lost)), seed
                n_carried += 1
                break
    assert n_trees > 20  # it is about these
    assert n_carried > 10
