"""Ranks that the old run did not have draw numbers of their own, but where all ranks draw alike."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.capture.records import record_of
from ttprun.capture.position import loops
from ttprun.capture.position.loops import Extent
from ttprun.capture.values import pack
from ttprun.elastic_resume.adapted import Derived, states_in
from ttprun.introspect import random_state


def recorded() -> Any:
    """The states as they come out of a record."""
    return msgpack.unpackb(msgpack.packb(random_state.capture()))


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    before = random_state.capture()
    yield
    random_state.restore(before)


def draws_of(derived: Derived, states: Any) -> list[float]:
    random_state.restore(derived.states(states))
    return draws()


def test_each_new_rank_draws_other_numbers_and_the_same_ones_again_if_it_is_made_again() -> None:
    states = recorded()
    old = draws()

    third, fourth, again = (draws_of(Derived(rank, set()), states) for rank in (2, 3, 2))

    assert third == again
    for one, other in ((old, third), (old, fourth), (third, fourth)):
        assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_generator_that_all_old_ranks_have_alike_is_the_new_ranks_too() -> None:
    states = recorded()
    expected = draws()
    common = {pack(["python", states["python"]])}

    found = draws_of(Derived(2, common), states)

    assert found[0] == expected[0]
    assert all(a != b for a, b in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(4), lambda one: float(torch.rand(1, generator=one))),
        (lambda: random.Random(4), lambda one: one.random()),
        (lambda: np.random.default_rng(4), lambda one: one.random()),
        (lambda: np.random.RandomState(4), lambda one: one.rand()),
        (lambda: np.random.PCG64(4), lambda one: one.random_raw()),
    ],
)
def test_a_generator_in_a_variable_is_derived_too(make: Any, draw: Any) -> None:
    one, other, alike = make(), make(), make()

    Derived(2, set()).reseed(one, ["kind", b"state"])
    Derived(3, set()).reseed(other, ["kind", b"state"])
    Derived(3, {pack(["kind", b"state"])}).reseed(alike, ["kind", b"state"])

    assert len({draw(one), draw(other), draw(alike)}) == 3
    assert draw(alike) != draw(make())


def test_all_states_of_a_record_are_found() -> None:
    states = [{"python": number} for number in range(4)]
    loop = loops.Loop(loops.Site("script.py:1:0", Extent((1, 0), (1, 4), (2, 0), (3, 0))), states[1], []).record()
    fields = record_of(
        rng=states[0],
        loops=[[loop]],
        generator_loops=[replace(loop, item_rng=states[2])],
        loaders=[{"rng": states[3], "generators": [b"torch's"]}],
    )

    found = states_in(fields, [["numpy", 7]])

    assert found == {*(pack(["python", n]) for n in range(4)), pack(["torch", b"torch's"]), pack(["numpy", 7])}
