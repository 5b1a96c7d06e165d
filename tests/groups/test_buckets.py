"""Inputs of which the journal makes no copy: two real ranks of DDP, whose gradients are in buckets of a megabyte."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.rank.worlds import FakeAgent, run_world, say, wait_for
from ttprun.chaos import strikes
from ttprun.chaos.injected_faults import parse_fault
from ttprun.groups.inputs import TRUSTED_AFTER, Bucket, BucketInput, Buckets
from ttprun.groups.journal import Journal
from ttprun.introspect import host_copies, stages
from ttprun.introspect.current_rank import current
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.protocol import from_rank, rank_events, to_rank
from ttprun.rank.verification import Verifier, nan_in

WIDTH = 520  # more than a megabyte of weights
BEGINS_AT = TRUSTED_AFTER + 1  # DDP orders its buckets in the second step
STEPS = BEGINS_AT + 2


class Training:
    """A model of two buckets that hold more than a megabyte, and what the journal has of them in each step."""

    def __init__(self, rank: int, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
        self.model = DDP(nn.Sequential(*layers), bucket_cap_mb=1, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.inputs = torch.Generator().manual_seed(rank)
        self.held: list[int] = []

    def backward(self, scale: float = 1.0) -> None:
        (self.model(torch.randn(4, WIDTH, generator=self.inputs)).square().mean() * scale).backward()

    def step(self, backwards: int = 1, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        for _ in range(backwards):
            self.backward(scale)
        self.held.append(len(held_entries()))
        for weight in self.model.parameters():
            assert weight.grad is not None
            weight.grad.nan_to_num_()
        self.optimizer.step()

    def digest(self) -> float:
        """Of the weights."""
        return float(sum(weight.detach().double().abs().sum() for weight in self.model.parameters()))


def held_entries() -> list[Any]:
    """What the journal holds without a copy of its input."""
    session = current()
    return (
        [] if session is None else [entry for entry in session[Journal].entries if isinstance(entry.input, BucketInput)]
    )


def train(rank: int, backwards: int = 1, prepare: Any = id, **options: Any) -> tuple[list[int], float]:
    training = Training(rank, **options)
    prepare(training.model)
    for _ in range(STEPS):
        training.step(backwards)
    return training.held, training.digest()


@pytest.mark.parametrize(("leaves_out", "begins_at"), [(False, BEGINS_AT), (True, TRUSTED_AFTER)])
def test_from_the_seventh_step_on_the_gradients_are_not_copied_any_more(leaves_out: bool, begins_at: int) -> None:
    """From the fifth one on of a model that may leave out parameters, as transformers' Trainer wraps each model."""
    for held, _ in run_world(functools.partial(train, find_unused_parameters=leaves_out)):
        assert held == [0] * begins_at + [2] * (STEPS - begins_at)


def predict(rank: int, is_wrong: bool) -> tuple[list[int], list[bool], list[Any]]:
    """As on a device: gradients in each bucket that is predicted, whether they are in it; after what fault, and commit."""
    counts, same, faults, hold = [], [], [], Buckets.hold

    def predict_and_hold(self: Buckets, entry: Any) -> bool:
        flat = entry.outputs[0]
        bucket = self._bucket_of(flat) if entry.op == "allreduce" else None
        if bucket is not None:
            if is_wrong:
                bucket._parameters[:] = bucket._parameters[::-1]
            counts.append(len(bucket._parameters))
            same.append(bool(is_made := bucket.compared(flat)))
            entry.input = BucketInput(bucket, flat, bucket.note(flat), flat._version, is_made)
            self._held.append((entry, entry.input))
            if is_wrong and not faults:
                with pytest.raises(NotRepairableError) as refused:
                    entry.input.put_back([flat])
                self.end_step()
                host_copies.take()
                faults.extend([str(refused.value), bucket.is_refused, hold(self, entry)])
            return True
        return hold(self, entry)

    Buckets.hold = predict_and_hold  # type: ignore[method-assign]
    training = Training(rank)
    for _ in range(1 if is_wrong else 3):
        training.step()
    return counts, same, faults


