"""The states of the global random generators, captured and put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from ttprun.rank import random_state

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,  # every second one comes from what the one before has left
    "torch": lambda: torch.rand(1).item(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_after_each_draw_a_state_is_captured_from_which_the_next_ones_come_again(kind: str) -> None:
    draw = DRAWS[kind]

    for _ in range(5):
        draw()
        state = msgpack.unpackb(msgpack.packb(random_state.capture()))
        drawn = [draw() for _ in range(3)]
        random_state.restore(state)
        again = [draw() for _ in range(3)]

        assert again == drawn


def test_the_fast_way_to_pythons_state_gives_what_the_slow_one_gives() -> None:
    for draws in range(700):
        random.random()
        if draws % 100 == 0:
            random.gauss(0, 1)
        assert random_state._python_state_from_memory() == random_state._python_state()


def test_a_state_that_was_set_is_seen() -> None:
    np.random.seed(1)
    first = random_state.capture()["numpy"]
    np.random.seed(2)
    second = random_state.capture()["numpy"]
    np.random.seed(1)

    assert first != second
    assert random_state.capture()["numpy"] == first
