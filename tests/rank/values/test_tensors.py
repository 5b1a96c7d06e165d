"""Tensors and arrays in variables: carried, compared, or refused."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tests.rank.processes import run_alone
from tests.rank.user_values import (
    Net,
)
from tests.rank.values.carrying import (
    LARGE,
    Scope,
    as_the_recorder_writes_them,
    big,
    carry,
    is_refused,
    record,
)
from ttprun.rank import values
from ttprun.rank.bootstrap import patches
from ttprun.rank.values import CannotRestoreError, Restore, Snapshot, UnrecordedTensorError
from ttprun.rank.weights import optimizer_registry
from ttprun.rank.weights.optimizer_registry import places


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5), torch.arange(6).reshape(2, 3), torch.zeros(0, 4), torch.tensor([True, False]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16), torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj(),
        torch.arange(12.0).reshape(3, 4).t(), torch.tensor([1.0]).half(), torch.tensor([float("nan")]),
    ],
    ids=["0-d", "int", "empty", "bool", "bfloat16", "complex", "conj", "transposed", "half", "nan"],
)  # fmt: skip
def test_a_small_tensor_comes_back(tensor: torch.Tensor) -> None:
    here: Scope = {"x": torch.full_like(tensor, 0), "new": None}

    carry({"x": tensor, "new": tensor.clone()}, here)

    for found in here.values():
        assert found.dtype == tensor.dtype
        assert torch.equal(found.nan_to_num(7.0) if tensor.is_floating_point() else found, tensor.nan_to_num(7.0)
                           if tensor.is_floating_point() else tensor)  # fmt: skip


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


BATCHES = {
    "plain": lambda: torch.randn(30, 50),
    "transposed": lambda: torch.randn(30, 50).t(),
    "all of its storage but the first": lambda: torch.randn(31, 50)[1:],
    "a part of a large one": lambda: torch.randn(1000, 50)[3:33],
    "columns of a large one": lambda: torch.randn(1000, 50)[:60, :25],
    "conj": lambda: torch.randn(30, 50, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(30, 50, dtype=torch.complex64).conj().imag,
    "bytes": lambda: torch.randint(256, (5000,), dtype=torch.uint8),
    "learnt": lambda: torch.randn(30, 50, requires_grad=True),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_some_kilobytes_comes_back_as_it_is_though_no_version_counter_shows_that_it_changed(
    kind: str,
) -> None:
    lost, here, new = BATCHES[kind](), {"x": BATCHES[kind]()}, {"x": None}
    record({"x": lost})
    lost.data[-1] = 77

    carry({"x": lost}, here)
    carry({"x": lost}, new)

    assert torch.equal(here["x"], lost)
    assert torch.equal(new["x"], lost)


def test_names_for_parts_of_one_batch_share_its_memory_in_the_replacement() -> None:
    lost, live = torch.randn(40, 50), torch.zeros(40, 50)
    here = {"batch": live, "half": live[:20], "again": live}

    carry({"batch": lost, "half": lost[:20], "again": lost}, here)
    here["batch"].fill_(8.0)

    assert here["half"].eq(8.0).all()
    assert here["again"] is here["batch"]


def test_what_is_only_compared_holds_the_contents_of_a_batch_itself() -> None:
    separate = Snapshot({}, is_separate=True)

    first, second = (separate.node(torch.full((3000,), fill), 0) for fill in (0.0, 1.0))

    assert first.contents != second.contents
    assert not separate.blobs


def test_a_loss_comes_back_as_one_that_was_computed_with_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    here = {"loss": (weight * 2).sum()}

    carry({"loss": (weight * 5).sum()}, here)

    assert here["loss"].item() == 5.0
    assert here["loss"].requires_grad


def test_a_leaf_that_is_learnt_stays_one() -> None:
    here = {"temperature": torch.zeros(1, requires_grad=True)}

    carry({"temperature": torch.ones(1, requires_grad=True)}, here)

    assert here["temperature"].requires_grad
    assert here["temperature"].item() == 1.0


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


def test_two_names_for_one_tensor_stay_two_names_for_one_tensor() -> None:
    lost, live = torch.ones(3), torch.zeros(3)
    here = {"running": live, "meter": {"running": live}}

    carry({"running": lost, "meter": {"running": lost}}, here)

    assert here["meter"]["running"] is here["running"]


def test_a_view_of_a_small_tensor_stays_a_view_or_is_refused() -> None:
    lost, live = torch.ones(4), torch.zeros(4)
    here = {"stats": live, "first": live[:1]}

    refused = is_refused({"stats": lost, "first": lost[:1]}, here)
    if not refused:
        here["stats"].fill_(8)

    assert refused or here["first"].item() == 8.0


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
    patches.apply_all(with_replay=False)
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


def test_large_data_that_the_replay_has_loaded_alike_is_accepted() -> None:
    assert carry({"data": big(1.0)}, {"data": big(1.0)}) == []


@pytest.mark.parametrize(
    "live",
    [big(2.0), torch.ones(LARGE // 2), torch.ones(LARGE, dtype=torch.float64), None],
    ids=["data", "shape", "dtype", "none"],
)
def test_large_data_that_differs_is_a_mismatch(live: Any) -> None:
    (mismatch,) = carry({"data": big(1.0)}, {"data": live})

    assert mismatch.startswith("data ")


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


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3), np.array(3), np.float32(1.5), np.int64(7), np.bool_(True), np.zeros((0, 3)),
        np.array(["ab", "c"]), np.datetime64("2026-01-01"), np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ],
    ids=["float", "0-d", "float32 scalar", "int64 scalar", "bool scalar", "empty", "text", "datetime", "fortran", "records"],
)  # fmt: skip
def test_a_small_array_comes_back(array: Any) -> None:
    here: Scope = {"x": None}

    carry({"x": array}, here)

    assert type(here["x"]) is type(array)
    assert here["x"].dtype == array.dtype
    assert np.array_equal(here["x"], array)


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


@pytest.mark.parametrize("length", [10, LARGE], ids=["small", "large"])
def test_a_file_that_is_written_as_an_array_stays_that_file(tmp_path: Path, length: int) -> None:
    lost = np.memmap(tmp_path / "lost", np.float32, "w+", shape=(length,))
    here: Scope = {"losses": np.memmap(tmp_path / "here", np.float32, "w+", shape=(length,))}
    for fill in (1.0, 2.0):  # a large one is known to change when it has done so between two boundaries
        lost[:] = fill
        recorded, blobs = record({"losses": lost})

    Restore(blobs, is_comparing=True).module(here, recorded, "")
    here["losses"][0] = 5.0
    here["losses"].flush()

    assert np.fromfile(tmp_path / "here", np.float32).tolist() == [5.0, *[2.0] * (length - 1)]


def test_two_names_for_one_array_stay_two_names_for_one_array() -> None:
    lost, live = np.ones(3), np.zeros(3)
    here = {"confusion": live, "metrics": {"confusion": live}}

    carry({"confusion": lost, "metrics": {"confusion": lost}}, here)
    here["confusion"] += 1

    assert here["metrics"]["confusion"].tolist() == [2.0, 2.0, 2.0]


def test_a_large_array_that_differs_is_a_mismatch() -> None:
    assert carry({"x": np.ones(LARGE)}, {"x": np.ones(LARGE)}) == []
    assert carry({"x": np.ones(LARGE)}, {"x": np.zeros(LARGE)}) == ["x has other data than in the lost rank"]
    assert carry({"x": np.ones(LARGE)}, {"x": None}) == ["x is large data in the lost rank and not in the replacement"]


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


def test_a_large_tensor_that_the_script_changes_is_carried() -> None:
    lost, here = {"bank": big(0.0)}, {"bank": big(0.0)}
    record(lost)
    lost["bank"][100:200] = 7.0

    assert carry(lost, here) == []

    assert torch.equal(here["bank"], lost["bank"])


def test_a_large_tensor_that_is_changed_behind_its_version_counter_is_carried_too() -> None:
    lost, here = {"ema": big(1.0)}, {"ema": big(1.0)}
    record(lost)
    lost["ema"].data.mul_(0.5)

    carry(lost, here)

    assert torch.equal(here["ema"], lost["ema"])


def test_a_large_array_that_the_script_changes_is_carried() -> None:
    lost, here = {"buffer": np.zeros(LARGE)}, {"buffer": np.zeros(LARGE)}
    record(lost)
    lost["buffer"][17] = 4.0

    carry(lost, here)

    assert here["buffer"][17] == 4.0


def test_a_single_element_of_large_data_that_differs_is_a_mismatch() -> None:
    live = big(1.0)
    live[12_345] = 2.0

    assert carry({"data": big(1.0)}, {"data": live}) == ["data has other data than in the lost rank"]


def test_a_tensor_that_was_recorded_can_still_be_resized() -> None:
    tensor = torch.zeros(4)

    record({"x": tensor, "large": big(1.0)})

    assert tensor.resize_(8).shape == (8,)


def test_a_view_of_an_array_stays_a_view() -> None:
    lost, live = np.ones(4), np.zeros(4)
    here = {"stats": live, "first": live[:1], "other": None}

    carry({"stats": lost, "first": lost[:1], "other": lost[2:]}, here)
    here["stats"].fill(8)

    assert (here["first"].tolist(), here["other"].tolist()) == ([8.0], [8.0, 8.0])


def _pair(whole: Any, part: Any) -> Scope:
    return {"whole": whole, "part": part}


def of_tensor() -> Scope:
    whole = torch.zeros(4)
    return _pair(whole, whole.numpy())


def of_detached_tensor_first() -> Scope:
    whole = torch.zeros(4)
    return {"part": whole.detach().numpy()[:2], "whole": whole}


def of_bytes() -> Scope:
    whole = bytearray(16)
    return _pair(whole, np.frombuffer(whole, dtype=np.float32))


def of_bytes_but_the_first() -> Scope:
    whole = bytearray(16)
    return {"part": np.frombuffer(whole, dtype=np.float32, offset=4), "whole": whole}


def of_large_array() -> Scope:
    whole = np.zeros(LARGE)
    return _pair(whole, whole[2:6])


def of_large_array_first() -> Scope:
    whole = np.zeros(LARGE)
    return {"part": whole[2:6], "whole": whole}


def of_file() -> Scope:
    return {"part": np.frombuffer(mmap.mmap(-1, 4096), dtype=np.float32)[:8]}


ARRAYS = [of_tensor, of_detached_tensor_first, of_bytes, of_bytes_but_the_first, of_large_array, of_large_array_first,
          of_file]  # fmt: skip


@pytest.mark.parametrize("make", ARRAYS)
def test_an_array_whose_memory_something_else_holds_is_written_there(make: Callable[[], Scope]) -> None:
    lost, here = make(), make()
    held_elsewhere = here["part"][:]
    record(lost)
    lost["part"][:] = 7

    assert carry(lost, here) == []
    here["part"][1] = 9

    assert held_elsewhere.tolist() == here["part"].tolist() == [7, 9, *lost["part"].tolist()[2:]]
    assert "whole" not in here or np.shares_memory(here["part"], np.frombuffer(memory_of(here["whole"]), np.uint8))


def memory_of(whole: Any) -> Any:
    return whole.numpy() if isinstance(whole, torch.Tensor) else whole


@pytest.mark.parametrize("make", ARRAYS)
def test_an_array_that_the_replay_has_not_made_shares_the_same_memory_or_is_refused(make: Callable[[], Scope]) -> None:
    lost, here = make(), make() | {"part": None}
    for fill in (1, 2):
        lost["part"][:] = fill
        record(lost)

    refused = is_refused(lost, here)
    if not refused:
        here["part"][1] = 9

    assert refused or np.shares_memory(here["part"], np.frombuffer(memory_of(here["whole"]), np.uint8))
    assert refused == (make is of_file)


def test_a_row_of_a_large_array_that_stays_as_it_is_comes_back_wherever_the_replay_has_one() -> None:
    """`image = images[i]`: what stands in row i of the replacement's own images must not be written over."""
    lost, live = np.arange(float(LARGE)).reshape(-1, 4), np.arange(float(LARGE)).reshape(-1, 4)
    here: Scope = {"images": live, "image": live[3], "another": None}

    mismatches = carry({"images": lost, "image": lost[17], "another": lost[18]}, here)

    assert mismatches == []
    assert here["image"].tolist() == lost[17].tolist()
    assert here["another"].tolist() == lost[18].tolist()
    assert np.array_equal(live, lost)


