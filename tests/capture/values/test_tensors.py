"""Tensors in variables: carried, compared, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tests.capture.user_values import (
    Net,
)
from tests.capture.values.carrying import (
    LARGE,
    Scope,
    as_the_recorder_writes_them,
    big,
    carry,
    record,
)
from tests.rank.processes import run_alone
from ttprun.capture import values
from ttprun.capture.values import CannotRestoreError, Restore, Snapshot, UnrecordedTensorError
from ttprun.introspect.tensor_bytes import places
from ttprun.rank.bootstrap import patch_table
from ttprun.tensors import optimizer_registry


def test_the_result_of_a_functional_collective_comes_back_as_a_plain_tensor() -> None:
    here: Scope = {"x": AsyncCollectiveTensor(torch.zeros(3)), "new": None}

    carry({"x": AsyncCollectiveTensor(torch.arange(3.0)), "new": AsyncCollectiveTensor(torch.arange(3.0))}, here)

    for found in here.values():
        assert type(found) is torch.Tensor
        assert torch.equal(found, torch.arange(3.0))


@pytest.mark.parametrize("size", [3, LARGE])
def test_no_gradient_goes_back_through_the_result_of_a_functional_collective_of_the_step_before(size: int) -> None:
    inputs = torch.ones(size, requires_grad=True)
    here: Scope = {"output": AsyncCollectiveTensor(torch.zeros(size)) * inputs}

    carry({"output": _Wrapped.apply(inputs)}, here)

    with pytest.raises(UnrecordedTensorError, match="output"):
        here["output"].sum().backward()


class _Wrapped(torch.autograd.Function):
    """As the output of a layer in tensor parallelism."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return AsyncCollectiveTensor(inputs * 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_what_is_only_compared_holds_the_contents_of_a_batch_itself() -> None:
    separate = Snapshot({}, is_separate=True)

    first, second = (separate.node(torch.full((3000,), fill), 0) for fill in (0.0, 1.0))

    assert first.contents != second.contents
    assert not separate.blobs


def leaf(length: int, gradient: float | None) -> torch.Tensor:
    made = torch.zeros(length, requires_grad=True)
    made.grad = None if gradient is None else torch.full((length,), gradient)
    return made


@pytest.mark.parametrize("live", [-5.0, None])
@pytest.mark.parametrize("lost", [1.0, None])
def test_the_gradient_of_a_leaf_that_no_optimizer_has_comes_back(lost: float | None, live: float | None) -> None:
    """As adversarial training uses that of a perturbation behind the optimizer's step."""
    here = {"delta": leaf(3, live)}

    carry({"delta": leaf(3, lost)}, here)

    found = here["delta"].grad
    assert (None if found is None else found.tolist()) == (None if lost is None else [lost] * 3)


def test_a_gradient_that_is_too_large_to_record_cannot_be_used_unseen() -> None:
    changing = leaf(LARGE, 1.0)
    record({"changing": changing})
    changing.data.fill_(2)
    here = {"changing": leaf(LARGE, -5.0), "still": leaf(LARGE, -5.0)}

    assert carry({"changing": changing, "still": leaf(LARGE, 1.0)}, here) == []

    assert all(tensor.grad is not None and tensor.grad.isnan().all() for tensor in here.values())


def test_on_the_way_to_the_boundary_gradients_are_left_as_the_replay_has_made_them() -> None:
    recorded, blobs = record({"delta": leaf(3, 1.0)})
    here = {"delta": leaf(3, -5.0)}

    Restore(blobs, is_comparing=False).module(here, recorded, "")

    assert here["delta"].grad is not None
    assert here["delta"].grad.tolist() == [-5.0] * 3


def test_a_tensor_that_something_else_holds_too_is_changed_for_both() -> None:
    """A closure, a library's object or a C++ object may hold the tensor: it must not stay behind."""
    live = torch.zeros(3)
    held_elsewhere = functools.partial(torch.sum, live)
    here = {"counts": live}

    carry({"counts": torch.ones(3)}, here)

    assert held_elsewhere().item() == here["counts"].sum().item() == 3.0


def test_a_tensor_that_an_optimizer_updates_is_left_to_the_repair() -> None:
    weight, live = torch.ones(3), torch.zeros(3)

    carry({"weight": weight}, {"weight": live}, stepped={weight.untyped_storage().data_ptr()})

    assert live.tolist() == [0.0, 0.0, 0.0]


def test_a_parameter_that_is_a_part_of_a_flat_buffer_is_known_from_the_others_in_it() -> None:
    flat = torch.zeros(5)
    lost = [torch.nn.Parameter(flat[:2]), torch.nn.Parameter(flat[2:4])]
    live = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))]
    here: Scope = {"second": None, "row": None}
    snapshot = Snapshot(places(lost))
    recorded = values.unpack_named(values.pack(snapshot.variables({"second": lost[1], "row": lost[1][:1]})))

    Restore([], is_comparing=True, stepped=live).module(here, recorded, "")

    assert here["second"] is live[1]
    assert here["row"].data_ptr() == live[1].data_ptr()


