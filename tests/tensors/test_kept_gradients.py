"""Gradients that a backward adds to after the step that has used them are kept, and go with the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ttprun.tensors import gradients, replicated
from ttprun.tensors.gradients import GRADIENT


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    gradients.forget()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """[optimizer, optimizer], of one parameter each."""
    found = [torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9) for _ in range(2)]
    monkeypatch.setattr("ttprun.tensors.optimizer_registry.optimizers", lambda: found)
    return found


def learn(optimizer: Any, *, zeroes: bool = False) -> str:
    """One step of a script, with what the hooks do in it; returns why a replacement could not begin before it."""
    if zeroes:
        optimizer.zero_grad()
    gradients.look_at_watched()
    torch.stack([one.square().sum() for one in optimizer.param_groups[0]["params"]]).sum().backward()
    why_not = gradients.look_after_backward().text
    gradients.were_carried(optimizer)
    optimizer.step()
    gradients.watch(optimizer)
    return why_not


def gradient_of(optimizer: Any) -> torch.Tensor:
    found: torch.Tensor = optimizer.param_groups[0]["params"][0].grad
    return found


def is_kept(optimizer: Any) -> bool:
    return gradients.of_optimizer(optimizer).kept is not None


def names_of_state() -> list[list[str]]:
    return [[entry[0] for entry in row[2]] for row in replicated.describe()[0]]


def test_only_gradients_that_are_added_to_belong_to_the_state(made: list[Any]) -> None:
    for _ in range(2):
        learn(made[0], zeroes=True)
        learn(made[1])

    assert names_of_state() == [["momentum_buffer"], ["momentum_buffer", GRADIENT]]


def scale(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.mul_(0.9)


def scale_to_zero(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.neg_().mul_(0)


def replace(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


@pytest.mark.parametrize("change", [scale, scale_to_zero, replace])
def test_gradients_that_the_script_changes_before_a_backward_adds_to_them_are_kept_as_the_step_has_left_them(
    made: list[Any], change: Any
) -> None:
    for _ in range(2):
        learn(made[0])
        left = gradient_of(made[0]).clone()
        made[0].param_groups[0]["params"][0].grad = change(gradient_of(made[0]))

    assert names_of_state()[0] == ["momentum_buffer", GRADIENT]
    assert torch.equal(gradients.kept_of(made[0])[id(made[0].param_groups[0]["params"][0])], left)


def test_one_gradient_of_many_that_is_not_zeroed_is_enough(made: list[Any]) -> None:
    made[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    kept = made[0].param_groups[1]["params"][0]
    made[0].param_groups[0]["params"].append(kept)
    del made[0].param_groups[1]

    for _ in range(2):
        made[0].param_groups[0]["params"][0].grad = None
        learn(made[0])

    assert is_kept(made[0])


def test_a_script_that_begins_to_carry_gradients_later_is_told_in_that_step_and_they_are_kept(made: list[Any]) -> None:
    before = [learn(made[0], zeroes=True) for _ in range(5)]
    assert not is_kept(made[0])

    after = [learn(made[0]) for _ in range(2)]

    assert before == [""] * 5
    assert after == [gradients.CARRIED_NOW.text, ""]
    assert is_kept(made[0])


@pytest.mark.parametrize("to_none", [True, False])
def test_of_optimizers_that_learn_in_turn_and_zero_their_gradients_nothing_is_kept(
    made: list[Any], to_none: bool
) -> None:
    said = []
    for _ in range(5):
        for one in made:
            one.zero_grad(set_to_none=to_none)
            said.append(learn(one))

    assert said == [""] * 10
    assert not any(map(is_kept, made))


def test_a_loaded_gradient_is_put_back_where_the_script_adds_to_it(made: list[Any]) -> None:
    for _ in range(3):
        learn(made[0])
    header, parts = replicated.describe()
    theirs = {part.key: part.tensor.clone() for part in parts}
    expected = gradient_of(made[0]).clone()
    gradients.forget()
    gradient_of(made[0]).zero_()
    before = replicated.digest_of_shards()

    replicated.take_over(header, lambda key, tensor: tensor.copy_(theirs[key]))
    assert replicated.digest_of_shards() != before
    gradients.poison(made)

    assert torch.equal(gradient_of(made[0]), expected)
    assert list(made[0].state[made[0].param_groups[0]["params"][0]]) == ["momentum_buffer"]
    learn(made[0])
    assert not gradients.are_carried_over(made[0])
    assert names_of_state()[0] == ["momentum_buffer", GRADIENT]


def test_a_gradient_that_has_changed_since_its_step_is_not_kept(made: list[Any]) -> None:
    learn(made[0])
    learn(made[0])
    assert is_kept(made[0])

    gradient_of(made[0]).add_(1)
    learn(made[1], zeroes=True)

    assert not is_kept(made[0])
    assert not gradients.were_carried(made[0])  # nothing has shown that its next step uses it


def test_the_gradients_of_ranks_with_equal_weights_may_differ(made: list[Any]) -> None:
    learn(made[0])
    learn(made[0])
    digests = replicated.digest(), replicated.digests()

    gradient_of(made[0]).add_(1)
    gradients.note_step(made[0])

    assert (replicated.digest(), replicated.digests()) == digests


def test_an_optimizer_without_state_gets_none_from_its_gradient(made: list[Any]) -> None:
    made[0].param_groups[0]["momentum"] = 0
    learn(made[0])
    learn(made[0])
    assert names_of_state()[0] == [GRADIENT]
    header, parts = replicated.describe()
    theirs = {part.key: part.tensor.clone() for part in parts}

    replicated.take_over(header, lambda key, tensor: tensor.copy_(theirs[key]))

    assert not made[0].state


def test_a_snapshot_has_the_gradients_as_long_as_it_is_not_known_whether_they_are_added_to(made: list[Any]) -> None:
    learn(made[0])
    with gradients.kept_if_unknown(made[0]):
        assert GRADIENT in names_of_state()[0]
        assert GRADIENT not in names_of_state()[1]
    assert GRADIENT not in names_of_state()[0]

    learn(made[0], zeroes=True)
    for _ in range(3):
        learn(made[0], zeroes=True)
    with gradients.kept_if_unknown(made[1]):
        assert names_of_state() == [["momentum_buffer"], []]


def test_the_mirrors_thread_does_not_see_the_gradients_that_a_snapshot_takes(made: list[Any]) -> None:
    learn(made[0])

    with gradients.kept_if_unknown(made[0]), ThreadPoolExecutor(1) as thread:
        seen_there = thread.submit(names_of_state).result()
        seen_here = names_of_state()

    assert (GRADIENT in seen_here[0], GRADIENT in seen_there[0]) == (True, False)


def test_gradients_that_were_loaded_and_that_the_script_zeroes_are_kept_no_longer(made: list[Any]) -> None:
    learn(made[0])
    with gradients.kept_if_unknown(made[0]):
        header, parts = replicated.describe()
    theirs = {part.key: part.tensor.clone() for part in parts}
    gradients.forget()
    replicated.take_over(header, lambda key, tensor: tensor.copy_(theirs[key]))
    gradients.poison(made)

    learn(made[0], zeroes=True)
    assert is_kept(made[0])
    learn(made[0], zeroes=True)

    assert not is_kept(made[0])
    assert names_of_state()[0] == ["momentum_buffer"]


def test_each_gradient_is_watched_in_turn_whatever_group_it_is_in() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(5)]
    optimizer = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1)

    watched = [gradients._in_turn(optimizer, step) for step in range(5)]

    assert [[id(one) for one in found] for found in watched] == [[id(one)] for one in weights]
