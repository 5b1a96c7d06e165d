"""What a run on other ranks takes over of the old run's variables, and what it leaves to its own set-up."""

from __future__ import annotations

import itertools
import random
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.capture.records import record_of
from tests.capture.user_values import Meter, State
from tests.capture.values.carrying import as_the_recorder_writes_them
from ttprun.capture import values
from ttprun.capture.records.packing import read_head
from ttprun.capture.replay.combined import spoil
from ttprun.capture.replay.merge import Merge
from ttprun.capture.values import CannotRestoreError, Restore, Snapshot, Tree
from ttprun.introspect.tensor_bytes import places

Scope = dict[str, Any]
PLACE = [["script.py", "main", 7]]


def recorded(scope: Scope, optimizers: tuple[torch.optim.Optimizer, ...] = ()) -> Tree:
    """The record of a script whose variables are these."""
    values.begin_boundary()
    parameters = [[one for group in optimizer.param_groups for one in group["params"]] for optimizer in optimizers]
    states = [
        [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
        for optimizer in optimizers
    ]
    counts = [[len(one), len(state)] for one, state in zip(parameters, states, strict=True)]
    snapshot = Snapshot(places([tensor for found in (*parameters, *states) for tensor in found]))
    fields = record_of(
        place=PLACE,
        variables=[snapshot.variables(scope)],
        optimizers=[snapshot.node(optimizer, 0) for optimizer in optimizers],
        stepped=counts,
    )
    return Tree(read_head(values.pack(fields)), as_the_recorder_writes_them(snapshot.blobs))


def merged(
    first: Tree, last: Tree, mine: Tree, ahead: frozenset[bytes] = frozenset(), is_resized: bool = True
) -> Merge:
    return Merge(first, last, mine, ahead, is_resized)


def go_on(first: Scope, last: Scope, mine: Scope, ahead: frozenset[bytes] = frozenset()) -> Scope:
    """What becomes of the new run's variables `mine`; they are changed in place."""
    trees = [first if isinstance(first, Tree) else recorded(first), last if isinstance(last, Tree) else recorded(last)]
    merge = merged(trees[0], trees[1], recorded(mine), ahead)
    made = merge.record()
    restore = Restore(merge.blobs, is_comparing=True)
    restore.module(mine, made["variables"][0], "")
    assert restore.doubts == []
    return mine


def test_what_has_changed_is_taken_over_and_what_has_not_is_left() -> None:
    first = {"rank": 1, "world": 4, "steps": 0, "best": 9.0, "name": "run"}
    last = {"rank": 1, "world": 4, "steps": 17, "best": 0.5, "name": "run"}

    found = go_on(first, last, {"rank": 0, "world": 2, "steps": 0, "best": 9.0, "name": "another"})

    assert found == {"rank": 0, "world": 2, "steps": 17, "best": 0.5, "name": "another"}


def test_it_goes_down_to_attributes_keys_and_items_of_lists_of_one_length() -> None:
    def of(rank: int, step: int) -> Scope:
        meter = Meter()
        meter.total, meter.count = float(step), rank
        return {"meter": meter, "metrics": {"rank": rank, "step": step}, "pair": [rank, step], "both": (rank, step)}

    mine = of(rank=3, step=0)
    meter, metrics = mine["meter"], mine["metrics"]

    found = go_on(of(rank=1, step=0), of(rank=1, step=8), mine)

    assert found["meter"] is meter
    assert found["metrics"] is metrics
    assert (meter.total, meter.count) == (8.0, 3)
    assert (metrics, found["pair"], found["both"]) == ({"rank": 3, "step": 8}, [3, 8], (3, 8))


def test_a_list_that_has_grown_is_taken_over_as_a_whole() -> None:
    found = go_on({"losses": [3.0]}, {"losses": [3.0, 2.0, 1.0]}, {"losses": [7.0]})

    assert found == {"losses": [3.0, 2.0, 1.0]}


def test_names_that_came_and_went_since_the_first_step() -> None:
    first, last = {"here": 1, "gone": 2}, {"here": 1, "new": [5]}

    found = go_on(first, last, {"here": 8, "gone": 2, "of its own": 6})

    assert found == {"here": 8, "new": [5], "of its own": 6}


def test_a_name_that_the_new_run_does_not_have_because_it_began_later_comes_from_the_old_one() -> None:
    assert go_on({"baseline": 3.5}, {"baseline": 3.5}, {}) == {"baseline": 3.5}


def test_two_names_of_one_object_stay_so_whether_it_is_left_or_taken_over() -> None:
    def of(rank: int, step: int) -> Scope:
        left, taken, partly = [rank], [step] * (1 + step), Meter()
        partly.count = step
        return {
            "a": left,
            "b": left,
            "c": taken,
            "d": {"inside": taken},
            "e": partly,
            "f": [partly],
            "g": step,
            "h": left,
        }

    last = of(rank=1, step=2)
    last["h"] = last["c"]  # another object than before

    found = go_on(of(rank=1, step=0), last, of(rank=0, step=0))

    assert found["a"] is found["b"]
    assert found["a"] == [0]
    assert found["c"] is found["d"]["inside"] is found["h"]
    assert found["c"] == [2, 2, 2]
    assert found["f"][0] is found["e"]
    assert found["e"].count == 2


def test_objects_that_hold_each_other_are_walked_once() -> None:
    def of(rank: int, step: int) -> Scope:
        one, other = Meter(), Meter()
        one.other, other.other = other, one  # type: ignore[attr-defined]
        one.count, other.count = rank, step
        return {"one": one, "other": other}

    found = go_on(of(1, 0), of(1, 5), of(0, 0))

    assert (found["one"].count, found["other"].count) == (0, 5)
    assert found["one"].other is found["other"]


def test_numbers_of_another_kind_and_not_a_number_are_distinguished() -> None:
    nan = float("nan")

    found = go_on({"a": 1, "b": nan, "c": 0}, {"a": True, "b": float("nan"), "c": 0.0}, {"a": 5, "b": 6.0, "c": 7})

    assert (found["a"], found["b"], found["c"]) == (True, 6.0, 0.0)
    assert type(found["c"]) is float


def test_small_tensors_are_compared_by_their_elements_and_shared_memory_stays_shared() -> None:
    def of(rank: int, step: int) -> Scope:
        base = torch.full((4,), float(step))
        return {"rank": torch.tensor(rank), "base": base, "part": base[1:3], "step": torch.tensor(step)}

    found = go_on(of(1, 0), of(1, 6), of(0, 0))

    assert (int(found["rank"]), int(found["step"])) == (0, 6)
    assert found["part"].tolist() == [6.0, 6.0]
    found["base"].zero_()
    assert found["part"].tolist() == [0.0, 0.0]


def test_a_part_of_memory_that_did_not_change_moves_in_the_new_runs_own_memory() -> None:
    """The memory may be a dataset's that the ranks divide among them; writing over it would ruin it."""
    old, own = torch.arange(10.0), torch.arange(100.0, 110.0)

    found = go_on({"x": old[:2]}, {"x": old[4:6]}, {"x": own[:2]})

    assert found["x"].tolist() == [104.0, 105.0]
    assert own.tolist() == [float(value) for value in range(100, 110)]


def test_a_large_tensor_that_is_not_the_first_ones_raises_when_it_is_used_and_one_that_is_stays() -> None:
    data, batches = torch.arange(20_000.0), torch.rand(2, 20_000)

    found = go_on({"data": data, "x": batches[0]}, {"data": data, "x": batches[1]}, {"data": -data, "x": batches[0]})

    assert found["data"][1] == -1
    with pytest.raises(values.UnrecordedTensorError):
        found["x"].sum()


def test_a_large_tensor_that_the_new_run_has_made_again_is_left() -> None:
    orders = [torch.randperm(20_000) for _ in range(2)]
    mine = orders[1].clone()

    assert go_on({"order": orders[0]}, {"order": orders[1]}, {"order": mine})["order"] is mine


def test_a_large_tensor_that_the_script_changes_is_taken_over() -> None:
    ema, mine = torch.zeros(20_000), torch.zeros(20_000)
    values.begin_boundary()
    first = recorded({"ema": ema})
    ema += 3

    found = go_on(first, {"ema": ema}, {"ema": mine})

    assert found["ema"] is mine
    assert mine.unique().tolist() == [3.0]


def test_of_a_module_the_tensors_are_taken_over_as_from_its_own_checkpoint_and_attributes_if_they_changed() -> None:
    def of(rank: int, step: int) -> Scope:
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
        model[0].running_mean.fill_(step)
        model[0].running_var.fill_(10 + rank)
        model[0].register_buffer("table", torch.full((2,), float(rank)), persistent=False)
        model[0].register_buffer("mask", torch.zeros(1 + rank), persistent=False)
        model[1].p = 0.5 - step / 100
        model[0].eps = rank
        model[0].train(step == 0)
        return {"model": model}

    mine = of(0, 0)
    model = mine["model"]

    go_on(of(1, 0), of(1, 7), mine)

    assert model[0].running_mean.tolist() == [7.0] * 3
    assert model[0].running_var.tolist() == [11.0] * 3
    assert model[0].table.tolist() == [0.0] * 2
    assert model[0].mask.tolist() == [0.0]
    assert model[1].p == pytest.approx(0.43)
    assert model[0].eps == 0
    assert not model[0].training


def test_of_a_module_that_is_wrapped_in_one_of_the_runs_only_what_is_inside_counts() -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    Wrapped.__module__ = "torch.nn.parallel.of_a_test"

    def of(step: int, wrap: Any) -> Scope:
        model = torch.nn.BatchNorm1d(2)
        model.running_mean.fill_(step)
        return {"model": wrap(model)}

    one, other = of(0, Wrapped), of(0, torch.nn.Sequential)
    plain = of(0, lambda model: model)

    go_on(of(0, lambda model: model), of(5, lambda model: model), one)
    go_on(of(0, Wrapped), of(6, Wrapped), plain)
    with pytest.raises(CannotRestoreError):
        go_on(of(0, Wrapped), of(6, Wrapped), other)

    assert one["model"].module.running_mean.tolist() == [5.0] * 2
    assert plain["model"].running_mean.tolist() == [6.0] * 2


def test_of_an_optimizer_what_a_schedule_has_changed_is_taken_over_and_new_arguments_stay() -> None:
    def of(lr: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr, weight_decay=weight_decay)

    mine = of(0.1, 0.3)
    merge = merged(recorded({}, (of(0.1, 0.0),)), recorded({}, (of(0.05, 0.0),)), recorded({}, (mine,)))
    restore = Restore(merge.blobs, is_comparing=True)
    restore.value(mine, merge.record()["optimizers"][0], "optimizer")

    assert (mine.param_groups[0]["lr"], mine.param_groups[0]["weight_decay"]) == (0.05, 0.3)


def test_a_weight_is_known_again_though_the_optimizers_before_it_have_got_state_since() -> None:
    def of(steps: int, current: int) -> tuple[Scope, tuple[torch.optim.Optimizer, ...]]:
        one, *others = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
        optimizers = (torch.optim.SGD([one], momentum=0.9), torch.optim.SGD(others))
        for _ in range(steps):
            one.sum().backward()
            optimizers[0].step()
        return {"w": others[0], "all": [*others, one], "current": others[current]}, optimizers

    mine, optimizers = of(0, 1)
    weights = [*mine["all"]]
    merge = merged(recorded(*of(0, 1)), recorded(*of(2, 0)), recorded(mine, optimizers))
    stepped = [parameter for one in optimizers for parameter in one.param_groups[0]["params"]]
    restore = Restore(merge.blobs, True, stepped)
    restore.module(mine, merge.record()["variables"][0], "")

    assert mine["w"] is weights[0]
    assert all(found is weight for found, weight in zip(mine["all"], weights, strict=True))
    assert mine["current"] is weights[0]


def test_generators_that_were_drawn_from_are_taken_over_and_reported_and_others_are_left() -> None:
    def of(seed: int) -> Scope:
        return {
            "used": random.Random(seed),
            "unused": random.Random(seed),
            "torch": torch.Generator().manual_seed(seed),
        }

    first, last, mine = of(1), of(1), of(2)
    last["used"].random()
    torch.rand(1, generator=last["torch"])
    merge = merged(recorded(first), recorded(last), recorded(mine))
    restore = Restore(merge.blobs, is_comparing=True)
    restore.module(mine, merge.record()["variables"][0], "")

    assert [restore.object_of(number) for number in merge.generators] == [mine["used"], mine["torch"]]
    assert mine["used"].random() == last["used"].random()
    assert mine["unused"].random() == random.Random(2).random()


def test_data_that_was_fetched_ahead_is_left_to_the_new_run_with_what_holds_it() -> None:
    old, new = torch.tensor([1, 2]), torch.tensor([8, 9])
    ahead = frozenset({values.fingerprint(old)})
    last = {"x": old, "batch": (old, [1]), "step": 2, "waiting": {"next": old}}

    found = go_on(
        {"step": 0, "x": 0}, last, {"x": new, "batch": (new, [0]), "step": 0, "waiting": {"next": new}}, ahead
    )

    assert found["step"] == 2
    assert found["x"] is found["batch"][0] is found["waiting"]["next"] is new
    assert found["batch"][1] == [0]


def test_data_that_was_fetched_ahead_and_that_the_new_run_has_not_is_refused() -> None:
    old = torch.tensor([1, 2])

    with pytest.raises(CannotRestoreError, match="prefetched"):
        go_on({}, {"x": old}, {}, frozenset({values.fingerprint(old)}))


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    with pytest.raises(CannotRestoreError, match="state cannot be recorded"):
        go_on({}, {"state": itertools.groupby([])}, {})


def test_a_file_that_the_script_reads_by_itself_is_refused_for_other_ranks_and_goes_on_for_other_arguments(
    tmp_path: Path,
) -> None:
    (tmp_path / "data").write_bytes(b"0123456789")
    opened = [(tmp_path / "data").open("rb", buffering=0) for _ in range(3)]
    opened[1].seek(7)
    first, last, mine = ({"data": file} for file in opened)

    with pytest.raises(CannotRestoreError, match="reads a file by itself"):
        go_on(first, last, mine)
    merge = merged(recorded(first), recorded(last), recorded(mine), is_resized=False)
    Restore(merge.blobs, is_comparing=True).module(mine, merge.record()["variables"][0], "")

    assert opened[2].tell() == 7
    for file in opened:
        file.close()


def test_a_first_step_in_another_function_is_refused() -> None:
    first, last = recorded({}), recorded({})
    first.fields.place[0][1] = "another"

    with pytest.raises(CannotRestoreError, match="in another function"):
        merged(first, last, recorded({})).record()


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4) | st.tuples(inner)
    ),
    max_leaves=12,
)


