"""Random generators in variables draw on as in the lost rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.capture.values.carrying import (
    carry,
)
from ttprun.capture.values import CannotRestoreError

GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "random.Random": (random.Random, lambda rng: [rng.random(), rng.gauss(0, 1), rng.gauss(0, 1)]),
    "numpy default_rng": (
        np.random.default_rng,
        lambda rng: rng.normal(size=3).tolist() + rng.integers(9, size=3).tolist(),
    ),
    "numpy MT19937": (
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda rng: rng.normal(size=3).tolist(),
    ),
    "numpy Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda rng: rng.normal(size=3).tolist()),
    "numpy RandomState": (np.random.RandomState, lambda rng: rng.normal(size=3).tolist()),
    "numpy RandomState over PCG64": (
        lambda seed: np.random.RandomState(np.random.PCG64(seed)),
        lambda rng: rng.normal(size=3).tolist(),
    ),
    "torch.Generator": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda rng: torch.rand(3, generator=rng).tolist(),
    ),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_random_generator_draws_on_as_in_the_lost_rank(kind: str) -> None:
    make, draw = GENERATORS[kind]
    lost, live = make(1), make(2)
    draw(lost)

    carry({"rng": lost, "same": lost}, {"rng": live, "same": live})

    assert draw(live) == draw(lost)


def test_another_kind_of_random_generator_is_refused() -> None:
    with pytest.raises(CannotRestoreError, match="rng is another random generator"):
        carry({"rng": random.Random(1)}, {"rng": np.random.default_rng(1)})


def test_a_generator_that_draws_from_the_system_does_not_end_the_protection() -> None:
    here = {"rng": random.SystemRandom(), "step": 0}

    carry({"rng": random.SystemRandom(), "step": 2}, here)

    assert here["step"] == 2