def _places_of_parameters(has_stepped: bool) -> list[int]:
    patch_table.apply_all(with_replay=False)
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizers = [torch.optim.SGD([one], momentum=0.9) for one in parameters]
    for parameter, optimizer in zip(parameters, optimizers, strict=True):
        parameter.grad = torch.ones(2)
        if has_stepped:
            optimizer.step()
    found = optimizer_registry.stepped(optimizer_registry.optimizers()).storages
    return [found[one.data_ptr()] for one in parameters]


def test_a_parameter_has_its_place_whether_or_not_the_optimizers_have_their_state() -> None:
    """Of several optimizers some may not have made a step yet in a replay."""
    assert run_alone(_places_of_parameters, True) == run_alone(_places_of_parameters, False) == [0, 1, 2]


def test_a_row_of_a_large_tensor_that_comes_before_it_stays_a_row_of_it() -> None:
    lost, live = torch.zeros(LARGE), torch.zeros(LARGE)
    scope: Scope = {"row": lost[2:6], "whole": lost}
    here: Scope = {"row": live[2:6], "whole": live}
    record(scope)
    lost[3] = 5

    assert carry(scope, here) == []
    here["whole"][4] = 9

    assert here["row"].tolist() == [0, 5, 9, 0]


def test_a_row_of_a_large_tensor_that_changes_is_refused_where_the_replay_has_another_one() -> None:
    lost, live = torch.zeros(LARGE), torch.zeros(LARGE)
    for fill in (1.0, 2.0):
        record({"whole": lost.fill_(fill)})

    for row in (live[5:9], None):
        with pytest.raises(CannotRestoreError, match="row is a part of a larger tensor that changes"):
            carry({"row": lost[2:6], "whole": lost}, {"row": row, "whole": live})


def test_a_row_of_a_large_tensor_that_stays_as_it_is_comes_back_wherever_the_replay_has_one() -> None:
    lost, live = torch.arange(float(LARGE)), torch.arange(float(LARGE))
    here: Scope = {"images": live, "image": live[8:12], "another": None}

    mismatches = carry({"images": lost, "image": lost[4:8], "another": lost[:4]}, here)

    assert mismatches == []
    assert (here["image"].tolist(), here["another"].tolist()) == ([4.0, 5.0, 6.0, 7.0], [0.0, 1.0, 2.0, 3.0])
    assert torch.equal(live, lost)


def test_a_batch_that_is_a_part_of_an_array_is_not_written_over_what_the_replay_has_taken_instead() -> None:
    lost, live = np.arange(float(LARGE)), np.arange(float(LARGE))
    here: Scope = {"images": live, "batch": torch.from_numpy(live[:4]), "same": torch.from_numpy(live[4:8])}
    same = here["same"]

    mismatches = carry(
        {"images": lost, "batch": torch.from_numpy(lost[8:12]), "same": torch.from_numpy(lost[4:8])}, here
    )

    assert mismatches == []
    assert here["batch"].tolist() == [8.0, 9.0, 10.0, 11.0]
    assert here["same"] is same
    assert np.array_equal(live, lost)


@pytest.mark.parametrize("make", [big, lambda fill: np.full(LARGE, fill)], ids=["tensor", "array"])
def test_the_first_row_of_one_batch_is_not_written_over_that_of_another(make: Callable[[float], Any]) -> None:
    """In the replay a variable may hold a row of another batch, which has the same form."""
    batches = [make(1.0), make(2.0)]
    here: Scope = {"row": batches[0][:4]}

    carry({"row": make(2.0)[:4]}, here)

    assert here["row"].tolist() == [2.0] * 4
    assert batches[0][0] == 1.0


def test_rows_of_two_large_tensors_are_not_written_over_each_other_where_the_replay_has_rows_of_one() -> None:
    live = big(0.0)
    here: Scope = {"now": live[:2], "before": live[:2]}

    carry({"now": big(1.0)[:2], "before": big(2.0)[:2]}, here)

    assert (here["now"].tolist(), here["before"].tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_a_checkpoint_of_the_weights_that_is_left_in_a_variable_is_made_of_the_replacements_own_weights() -> None:
    """As nanoGPT leaves one behind: its tensors are the weights themselves, and go on changing with them."""
    lost, live = Net(), Net()
    storages = {p.untyped_storage().data_ptr(): i for i, p in enumerate(lost.parameters())}
    snapshot = Snapshot(storages)
    checkpoint = {"model": {n: p.detach() for n, p in lost.named_parameters()}, "iter": 5}
    recorded = values.unpack_named(values.pack(snapshot.variables({"model": lost, "checkpoint": checkpoint})))
    blobs = as_the_recorder_writes_them(snapshot.blobs)
    here: Scope = {"model": live}

    Restore(blobs, True, list(live.parameters())).module(here, recorded, "")
    with torch.no_grad():
        live.inner.weight.fill_(3.0)

    assert here["checkpoint"]["iter"] == 5
    assert here["checkpoint"]["model"]["inner.weight"].unique().tolist() == [3.0]


def test_a_tensor_that_was_recorded_can_still_be_resized() -> None:
    tensor = torch.zeros(4)

    record({"x": tensor, "large": big(1.0)})

    assert tensor.resize_(8).shape == (8,)