@given(old=st.dictionaries(st.text(min_size=1, max_size=3).filter(str.isidentifier), trees, max_size=5), mine=st.data())
def test_if_nothing_has_changed_all_is_left_and_if_the_new_run_is_as_the_first_all_is_taken_over(
    old: Scope, mine: Any
) -> None:
    last = mine.draw(st.fixed_dictionaries(dict.fromkeys(old, trees)))
    own = mine.draw(st.fixed_dictionaries(dict.fromkeys(old, trees)))

    left = go_on(dict(old), dict(old), dict(own))
    taken = go_on(dict(old), dict(last), dict(old))

    assert _shown(left) == _shown(own)
    assert _shown(taken) == _shown(last)


def _shown(scope: Scope) -> str:
    """Distinguished by type and by the order of keys, and not a number is not a number."""
    return repr(sorted(scope.items(), key=itemgetter(0)))


def test_state_of_a_dataclass_is_merged_like_any_object() -> None:
    found = go_on({"state": State(step=0)}, {"state": State(step=4, history=[1.0])}, {"state": State(step=0, best=3.0)})

    assert found["state"] == State(step=4, best=3.0, history=[1.0])


def after_a_first_step(first: Scope, last: Scope, before: Scope, mine: Scope) -> Scope:
    """What becomes of `mine`, if the new run's variables were `before` before its first step."""
    tree, own = recorded(first), recorded(mine)
    spoil(tree, recorded(before), own)
    merge = merged(tree, recorded(last), own)
    restore = Restore(merge.blobs, is_comparing=True)
    restore.module(mine, merge.record()["variables"][0], "")
    return mine


