"""Between the steps of optimizers that use the gradients of one backward, no run can resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ttprun.tensors import gradients, open_boundaries
from ttprun.tensors.open_boundaries import MOST_PUT_OFF


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    gradients.forget()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """[optimizer, optimizer], of one parameter each."""
    found = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2)]
    monkeypatch.setattr(open_boundaries, "optimizers", lambda: found)
    return found


def step(optimizer: Any) -> bool:
    """Whether the boundary after the step is seen to be open."""
    is_open = open_boundaries.look(optimizer)
    optimizer.step()
    gradients.watch(optimizer)
    return is_open


def go_backward(*optimizers: Any) -> None:
    """Through the parameters of these."""
    gradients.look_at_watched()
    torch.stack([one.param_groups[0]["params"][0].square().sum() for one in optimizers]).sum().backward()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_boundary_before_the_second_step_on_one_backward_is_open_from_the_first_iteration_on(
    made: list[Any], set_to_none: bool
) -> None:
    found = []
    for _ in range(3):
        for one in made:
            one.zero_grad(set_to_none)
        go_backward(*made)
        found += [step(one) for one in made]

    assert found == [True, False] * 3


def test_one_that_steps_less_often_keeps_boundaries_open_until_it_has_stepped(made: list[Any]) -> None:
    often, seldom = made
    found = []
    for number in range(6):
        often.zero_grad()
        go_backward(*made)
        found.append(step(often))
        if number % 3 == 2:
            found.append(step(seldom))
            seldom.zero_grad()

    assert found == [True, True, True, False] * 2


def test_gradients_that_a_gan_s_discriminator_zeroes_before_its_step_keep_no_boundary_open(made: list[Any]) -> None:
    generator, judge = made
    found = []
    for _ in range(3):
        judge.zero_grad()
        go_backward(judge)
        found.append(step(judge))
        generator.zero_grad()
        go_backward(generator, judge)
        found.append(step(generator))

    assert found == [False, False] * 3


def test_one_that_has_a_backward_of_its_own_from_now_on_keeps_no_boundary_open(made: list[Any]) -> None:
    for _ in range(2):
        go_backward(*made)
        step(made[0])
        step(made[1])
        made[0].zero_grad()
        made[1].zero_grad()

    found = []
    for _ in range(2):
        for one in made:
            one.zero_grad()
            go_backward(one)
            found.append(step(one))

    assert found == [False] * 4


def test_gradients_that_the_script_keeps_are_not_taken_for_new_ones_or_old_ones(made: list[Any]) -> None:
    kept, found = [], []
    for _ in range(2):
        go_backward(*made)
        found += [step(one) for one in made]
        for one in made:
            kept.append(one.param_groups[0]["params"][0].grad)
            one.zero_grad()

    assert found == [True, False] * 2


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_clipped_or_unscaled_before_the_second_step_are_shared_all_the_same(
    made: list[Any], set_to_none: bool
) -> None:
    found = []
    for _ in range(3):
        for one in made:
            one.zero_grad(set_to_none)
        go_backward(*made)
        for one in made:
            one.param_groups[0]["params"][0].grad.mul_(0.5)
            found.append(step(one))

    assert found == [True, False] * 3


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gan_whose_generator_steps_first_keeps_no_boundary_open_but_its_first(
    made: list[Any], set_to_none: bool
) -> None:
    generator, judge = made
    found = []
    for _ in range(3):
        generator.zero_grad(set_to_none)
        go_backward(generator, judge)
        found.append(step(generator))
        judge.zero_grad(set_to_none)
        go_backward(judge)
        found.append(step(judge))

    assert found == [True] + [False] * 5


def test_one_that_never_steps_keeps_boundaries_open_for_as_long_as_a_snapshot_can_wait(made: list[Any]) -> None:
    found = []
    for _ in range(MOST_PUT_OFF + 2):
        made[0].zero_grad()
        go_backward(*made)
        found.append(step(made[0]))

    assert found == [True] * MOST_PUT_OFF + [False] * 2


def test_one_optimizer_alone_keeps_no_boundary_open(made: list[Any]) -> None:
    del made[1]
    go_backward(*made)

    assert not step(made[0])
