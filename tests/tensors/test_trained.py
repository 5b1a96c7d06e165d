"""What is known of the optimizers is kept from boundary to boundary, and looked at anew when anything of it changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from copy import deepcopy
from operator import is_
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ttprun.introspect.tensor_bytes import places
from ttprun.tensors import optimizer_registry
from ttprun.tensors.optimizer_registry import stepped_tensors

SIZES = [3, 2000, 5, 4, 1, 2]


class Training:
    """Two groups of three parameters, and an optimizer that has its state."""

    def __init__(self) -> None:
        self.parameters = [nn.Parameter(torch.randn(size)) for size in SIZES]
        groups: list[dict[str, Any]] = [{"params": self.parameters[:3]}, {"params": self.parameters[3:], "lr": 0.2}]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(groups, lr=0.1)]
        self.step()

    @property
    def groups(self) -> list[list[Tensor]]:
        """The lists of parameters that the first optimizer holds."""
        return [group["params"] for group in self.optimizers[0].param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    def states(self, index: int) -> dict[str, Tensor]:
        """What the first optimizer keeps of a parameter."""
        state: dict[str, Tensor] = self.optimizers[0].state[self.parameters[index]]
        return state


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    optimizer_registry.forget()
    made = optimizer_registry.wrap_optimizer_init(torch.optim.Optimizer.__init__)
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", made)
    yield Training()
    optimizer_registry.forget()


def storages() -> dict[int, int]:
    return optimizer_registry.stepped(optimizer_registry.optimizers()).storages


def samples(count: int) -> list[bytes]:
    """The samples of so many boundaries."""
    return list(map(optimizer_registry.newest().sample, range(count)))


def move_state(state: dict[str, Tensor], name: str) -> None:
    state[name] = state[name].clone()


def set_data(parameter: Tensor) -> None:
    parameter.data = parameter.data.clone()


def replace(training: Training, index: int) -> None:
    old = training.parameters[index]
    group = training.groups[index // 3]
    group[index % 3] = new = nn.Parameter(torch.ones_like(old))
    training.optimizers[0].state[new] = training.optimizers[0].state.pop(old)
    training.parameters[index] = new


def make_another(training: Training) -> None:
    training.optimizers.append(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))


def lose_one(training: Training) -> None:
    training.optimizers.clear()
    gc.collect()


CHANGES: dict[str, Callable[[Training], object]] = {
    "a group is added": lambda one: one.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "a parameter is added to a group": lambda one: one.groups[0].append(nn.Parameter(torch.ones(3))),
    "a parameter is added in the middle": lambda one: one.groups[0].insert(1, nn.Parameter(torch.ones(3))),
    "a parameter is taken away": lambda one: one.groups[1].pop(1),
    "a group is emptied": lambda one: one.groups[1].clear(),
    "a group is taken away": lambda one: one.optimizers[0].param_groups.pop(),
    "the state is loaded anew": lambda one: one.optimizers[0].load_state_dict(deepcopy(one.optimizers[0].state_dict())),
    "the state is thrown away": lambda one: one.optimizers[0].state.clear(),
    "the state of the last parameter is thrown away": lambda one: one.states(5).clear(),
    "the first parameter's state is replaced": lambda one: move_state(one.states(0), "exp_avg"),
    "the last parameter's state is replaced": lambda one: move_state(one.states(5), "exp_avg_sq"),
    "the state at the end of a group is replaced": lambda one: move_state(one.states(2), "exp_avg"),
    "a number in a state becomes a tensor": lambda one: one.states(0).update(more=torch.ones(1)),
    "the first parameter has other memory": lambda one: set_data(one.parameters[0]),
    "the last parameter has other memory": lambda one: set_data(one.parameters[5]),
    "the end of a group has other memory": lambda one: set_data(one.parameters[2]),
    "the first parameter is replaced": lambda one: replace(one, 0),
    "the last parameter is replaced": lambda one: replace(one, 5),
    "an optimizer is made": make_another,
    "an optimizer is gone": lose_one,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_is_trained_is_seen_at_the_next_boundary(training: Training, change: str) -> None:
    before = storages()

    CHANGES[change](training)

    after = storages()
    assert after is not before
    assert after == places(stepped_tensors())
    assert all(map(is_, optimizer_registry.newest().weights, optimizer_registry.parameters()))
    assert optimizer_registry.newest().counts == optimizer_registry.counts_now()


def test_steps_alone_change_nothing(training: Training) -> None:
    before = storages()

    for _ in range(3):
        training.step()
        assert storages() is before


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_state_that_the_first_step_makes_is_seen(training: Training, momentum: float) -> None:
    training.optimizers[:] = [torch.optim.SGD(training.parameters, lr=0.1, momentum=momentum)]
    gc.collect()
    storages()

    training.step()

    assert storages() == places(stepped_tensors())
    assert optimizer_registry.newest().counts == optimizer_registry.counts_now() == [[6, 6 if momentum else 0]]


def test_a_state_that_holds_a_number_in_the_place_of_a_tensor_at_first_is_seen(training: Training) -> None:
    states = training.optimizers[0].state
    states[training.parameters[0]]["step"] = 1
    before = storages()
    states[training.parameters[0]]["step"] = 2
    assert storages() is before

    states[training.parameters[0]]["step"] = torch.tensor(3.0)

    assert storages() == places(stepped_tensors())


def test_a_state_that_is_no_dictionary_holds_nothing_up(training: Training) -> None:
    training.optimizers[0].state[training.parameters[0]] = torch.ones(3)

    assert storages() == places(stepped_tensors())


def test_each_boundary_has_a_sample_of_another_parameter(training: Training) -> None:
    storages()
    before = samples(len(SIZES))

    with torch.no_grad():
        training.parameters[4].add_(1.0)

    after = samples(len(SIZES))
    assert len(set(before)) == len(SIZES)
    assert [new == old for new, old in zip(after, before, strict=True)] == [True, True, True, True, False, True]


SWAPS: dict[str, Callable[[Training], object]] = {
    "by .data": lambda one: setattr(one.parameters[1], "data", torch.ones(2000)),
    "by another parameter": lambda one: replace(one, 1),
    "in another list": lambda one: (
        one.optimizers[0]
        .param_groups[0]
        .update(params=[one.parameters[0], nn.Parameter(torch.ones(2000)), one.parameters[2]])
    ),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_a_sample_is_of_what_the_optimizer_holds_now_also_in_the_middle_of_a_group(
    training: Training, swap: str
) -> None:
    storages()
    before = samples(len(SIZES))

    SWAPS[swap](training)
    storages()

    after = samples(len(SIZES))
    assert [new == old for new, old in zip(after, before, strict=True)] == [True, False, True, True, True, True]
    with torch.no_grad():
        training.groups[0][1].add_(1.0)
    assert samples(2)[1] != after[1]


def test_a_parameter_that_does_not_lie_one_element_behind_the_other_is_sampled_as_it_is_now(
    training: Training,
) -> None:
    training.parameters[1].data = torch.arange(4000.0)[::2]
    storages()
    before = samples(2)

    with torch.no_grad():
        training.parameters[1].add_(1.0)

    after = samples(2)
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_without_a_parameter_there_is_no_sample(training: Training) -> None:
    lose_one(training)
    storages()

    assert samples(2) == [b"", b""]


def test_a_parameter_that_the_step_itself_takes_away_is_sampled_till_the_next_boundary(training: Training) -> None:
    storages()
    before = samples(len(SIZES))

    training.groups[0].pop()

    assert samples(len(SIZES)) == before
    storages()
    assert len(set(samples(len(SIZES)))) == len(SIZES) - 1