def test_what_only_the_first_step_has_set_comes_from_the_old_run() -> None:
    """The new run's first step is trained on any data: what it has measured must not stay."""

    def of(rank: int, scale: float | None) -> Scope:
        meter = Meter()
        meter.scale, meter.rank = scale, rank  # type: ignore[attr-defined]
        return {
            "meter": meter,
            "scales": {"one": scale, "rank": rank},
            "tensor": torch.tensor(scale or 0.0),
            "rank": rank,
        }

    old = of(1, 0.25)

    found = after_a_first_step(old, old, before=of(0, None), mine=of(0, 0.75))

    assert (found["meter"].scale, found["meter"].rank) == (0.25, 0)
    assert found["scales"] == {"one": 0.25, "rank": 0}
    assert (float(found["tensor"]), found["rank"]) == (0.25, 0)


def test_what_a_forward_pass_has_set_in_a_module_comes_from_the_old_run() -> None:
    def of(scale: float | None) -> Scope:
        model = torch.nn.Module()
        model.scale, model.fixed = scale, [1]  # type: ignore[assignment]
        return {"model": model}

    old = of(0.25)

    found = after_a_first_step(old, old, before=of(None), mine=of(0.75))

    assert found["model"].scale == 0.25


def test_what_the_first_step_has_added_to_a_list_is_not_kept() -> None:
    found = after_a_first_step({"seen": [5]}, {"seen": [5]}, before={"seen": []}, mine={"seen": [0]})

    assert found == {"seen": [5]}


