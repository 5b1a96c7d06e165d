"""The states of the global random generators, captured and put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from ttprun.introspect import random_state

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,  # every second one comes from what the one before has left
    "torch": lambda: torch.rand(1).item(),
    "torch normal": lambda: torch.randn(1).item(),  # every second one comes from what the one before has left
    "torch normal, double": lambda: torch.randn(1, dtype=torch.float64).item(),
    "torch normal, many": lambda: torch.randn(40).tolist(),
    "torch bits": lambda: torch.randint(1 << 62, (1,)).item(),
    "torch dropout": lambda: torch.nn.functional.dropout(torch.ones(32)).tolist(),
    "torch seed": lambda: torch.manual_seed(torch.randint(1 << 20, (1,)).item()).initial_seed(),
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


def test_each_of_many_draws_changes_what_is_captured() -> None:
    torch.manual_seed(3)
    states = set()

    for _ in range(700):  # past the words of the twister, where it makes new ones
        torch.randn(1, dtype=torch.float64)
        states.add(random_state.capture()["torch"])

    assert len(states) == 700


def test_numpy_is_not_asked_again_if_nothing_was_drawn() -> None:
    first, second = random_state.capture(), random_state.capture()

    assert first["numpy"] is second["numpy"]


def test_a_state_of_torch_that_was_put_back_is_seen() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = random_state.capture()["torch"]
    torch.rand(1)
    assert random_state.capture()["torch"] != first

    torch.set_rng_state(before)

    assert random_state.capture()["torch"] == first == before.numpy().tobytes()


def test_another_generator_under_numpys_own_is_seen() -> None:
    usual = np.random.get_bit_generator()
    np.random.seed(1)  # no half of a pair of normal draws is left: numpy drops it when its generator is exchanged
    first = random_state.capture()["numpy"]
    try:
        np.random.set_bit_generator(np.random.MT19937(5))
        second = random_state.capture()["numpy"]
        np.random.rand()
        assert random_state.capture()["numpy"] != second != first
        np.random.set_bit_generator(usual)
        assert random_state.capture()["numpy"] == first
    finally:
        np.random.set_bit_generator(usual)


def test_the_fast_way_to_pythons_state_gives_what_the_slow_one_gives() -> None:
    for draws in range(700):
        random.random()
        if draws % 100 == 0:
            random.gauss(0, 1)
        assert random_state._is_in_memory
        assert random_state.capture()["python"] == random_state.state_of_python(random)


def test_a_state_that_was_set_is_seen() -> None:
    np.random.seed(1)
    first = random_state.capture()["numpy"]
    np.random.seed(2)
    second = random_state.capture()["numpy"]
    np.random.seed(1)

    assert first != second
    assert random_state.capture()["numpy"] == first
