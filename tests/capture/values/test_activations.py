"""Tensors that depend on the weights: never used as if they were those of the lost rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.capture.values.carrying import (
    LARGE,
    Scope,
    big,
    carry,
    not_proved,
    record,
)
from ttprun.capture.values import CannotRestoreError, Restore, UnrecordedTensorError


def activation() -> torch.Tensor:
    return big(1.0).requires_grad_() * 2


USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda x: x.shape,
    "method": lambda x: x.detach(),
    "plus": lambda x: x + 1,
    "right minus": lambda x: 1 - x,
    "power": lambda x: x**2,
    "matmul": lambda x: x @ x,
    "index": lambda x: x[0],
    "iteration": lambda x: list(x),
    "truth": lambda x: bool(x),
    "length": lambda x: len(x),
    "float": lambda x: float(x),
    "greater": lambda x: x > 0,
    "function of torch": lambda x: torch.sum(x),
    "int": lambda x: int(x),
}


@pytest.mark.parametrize("use", USES)
def test_a_large_activation_of_the_step_before_says_so_when_it_is_used(use: str) -> None:
    here = {"logits": activation()}

    carry({"logits": activation()}, here)

    with pytest.raises((UnrecordedTensorError, TypeError)):
        USES[use](here["logits"])


SILENT_USES: dict[str, Callable[[Any], Any]] = {
    "equal": lambda x: x == 1,
    "unequal": lambda x: x != 1,
    "printed": lambda x: f"{x}",
}


@pytest.mark.parametrize("use", SILENT_USES)
def test_a_large_activation_is_never_used_without_notice(use: str) -> None:
    here = {"logits": activation()}

    carry({"logits": activation()}, here)

    with pytest.raises(UnrecordedTensorError, match="logits of shape"):
        SILENT_USES[use](here["logits"])


def parts_of_what_is_freed() -> list[torch.Tensor]:
    """Views of the whole as FSDP1 leaves them: changed after they were made, and its memory given back."""
    whole = torch.zeros(6)
    parts = list(torch.split(whole.requires_grad_() * 1, 3))
    with torch.no_grad():
        parts[0]._base.zero_()  # type: ignore[union-attr]
    parts[0].untyped_storage().resize_(0)
    return parts


def test_a_part_of_what_is_freed_is_recorded_and_says_so_when_it_is_used() -> None:
    here: Scope = {"parts": [torch.zeros(3), torch.zeros(3)]}

    assert not_proved({"parts": parts_of_what_is_freed()}) == []
    carry({"parts": parts_of_what_is_freed()}, here)

    with pytest.raises(UnrecordedTensorError, match="parts"):
        here["parts"][0].sum()


def test_the_memory_of_what_is_freed_stays_freed_in_a_replacement() -> None:
    whole, lost = torch.zeros(6), torch.zeros(6)
    here: Scope = {"one": whole[:3], "other": whole[:2]}
    there: Scope = {"one": lost[:3], "other": lost[3:]}
    for tensor in (whole, lost):
        tensor.untyped_storage().resize_(0)

    carry(there, here)

    assert whole.untyped_storage().nbytes() == 0


def lost_in_a_step() -> dict[str, torch.Tensor]:
    weight = torch.arange(3.0, requires_grad=True)
    return {"fake": weight * 2}


def test_a_small_activation_of_the_step_before_has_its_elements_and_can_be_computed_with() -> None:
    here: dict[str, Any] = {"fake": None}

    carry(lost_in_a_step(), here)

    assert here["fake"].tolist() == [0.0, 2.0, 4.0]
    assert here["fake"].requires_grad
    here["fake"] += 1
    assert here["fake"].sum().item() == 9.0


@pytest.mark.parametrize("live", [None, torch.zeros(3), torch.zeros(3, requires_grad=True) * 1])
def test_who_goes_backward_through_an_activation_of_the_step_before_is_warned(live: Any) -> None:
    here = {"fake": live}

    carry(lost_in_a_step(), here)

    with pytest.raises(UnrecordedTensorError, match="fake was computed before an optimizer step"):
        (here["fake"] * torch.ones(3, requires_grad=True)).sum().backward()


def test_on_the_way_to_the_boundary_the_replay_goes_backward_through_what_it_has_computed_itself() -> None:
    """As `fake` of a GAN, by whose discriminator's step a replay comes on its way to the generator's."""
    weight = torch.ones(3, requires_grad=True)
    small, large = weight * weight, weight.expand(LARGE, 3) * 2
    here: Scope = {"fake": small, "pictures": large}
    recorded, blobs = record({**lost_in_a_step(), "pictures": torch.ones(LARGE, 3, requires_grad=True) * 3})

    Restore(blobs, is_comparing=False).module(here, recorded, "")

    assert here["fake"].tolist() == [0.0, 2.0, 4.0]
    (here["fake"].sum() + here["pictures"].sum()).backward()
    assert weight.grad is not None


def test_what_the_replay_has_computed_in_another_form_does_not_stand_for_what_was_lost() -> None:
    recorded, blobs = record(lost_in_a_step())

    for live in (torch.ones(4, requires_grad=True) * 2, torch.ones(3, dtype=torch.double, requires_grad=True) * 2):
        here: Scope = {"fake": live}
        Restore(blobs, is_comparing=False).module(here, recorded, "")
        with pytest.raises(UnrecordedTensorError, match="fake was computed"):
            here["fake"].sum().backward()


def test_who_goes_backward_through_a_view_of_a_weight_that_the_replay_has_not_made_is_warned() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    here: Scope = {"row": torch.zeros(2)}
    recorded, blobs = record({"row": weight[1]}, {weight.untyped_storage().data_ptr()})

    Restore(blobs, is_comparing=True, stepped=[weight]).module(here, recorded, "")

    with pytest.raises(UnrecordedTensorError, match="row was computed"):
        here["row"].sum().backward()


def test_a_view_of_a_weight_that_is_a_smaller_one_in_the_replacement_is_refused() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    recorded, blobs = record({"row": weight[1]}, {weight.untyped_storage().data_ptr()})

    with pytest.raises(CannotRestoreError, match="row is a view of a weight that is smaller here"):
        Restore(blobs, is_comparing=True, stepped=[torch.zeros(1)]).module({"row": None}, recorded, "")