def test_samples_in_memory_are_the_new_runs_own_and_what_refers_to_one_refers_to_that() -> None:
    def samples(share: int) -> list[Any]:
        return [(torch.full((8, 8), float(share + number)), number) for number in range(400)]

    values.forget()
    rows = samples(0)
    first = recorded({"rows": rows, "again": rows, "current": rows[3][0]})
    last = recorded({"rows": rows, "again": rows, "current": rows[9][0]})
    values.forget()  # the new run is another process
    own = samples(1000)

    made = go_on(first, last, {"rows": own, "again": own, "current": own[3][0]})

    assert made["rows"] is made["again"] is own
    assert own[9][0].max() == 1009.0
    assert made["current"] is own[9][0]
    values.forget()


def test_rows_in_several_indexes_are_the_new_runs_own_and_what_refers_to_one_refers_to_that() -> None:
    def dataset(share: int) -> Any:
        rows = [{"id": number, "box": [float(share), 1.0]} for number in range(1500)]
        return {"rows": rows, "by number": {row["id"]: row for row in rows}}

    values.forget()
    old = dataset(0)
    first = recorded({"data": old, "current": old["rows"][3], "box": old["by number"][3]["box"]})
    last = recorded({"data": old, "current": old["rows"][9], "box": old["by number"][9]["box"]})
    values.forget()  # the new run is another process
    own = dataset(1000)

    made = go_on(first, last, {"data": own, "current": own["rows"][3], "box": own["rows"][3]["box"]})

    assert made["data"] is own
    assert own["rows"][9]["box"] == [1000.0, 1.0]
    assert made["current"] is own["rows"][9]
    assert made["box"] is own["rows"][9]["box"]
    values.forget()


