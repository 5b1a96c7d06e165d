"""Random trees of data, with random changes and losses: what comes out is what went in, or it is named."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

from tests.capture.user_values import Link
from tests.capture.values.carrying import carry, look_at_few, record
from ttprun.capture import values
from ttprun.capture.values import changes, data_trees

HISTORIES = 40
STEPS = 12


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    look_at_few(monkeypatch, 4)
    monkeypatch.setattr(data_trees, "MANY", 12)
    monkeypatch.setattr(data_trees, "DATA_BYTES", 100)
    monkeypatch.setattr(data_trees, "_MANY_ROWS", 4)
    monkeypatch.setattr(data_trees, "SMALL_BYTES", 100)
    values.forget()
    yield
    changes.Clock.is_whole = False
    values.forget()


class Maker:
    """The set-up of one script: with the same seed it makes the same."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.made: list[Any] = []

    def value(self, depth: int) -> Any:
        draw = self.draw
        if self.made and draw.random() < 0.15:
            return draw.choice(self.made)
        if depth > 3 or draw.random() < 0.25:
            return draw.choice([1, -2.5, "text", None, True, (1, "x"), 2**70])
        made = getattr(self, draw.choice(["list", "dict", "link", "set", "tensor", "array"]))(depth)
        self.made.append(made)
        return made

    def list(self, depth: int) -> Any:
        return [self.value(depth + 1) for _ in range(self.draw.randrange(8))]

    def dict(self, depth: int) -> Any:
        return {f"k{number}": self.value(depth + 1) for number in range(self.draw.randrange(8))}

    def link(self, depth: int) -> Any:
        return Link(self.draw.randrange(9), self.value(depth + 1))

    def set(self, depth: int) -> Any:
        return set(range(self.draw.randrange(8)))

    def tensor(self, depth: int) -> Any:
        return torch.full((self.draw.randrange(1, 40),), self.draw.random())

    def array(self, depth: int) -> Any:
        return numpy.full(self.draw.randrange(1, 40), self.draw.random())

    def scope(self) -> dict[str, Any]:
        return {f"v{number}": [self.value(1) for _ in range(10)] for number in range(3)} | {"current": self.value(1)}


def change(scope: dict[str, Any], made: list[Any], draw: random.Random) -> None:
    """Something in it, anywhere."""
    value = draw.choice(made) if draw.random() < 0.7 else draw.choice([scope["v0"], scope["v1"]])
    new = draw.choice([5, "new", draw.choice(made), [draw.random()]])
    if isinstance(value, list):
        value.insert(draw.randrange(len(value) + 1), new) if draw.random() < 0.7 or not value else value.pop()
    elif isinstance(value, dict):
        value[f"k{draw.randrange(8)}"] = new
    elif isinstance(value, Link):
        value.number = draw.randrange(100)
    elif isinstance(value, set):
        value.clear()
    elif isinstance(value, torch.Tensor | numpy.ndarray):
        value[0] = draw.random()
    scope["current"] = draw.choice([7, *made])


def shape(value: Any, seen: dict[int, int]) -> Any:
    """What a value is, with what is the same object in it."""
    if isinstance(value, tuple):
        return [shape(item, seen) for item in value]
    if not isinstance(value, list | dict | Link | set | torch.Tensor | numpy.ndarray):
        return (type(value).__name__, value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor | numpy.ndarray):
        return (type(value).__name__, value.tolist())
    if isinstance(value, set):
        return ("set", sorted(value))
    if isinstance(value, list):
        return ["list", *(shape(item, seen) for item in value)]
    items = {"number": value.number, "next": value.next} if isinstance(value, Link) else value
    return [type(value).__name__, *((key, shape(item, seen)) for key, item in items.items())]


@pytest.mark.parametrize("first", range(0, HISTORIES, 10))
def test_a_replacement_has_what_the_lost_rank_had_whatever_has_changed(first: int) -> None:
    n_trees = n_carried = 0
    for seed in range(first, first + 10):
        values.forget()
        draw, maker = random.Random(seed + 1000), Maker(seed)
        scope, made = maker.scope(), maker.made
        for _ in range(STEPS):
            changes.Clock.is_whole = False
            values.begin_boundary()
            n_trees += repr(record(scope, key="random")[0]).count("DataTreeNode")
            if draw.random() < 0.3:
                change(scope, made, draw)
            if draw.random() > 0.25:
                continue
            changes.Clock.is_whole = True
            values.begin_boundary()
            here = Maker(seed).scope()
            wanted = shape(scope, {})

            try:
                doubts = carry(scope, here)
            except values.CannotRestoreError:  # an object that has moved in a list, say
                continue
            # In what refers to objects that have moved, the replay's own are others.
            assert all("is data that differs" in doubt for doubt in doubts), seed
            if doubts:
                continue
            assert shape(here, {}) == wanted, seed
            n_carried += 1
    assert n_trees > 20  # it is about these
    assert n_carried > 10
