"""Digests of what a rank trains: when they are taken, and what shows in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttprun.tensors import holdings, optimizer_registry
from ttprun.tensors.holdings import Holdings

KEYS = ["optimizer.0/0.0", "optimizer.0/0.1"]


class Training:
    """One linear layer and its optimizer, about to take a step."""

    def __init__(self) -> None:
        optimizer_registry.forget()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 3)
        self.optimizer = self.make(self.layer.parameters())
        self.differentiate()

    def make(self, parameters: Iterator[torch.Tensor]) -> torch.optim.Optimizer:
        found = torch.optim.Adam(parameters, lr=0.1)
        optimizer_registry.wrap_optimizer_init(lambda self: None)(found)
        return found

    def differentiate(self) -> None:
        self.layer(torch.ones(2, 4)).sum().backward()

    def step(self) -> None:
        self.optimizer.step()

    @property
    def stepped(self) -> optimizer_registry.Stepped:
        return optimizer_registry.stepped(optimizer_registry.optimizers())


@pytest.fixture
def training() -> Iterator[Training]:
    yield Training()
    optimizer_registry.forget()


def change_weight(training: Training) -> None:
    training.layer.weight.data[0, 0] += 1


def change_gradient(training: Training) -> None:
    training.layer.weight.grad[0, 0] += 1  # type: ignore[index]


def change_state(training: Training) -> None:
    training.optimizer.state[training.layer.weight]["exp_avg"][0, 0] += 1


def change_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = 0.2


def test_equal_training_gives_equal_digests_of_each_parameter() -> None:
    first = holdings.in_full(Training().optimizer)
    second = holdings.in_full(Training().optimizer)
    optimizer_registry.forget()

    assert list(first) == KEYS
    assert first == second


@pytest.mark.parametrize(
    ("change", "place"), [(change_weight, 0), (change_gradient, 1), (change_state, 1), (change_rate, 1)]
)
def test_whatever_differs_shows_in_its_parameter_s_digests(
    training: Training, change: Callable[[Training], None], place: int
) -> None:
    training.step()
    before = holdings.in_full(training.optimizer)

    change(training)

    after = holdings.in_full(training.optimizer)
    assert list(before) == KEYS
    assert before[KEYS[0]][place] != after[KEYS[0]][place]
    assert before[KEYS[0]][1 - place] == after[KEYS[0]][1 - place]


def test_gradients_of_an_optimizer_that_does_not_step_are_not_looked_at(training: Training) -> None:
    other = training.make(iter([torch.ones(2, requires_grad=True)]))
    before = holdings.in_full(other)

    change_gradient(training)

    assert holdings.in_full(other) == before


def test_a_sparse_gradient_is_looked_at_too(training: Training) -> None:
    table = torch.nn.Embedding(5, 2, sparse=True)
    other = torch.optim.SGD(table.parameters(), lr=0.1)
    optimizer_registry.wrap_optimizer_init(lambda self: None)(other)
    found = []
    for word in (1, 2):
        table.zero_grad()
        table(torch.tensor([word])).sum().backward()
        found.append(holdings.in_full(other)["optimizer.1/0.0"][1])

    assert found[0] != found[1]


def test_the_first_two_steps_are_looked_at_and_then_only_what_is_new(training: Training) -> None:
    known, asked = Holdings(), []
    for groups_made in (1, 1, 1, 2, 2):
        asked.append(known.are_new(training.stepped, training.optimizer, groups_made))
        training.step()
    training.optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    asked.append(known.are_new(training.stepped, training.optimizer, 2))
    asked.append(known.are_new(training.stepped, training.optimizer, 2))

    assert asked == [True, True, False, True, False, True, False]


def test_a_sample_of_each_step_sees_weights_and_gradients_that_part(training: Training) -> None:
    known = Holdings()
    found = {known.mark(training.stepped, training.optimizer, 8)}
    for change in (change_weight, change_gradient):
        change(training)
        found.add(known.mark(training.stepped, training.optimizer, 8))

    assert len(found) == 3


def test_parameters_that_a_wrapped_model_reduces_are_not_sampled_whenever_they_are_frozen(training: Training) -> None:
    class Wrapped(torch.nn.Module):
        process_group = SimpleNamespace(size=lambda: torch.distributed.get_world_size())

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped: Any = Wrapped.__new__(Wrapped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        optimizer_registry.wrap_ddp_init(Wrapped.__init__)(wrapped, training.layer)
        marks = [Holdings().mark(training.stepped, training.optimizer, 8)]
        training.layer.requires_grad_(False)  # a GAN freezes the network that does not learn now
        marks.append(Holdings().mark(training.stepped, training.optimizer, 8))

    assert marks == [b"", b""]


def test_parameters_are_named_as_the_script_names_them(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = torch.ones(2, requires_grad=True)
    other = training.make(iter([alone]))
    monkeypatch.setattr(holdings, "modules_in", lambda frame: iter([("net", training.layer)]))
    monkeypatch.setattr(holdings, "_tensors_in", lambda frame: iter([("bias[0]", alone)]))

    assert holdings.names(None) == {KEYS[0]: "weight", KEYS[1]: "bias", "optimizer.1/0.0": "bias[0]"}
    assert other is not None