@pytest.mark.parametrize("row", [None, 3])
def test_rows_that_the_old_run_has_changed_are_its_own(row: int | None) -> None:
    def dataset(share: int) -> Any:
        rows = [{"id": number, "box": [float(share), 1.0]} for number in range(1500)]
        return {"rows": rows, "by number": {row["id"]: row for row in rows}, "epoch": 0}

    values.forget()
    old = dataset(0)
    first = recorded({"data": old})
    old["epoch"] = 7
    if row is not None:
        old["rows"][row]["box"].append(5.0)
    last = recorded({"data": old})
    values.forget()
    own = dataset(0)

    made = go_on(first, last, {"data": own})

    assert made["data"] == old
    assert made["data"]["by number"][3] is made["data"]["rows"][3]
    values.forget()


@pytest.mark.parametrize(
    ("whose", "is_scheduled", "rate", "base", "decay"),
    [
        ("auto", True, 0.25, 0.5, 0.9),
        ("auto", False, 2.0, None, 0.9),
        ("script", True, 1.0, 2.0, 0.9),
        ("script", False, 2.0, None, 0.9),
        ("checkpoint", True, 0.25, 0.5, 0.1),
        ("checkpoint", False, 0.5, None, 0.1),
    ],
)
def test_hyperparameters_that_differ_are_the_script_s_or_the_checkpoint_s_as_it_is_asked_for_and_named(
    whose: str, is_scheduled: bool, rate: float, base: float | None, decay: float
) -> None:
    def of(initial: float, decay: float, steps: int) -> tuple[Tree, Scope]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=initial, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if is_scheduled else None
        for _ in range(steps if schedule else 0):
            optimizer.step()
            schedule.step()
        scope = {"schedule": schedule, "optimizer": optimizer}
        return recorded(scope, (optimizer,)), scope

    mine, scope = of(2.0, 0.9, 0)
    merge = Merge(of(0.5, 0.1, 0)[0], of(0.5, 0.1, 1)[0], mine, frozenset(), False, whose)
    made = merge.record()
    restore = Restore(merge.blobs, is_comparing=True, stepped=[])
    restore.module(scope, made["variables"][0], "")

    (group,) = scope["optimizer"].param_groups
    assert (group["lr"], group.get("initial_lr"), group["weight_decay"]) == (rate, base, decay)
    assert not is_scheduled or scope["schedule"].base_lrs == [base]
    now = 0.25 if is_scheduled else 0.5
    assert merge.differing == [
        f"lr: 2 in the script, {now:g} in the checkpoint, {rate:g} is used",
        f"weight_decay: 0.9 in the script, 0.1 in the checkpoint, {decay:g} is used",
    ]
