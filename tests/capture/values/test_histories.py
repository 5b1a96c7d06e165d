"""Whether somebody can still go backward through a tensor, as far as its graph shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ttprun.capture.values import is_awaited


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def checkpointed(use_reentrant: bool) -> torch.Tensor:
    start = torch.randn(5, 4, requires_grad=True)
    made: torch.Tensor = checkpoint(model(), start, use_reentrant=use_reentrant)
    return made


def packed_away() -> torch.Tensor:
    with save_on_cpu():
        return model()(torch.randn(5, 4))  # type: ignore[no-any-return]


COMPUTED = {
    "an output": lambda: model()(torch.randn(5, 4)),
    "a view of one": lambda: model()(torch.randn(5, 4)).reshape(-1, 1).sum(),
    "a recurrent net's": lambda: nn.LSTM(4, 3)(torch.randn(2, 1, 4))[0],
    "an embedding": lambda: nn.Embedding(4, 3)(torch.tensor([1, 2])),
    "of a function of the script's": lambda: Doubled.apply(torch.ones(3, requires_grad=True)),
    "of a checkpointed part": lambda: checkpointed(use_reentrant=False),
    "of a part that is checkpointed the old way": lambda: checkpointed(use_reentrant=True),
    "with what it kept packed away": packed_away,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_backward_is_awaited_until_it_has_come(name: str) -> None:
    tensor = COMPUTED[name]()

    before = is_awaited(tensor)
    tensor.sum().backward()

    assert (before, is_awaited(tensor)) == (True, False)


def test_looking_makes_no_checkpointed_part_run_again() -> None:
    part, ran = model(), []
    part.register_forward_hook(lambda *_: ran.append(1))

    is_awaited(checkpoint(part, torch.randn(5, 4, requires_grad=True), use_reentrant=False))

    assert ran == [1]


def test_the_fake_of_a_gan_is_awaited_behind_the_discriminators_step_and_not_behind_the_generators() -> None:
    judge = nn.Linear(3, 1)
    fake = model()(torch.randn(5, 4))

    loss = judge(fake.detach()).mean()
    loss.backward()
    behind_discriminator = is_awaited(fake), is_awaited(loss)
    judge(fake).mean().backward()

    assert behind_discriminator == (True, False)
    assert not is_awaited(fake)


def test_what_is_kept_for_another_backward_is_awaited() -> None:
    loss = model()(torch.randn(5, 4)).mean()

    loss.backward(retain_graph=True)

    assert is_awaited(loss)


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(3, requires_grad=True)])
def test_nothing_is_awaited_of_a_tensor_that_was_not_computed(tensor: torch.Tensor) -> None:
    assert not is_awaited(tensor)


def test_none_is_awaited_through_what_a_backward_has_freed() -> None:
    outputs = model()(torch.randn(5, 4))
    best, _ = outputs.max(1)

    before = is_awaited(best)
    outputs.sum().backward()

    assert (before, is_awaited(best)) == (True, False)
