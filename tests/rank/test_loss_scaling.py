"""GradScaler in a replay: the lost rank's records, and not the replay's gradients, decide where a step is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttprun.rank.step import special_steps


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Any:
    scaler = torch.amp.grad_scaler.GradScaler
    monkeypatch.setattr(scaler, "step", special_steps.wrap_step(scaler.step))
    monkeypatch.setattr(scaler, "update", special_steps.wrap_update(scaler.update))
    monkeypatch.setattr(scaler, "_maybe_opt_step", special_steps.wrap_maybe_opt_step(scaler._maybe_opt_step))
    fake = SimpleNamespace(is_live=False, is_left_out=False)
    fake.leaves_step_out = lambda frame: fake.is_left_out
    monkeypatch.setattr(
        special_steps, "current", lambda: SimpleNamespace(mode=fake, applied=0, made=SimpleNamespace(living={}))
    )
    return fake


def step(gradient: float, fused: bool = False, before: Any = None) -> tuple[float, float]:
    """(weight, scale) after one step with a scale of 8."""
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), gradient)
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=fused)
    if before is not None:
        optimizer.register_step_pre_hook(before)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return weight.item(), scaler.get_scale()


def test_a_step_that_the_lost_rank_has_taken_is_taken_whatever_the_gradients_are(replay: Any) -> None:
    weight, scale = step(float("inf"))

    assert weight == -float("inf")
    assert scale == 8.0


def test_a_step_that_the_lost_rank_has_left_out_is_left_out_whatever_the_gradients_are(replay: Any) -> None:
    replay.is_left_out = True

    weight, scale = step(8.0)

    assert (weight, scale) == (0.0, 4.0)


def test_what_a_fused_optimizer_had_found_is_the_scalers_too(replay: Any) -> None:
    def restore(optimizer: Any, args: Any, kwargs: Any) -> None:
        optimizer.found_inf = torch.ones(())
        special_steps.take_over(optimizer)

    assert step(8.0, fused=True, before=restore) == (0.0, 4.0)


def test_an_update_after_a_loop_of_steps_that_was_skipped_does_nothing(replay: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))

    scaler.update()

    assert scaler.get_scale() == 8.0


def test_a_scaler_that_is_not_enabled_is_left_alone(replay: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    scaler.step(torch.optim.SGD([weight], lr=1.0))
    scaler.update()

    assert weight.item() == -1.0


def test_outside_of_a_replay_the_gradients_decide(replay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(special_steps, "current", lambda: None)

    assert step(float("inf")) == (0.0, 4.0)
    assert step(8.0) == (-1.0, 8.0)