def test_what_ddp_puts_into_its_buckets_is_known_before_each_step_and_a_wrong_prediction_is_seen() -> None:
    """In the first step all is in one, then in the order in which gradients have come."""
    refusal = "DDP has reduced others than predicted, whose input is therefore lost"

    assert run_world(predict, False) == [([4, 2, 2, 2, 2], [True] * 5, [])] * 2
    assert run_world(predict, True) == [([4], [False], [refusal, True, False])] * 2


class Leaves(nn.Module):
    """Of two layers one rank leaves one out in some steps."""

    def __init__(self, leaves_in: range) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.leaves_in, self.steps = leaves_in, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        found: torch.Tensor = self.first(inputs)
        return found if self.steps - 1 in self.leaves_in else self.second(found)


def leave_out_later(rank: int, is_set_to_none: bool) -> tuple[list[int], float]:
    torch.manual_seed(0)
    leaves_in = range(STEPS, STEPS + 2) if rank else range(0)
    model = DDP(Leaves(leaves_in), bucket_cap_mb=1, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    held = []
    for step in range(STEPS + 4):
        optimizer.zero_grad(set_to_none=is_set_to_none)
        model(torch.full((2, WIDTH), 1 / (1.0 + step + rank))).square().mean().backward()
        held.append(len(held_entries()))
        optimizer.step()
    return held[STEPS - 1 :], float(sum(weight.detach().double().abs().sum() for weight in model.parameters()))


@pytest.mark.parametrize("is_set_to_none", [True, False])
def test_a_parameter_that_one_rank_leaves_out_later_ends_it_for_its_bucket_there(is_set_to_none: bool) -> None:
    found = run_world(leave_out_later, is_set_to_none)
    plain = run_world(leave_out_later, is_set_to_none, is_managed=False)

    assert [digest for _, digest in found] == [digest for _, digest in plain]
    if is_set_to_none:
        assert [held for held, _ in found] == [[2] * 5, [2, 1, 1, 1, 1]]


def train_small_layers(rank: int, width: int, depth: int) -> int:
    """How many of the reductions of the last step were not copied: gradients of width x width, and of width, elements."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = 0
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, width)).sum().backward()
        held = len(held_entries())
        optimizer.step()
    return held


def test_gradients_are_copied_where_that_is_quicker_than_to_note_each() -> None:
    assert run_world(train_small_layers, 256, 2) == [1] * 2  # half a megabyte in 4 gradients
    assert run_world(train_small_layers, 64, 40) == [0] * 2  # more, in 80
    assert run_world(train_small_layers, 128, 2) == [0] * 2  # 129 KiB in 4


def put(values: list[float], gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with these values at its end, as the backward pass may give it."""
    return torch.cat([gradient.flatten()[: -len(values)], torch.tensor(values)]).view_as(gradient)


def look_before_each_step() -> None:
    """As with `on_nan: stop`; the NaN itself is only reported."""
    session = current()
    if session is not None:
        session[Verifier].looks_before = True
        session.options = msgspec.structs.replace(session.options, nan_limit_s=60.0)  # type: ignore[misc]


def look_for_nans(rank: int, values: list[float]) -> list[str]:
    """What is known before the step, for each of the parameters in which rank 1 gets these values."""
    training = Training(rank)
    look_before_each_step()
    for _ in range(BEGINS_AT):
        training.step()
    found: list[str] = []
    for weight in training.model.parameters():
        removed: Any = weight.register_hook(functools.partial(put, values)) if rank == 1 else None
        training.optimizer.zero_grad()
        training.backward()
        assert len(held_entries()) == 2
        session = current()
        found += [] if session is None else [nan_in(session[Journal])]
        for known in training.model.parameters():
            assert known.grad is not None
            known.grad.zero_()
        training.optimizer.step()
        if removed is not None:
            removed.remove()
    return found


def test_one_nan_in_any_gradient_is_named_in_the_rank_that_made_it_and_in_no_other() -> None:
    of_one, of_other = run_world(look_for_nans, [float("nan")])

    second = f"allreduce number 1 of the step, 1 of {WIDTH * WIDTH + WIDTH} elements"
    assert of_one == [""] * 4
    assert of_other == [second, second, second.replace("number 1", "number 0"), second.replace("number 1", "number 0")]


def test_infinities_of_both_signs_in_a_gradient_are_no_nan() -> None:
    assert run_world(look_for_nans, [float("inf"), float("-inf")]) == [[""] * 4] * 2


def be_given_a_nan(rank: int) -> tuple[int, str, int]:
    """A fault puts a NaN into what the first reduction of a step is given: what is known, and seen, of it then."""
    look_before_each_step()
    training = Training(rank)
    for _ in range(BEGINS_AT):
        training.step()
    if rank == 1:
        stages.listeners.append(strikes)
        strikes.arm(1, parse_fault("nan:rank=1,phase=backward"))
    training.optimizer.zero_grad()
    seen: list[int] = []
    training.model.module[0].register_full_backward_pre_hook(
        lambda *_: seen.append(count_nans(training.model.module[2]))
    )
    training.backward()
    session = current()
    assert session is not None
    return len(held_entries()), nan_in(session[Journal]), seen[0]


def count_nans(layer: nn.Module) -> int:
    return sum(int(weight.grad.isnan().sum()) for weight in layer.parameters() if weight.grad is not None)


def test_a_nan_that_a_fault_puts_into_a_bucket_is_in_the_gradient_too() -> None:
    of_one, of_other = run_world(be_given_a_nan)

    assert of_one == (2, "", 0)
    assert of_other == (2, f"allreduce number 0 of the step, 1 of {WIDTH * WIDTH + WIDTH} elements", 1)


def train_one_after_the_other(rank: int) -> list[list[int]]:
    first, _ = train(rank)
    gc.collect()
    return [first, train(rank)[0]]


def test_the_buckets_of_a_second_model_are_learnt_as_those_of_the_first() -> None:
    assert run_world(train_one_after_the_other) == [[[0] * BEGINS_AT + [2] * 2] * 2] * 2


def test_a_model_is_not_kept_by_what_is_known_of_its_buckets() -> None:
    layer = nn.Linear(2, 2)
    weight = weakref.ref(layer.weight)
    bucket = Bucket(layer, list(layer.parameters()), world_size=2)

    del layer
    gc.collect()

    assert weight() is None
    assert not bucket.is_alive
    assert not bucket.fill(torch.zeros(6))


def break_off(*_: Any) -> None:
    raise ValueError("broken off")


def break_a_backward_pass_off(rank: int) -> tuple[int, str]:
    """Behind the first reduction of two; the gradients are thrown away, and something else is reduced."""
    look_before_each_step()
    training = Training(rank)
    for _ in range(BEGINS_AT):
        training.step()
    training.optimizer.zero_grad()
    training.model.module[0].register_full_backward_pre_hook(break_off)
    with pytest.raises(ValueError, match="broken off"):
        training.backward()
    training.optimizer.zero_grad()
    torch.distributed.all_reduce(torch.ones(1))
    session = current()
    assert session is not None
    return len(held_entries()), nan_in(session[Journal])


def test_a_backward_pass_that_is_broken_off_does_not_disturb_the_next_collective() -> None:
    assert run_world(break_a_backward_pass_off) == [(1, "")] * 2


def halve_gradient(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


def hook_gradients(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(halve_gradient)


def hook_reductions(model: Any) -> None:
    model.register_comm_hook(None, default_hooks.allreduce_hook)


def begin_with_an_overflow(rank: int) -> list[int]:
    training = Training(rank)
    for step in range(STEPS + 1):
        training.step(scale=float("nan") if step == 3 else 1.0)
    return training.held


def test_a_step_whose_gradients_are_nan_says_of_the_buckets_what_another_does() -> None:
    assert run_world(begin_with_an_overflow) == [[0] * BEGINS_AT + [2] * 3] * 2


def train_otherwise(rank: int) -> list[list[int]]:
    options = [{"gradient_as_bucket_view": True}, {"static_graph": True}, {"backwards": 2}]
    ways: Any = [*options, {"prepare": hook_gradients}, {"prepare": hook_reductions}]
    return [train(rank, **way)[0] for way in ways]


def test_gradients_that_ddp_treats_otherwise_are_copied() -> None:
    for held in run_world(train_otherwise):
        assert held == [[0] * STEPS] * 5


def change_later(rank: int) -> list[list[int]]:
    """The first bucket's gradients by a hook; or all, in a second backward pass."""
    found = []
    for backwards in (1, 2):
        training = Training(rank)
        for step in range(BEGINS_AT + 3):
            is_later = step == BEGINS_AT + 1
            if is_later and backwards == 1:
                next(iter(training.model.parameters())).register_post_accumulate_grad_hook(halve_gradient)
            training.step(backwards if is_later else 1)
        found.append(training.held[BEGINS_AT:])
    return found


def test_a_hook_or_a_second_reduction_that_comes_later_ends_it_for_its_bucket() -> None:
    assert run_world(change_later) == [[[2, 1, 1], [2, 2, 0]]] * 2


def look_behind_a_backward_pass(rank: int) -> list[Any]:
    training = Training(rank)
    for _ in range(BEGINS_AT):
        training.step()
    training.optimizer.zero_grad()
    training.backward()
    first, *_ = held_entries()
    found: list[Any] = [first.is_done, first.input.is_kept]
    try:
        first.input.put_back(first.own_inputs)  # but the gradients are the result's by now
    except NotRepairableError as error:
        found.append(str(error))
    training.backward()
    return [*found, first.input.is_kept]


def test_an_input_is_never_made_of_gradients_that_are_not_those_it_was_made_of() -> None:
    refusal = "a gradient was changed after its all-reduce, whose input is therefore lost"

    assert run_world(look_behind_a_backward_pass) == [[True, True, refusal, False]] * 2


def be_interrupted(rank: int, moment: str, **options: Any) -> tuple[list[int], float]:
    """In one of the later steps the connections break: before, in or behind the reduction of the first bucket."""
    training = Training(rank, **options)
    for step in range(BEGINS_AT + 3):
        if step == BEGINS_AT + 1 and current() is not None:
            lie_in_wait(training, rank, moment)
        training.step()
    return training.held[BEGINS_AT:], training.digest()


def lie_in_wait(training: Training, rank: int, moment: str) -> None:
    def interrupt(*_: Any) -> None:
        removed.remove()
        say("here")
        wait_for("go on")

    if moment == "behind":
        removed: Any = training.optimizer.register_step_pre_hook(interrupt)
    elif rank == 0:  # the other one stands in the reduction of the first bucket, or of the second
        layer = training.model.module[2 if moment == "in the first" else 0]
        removed = layer.register_full_backward_pre_hook(interrupt)


def break_connections_while_one_is_late(ranks: tuple[int, ...], agent: FakeAgent) -> None:
    for rank in ranks:
        agent.wait_for(rank, from_rank.Note, text="here")
    agent.pause()
    for line in agent.lines:
        line.send(to_rank.Freeze((0, 1), 2, ()))
    agent.generation = 2
    for rank in ranks:
        agent.send_value(rank, "go on")
    for rank in range(2):
        agent.wait_for(rank, from_rank.RankFrozen, generation=2)
    agent.resume()


@pytest.mark.parametrize("leaves_out", [False, True])
@pytest.mark.parametrize(("moment", "ranks"), [("in the first", (0,)), ("in the second", (0,)), ("behind", (0, 1))])
def test_connections_that_break_around_such_a_reduction_change_nothing(
    moment: str, ranks: tuple[int, ...], leaves_out: bool
) -> None:
    scenario = functools.partial(break_connections_while_one_is_late, ranks)
    train_on = functools.partial(be_interrupted, moment=moment, find_unused_parameters=leaves_out)

    broken = run_world(train_on, scenario=scenario)

    assert broken == [([2, 2, 2], digest) for _, digest in run_world(train_on, is_managed=False)]


def lose_a_result(rank: int) -> None:
    training = Training(rank)
    for _ in range(BEGINS_AT):
        training.step()
    training.optimizer.zero_grad()
    training.backward()
    training.optimizer.register_step_pre_hook(lambda *_: None)
    session = current()
    assert session is not None
    if rank == 0:
        session[Journal].sources = {(entry.group.group_name, 0): 0 for entry in held_entries()}
        training.backward()
        training.optimizer.step()
    else:
        training.backward()
        wait_for("the end")


def hear_of_a_mismatch(agent: FakeAgent) -> None:
    mismatch = agent.wait_for(0, rank_events.MismatchFound)
    assert "was overwritten while it was sent to the other ranks" in mismatch.reason.text
    raise InterruptedError


def test_no_rank_steps_with_a_result_that_was_written_over_while_it_was_given() -> None:
    with pytest.raises(AssertionError, match="InterruptedError"):
        run_world(lose_a_result, scenario=hear_of_a_mismatch)
