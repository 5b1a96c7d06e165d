"""Optimizers, schedulers and scalers in variables."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.capture.user_values import (
    CountingSgd,
)
from tests.capture.values.carrying import (
    Scope,
    carry,
    is_refused,
    record,
)
from ttprun.capture import values
from ttprun.capture.values import CannotRestoreError


def test_hyper_parameters_of_an_optimizer_come_back() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    lost = torch.optim.AdamW([weight], lr=0.5, betas=(0.8, 0.9), weight_decay=0.3)
    live = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    params = live.param_groups[0]["params"]

    carry({"optimizer": lost}, {"optimizer": live})

    group = live.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.3)
    assert group["params"] is params


def test_a_learning_rate_that_is_a_tensor_comes_back() -> None:
    lost = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.5))
    live = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.1))

    carry({"optimizer": lost}, {"optimizer": live})

    assert live.param_groups[0]["lr"].item() == 0.5


def test_an_optimizer_with_another_number_of_groups_is_refused() -> None:
    lost = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    lost.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    live = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)

    with pytest.raises(CannotRestoreError, match="optimizer is another optimizer"):
        carry({"optimizer": lost}, {"optimizer": live})


def test_a_counter_in_an_optimizer_of_the_users_own_comes_back_or_is_refused() -> None:
    lost, live = (CountingSgd([torch.nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2))
    lost.lookahead_steps = 4

    refused = is_refused({"optimizer": lost}, {"optimizer": live})

    assert refused or live.lookahead_steps == 4


schedulers = torch.optim.lr_scheduler


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 9], 0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=8),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, total_iters=6),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 1.0, step_size_up=3, mode="exp_range", gamma=0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 10)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)]
    ),
}  # fmt: skip


def optimizer_and(schedule: Callable[[Any], Any]) -> Scope:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "schedule": schedule(optimizer)}


def rates(scope: Scope, steps: int, *metrics: float) -> list[Any]:
    found = []
    for at in range(steps):
        scope["optimizer"].step()
        scope["schedule"].step(*metrics[at : at + 1])
        group = scope["optimizer"].param_groups[0]
        found.append([group["lr"], group["momentum"], *scope["schedule"].get_last_lr()])
    return found


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_as_in_the_lost_rank(kind: str) -> None:
    lost, here = optimizer_and(SCHEDULES[kind]), optimizer_and(SCHEDULES[kind])
    rates(lost, 7)

    carry(lost, here)

    assert rates(here, 6) == rates(lost, 6)


def test_a_schedule_that_waits_for_a_plateau_goes_on_as_in_the_lost_rank() -> None:
    lost, here = (optimizer_and(lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.5)) for _ in range(2))
    rates(lost, 3, 1.0, 0.9, 0.95)

    carry(lost, here)

    assert rates(here, 4, 0.95, 0.95, 0.95, 0.1) == rates(lost, 4, 0.95, 0.95, 0.95, 0.1)


def test_a_gradient_scaler_comes_back_also_if_the_replacement_has_not_used_it() -> None:
    lost, live = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2))
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        lost.scale(weight.sum()).backward()
        lost.step(optimizer)
        lost.update()

    carry({"scaler": lost}, {"scaler": live})

    assert lost.get_scale() == 16.0
    assert live.get_scale() == 16.0
    assert live.state_dict() == lost.state_dict()


def test_what_the_script_has_dropped_is_let_go_of() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    scope = {"schedule": torch.optim.lr_scheduler.StepLR(optimizer, 10), "step": 1}
    dropped = weakref.ref(optimizer)
    for _ in range(2):
        values.begin_boundary()
        record(scope, key="train", is_lasting=True)
    del optimizer, scope["schedule"]

    values.let_go()
    gc.collect()

    assert dropped() is None
