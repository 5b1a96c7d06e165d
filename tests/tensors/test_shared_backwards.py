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


def play(made: list[Any], script: str, set_to_none: bool = True) -> str:
    """Of each step whether the boundary after it is seen to be open: T or F.

    script   words of a letter and the optimizers: z zeroes their gradients, b goes backward through their parameters,
             h halves the gradients, k keeps them, s is a step
    """
    kept, found = [], ""
    for word in script.split():
        which = [made[int(number)] for number in word[1:]]
        weights = [one.param_groups[0]["params"][0] for one in which]
        if word[0] == "b":
            gradients.look_at_watched()
            torch.stack([weight.square().sum() for weight in weights]).sum().backward()
        for one, weight in zip(which, weights, strict=True):
            if word[0] == "z":
                one.zero_grad(set_to_none)
            elif word[0] == "h":
                weight.grad.mul_(0.5)
            elif word[0] == "k":
                kept.append(weight.grad)
            elif word[0] == "s":
                found += "FT"[open_boundaries.look(one)]
                one.step()
                gradients.watch(one)
    return found


# What each iteration does, and which boundaries are open; 0 is a GAN's generator, and 1 its discriminator.
SCRIPTS = {
    "two steps on one backward": ("z01 b01 s0 s1 " * 3, "TF" * 3),
    "one steps less often": (("z0 b01 s0 " * 3 + "s1 z1 ") * 2, "TTTF" * 2),
    "a discriminator that zeroes what it has got before its step": ("z1 b1 s1 z0 b01 s0 " * 3, "FF" * 3),
    "one that has a backward of its own from now on": ("b01 s0 s1 z01 " * 2 + "z0 b0 s0 z1 b1 s1 " * 2, "TFTF" + "F" * 4),
    "gradients that the script keeps": ("b01 s0 s1 k01 z01 " * 2, "TF" * 2),
    "gradients that are clipped before the second step": ("z01 b01 h0 s0 h1 s1 " * 3, "TF" * 3),
    "a generator that steps first": ("z0 b01 s0 z1 b1 s1 " * 3, "T" + "F" * 5),
    "one never steps: for as long as a snapshot can wait": (
        "z0 b01 s0 " * (MOST_PUT_OFF + 2), "T" * MOST_PUT_OFF + "FF"
    ),
}  # fmt: skip


# With gradients that are zeroed in place a backward of its own is recognized an iteration later.
CASES = [(kind, to_none) for kind in SCRIPTS for to_none in (True, False) if to_none or "from now on" not in kind]


@pytest.mark.parametrize(("kind", "set_to_none"), CASES)
def test_a_boundary_is_open_if_a_later_step_uses_the_same_backward(
    made: list[Any], kind: str, set_to_none: bool
) -> None:
    script, is_open = SCRIPTS[kind]

    assert play(made, script, set_to_none) == is_open


def test_one_optimizer_alone_keeps_no_boundary_open(made: list[Any]) -> None:
    del made[1]

    assert play(made, "b0 s0") == "F"