def test_an_array_that_looks_at_a_weight_looks_at_the_replacements_own() -> None:
    lost, live = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.zeros(3))
    recorded, blobs = record({"look": lost.detach().numpy(), "new": lost.detach().numpy()[1:]}, {lost.data_ptr()})
    here: Scope = {"look": live.detach().numpy(), "new": None}

    Restore(blobs, is_comparing=True, stepped=[live]).module(here, recorded, "")
    live.data.fill_(5)

    assert here["look"].tolist() == [5.0, 5.0, 5.0]
    assert here["new"].tolist() == [5.0, 5.0]


def _of_one_array() -> Scope:
    whole = np.arange(8.0)
    return {"a": whole, "t": torch.from_numpy(whole), "part": torch.from_numpy(whole[2:])}


SHARED: dict[str, Callable[[], Scope]] = {
    "parts of a tensor": lambda: (lambda t: {"a": t[:5], "b": t[3:], "c": t.view(5, 2)})(torch.arange(10.0)),
    "an array of a tensor": lambda: (lambda t: {"t": t, "a": t.numpy()})(torch.arange(4.0)),
    "an array of a tensor, met first": lambda: (lambda t: {"a": t.numpy()[1:], "t": t})(torch.arange(4.0)),
    "tensors of an array": _of_one_array,
    "an array of which a tensor was met first": lambda: dict(reversed([*_of_one_array().items()][:2])),
    "parts of an array": lambda: (lambda a: {"x": a[:5], "y": a[3:]})(np.arange(8.0)),
    "what is large": lambda: (lambda t: {"t": t, "a": t.numpy()})(torch.zeros(LARGE)),
}


def _add(scope: Scope) -> None:
    for value in scope.values():
        value += 1


@pytest.mark.parametrize("are_made", ["here, together", "here, apart", "not here"])
@pytest.mark.parametrize("kind", SHARED)
def test_what_lies_in_one_memory_does_so_in_the_replacement_or_is_refused(kind: str, are_made: str) -> None:
    lost, here = SHARED[kind](), SHARED[kind]()
    for _ in range(2):
        record(lost)
        _add(lost)
    if are_made != "here, together":
        here = (
            {}
            if are_made == "not here"
            else {
                name: value.copy() if isinstance(value, np.ndarray) else value.clone() for name, value in here.items()
            }
        )

    refused = is_refused(lost, here)
    _add(lost)
    if not refused:
        _add(here)

    assert refused == (kind == "what is large" and are_made != "here, together")
    assert refused or {n: v.tolist() for n, v in here.items()} == {n: v.tolist() for n, v in lost.items()}
