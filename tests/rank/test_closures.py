"""Which argument of `Optimizer.step` is a closure, when the boundary is recorded that such a step leads to, and when a
replay of it goes live.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.rank.fakes import become, make_session
from tests.rank.processes import run_alone
from ttprun.introspect.current_rank import Mode, Rank
from ttprun.rank.bootstrap import patch_table
from ttprun.rank.step import special_steps, step_hooks


class Plain(torch.optim.SGD):
    """Takes its arguments as torch's own optimizers do."""


class OfModel(torch.optim.SGD):
    """Takes a model where others take a closure."""

    def step(self, model: Any = None) -> Any:  # type: ignore[override]
        return model


class HandsOn(torch.optim.SGD):
    """Hands whatever it gets to another optimizer."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)


def parameters() -> list[torch.Tensor]:
    return [torch.zeros(2, requires_grad=True)]


def model() -> float:
    return 1.0


@pytest.mark.parametrize("kind", [Plain, HandsOn])
@pytest.mark.parametrize(("args", "kwargs"), [((model,), {}), ((), {"closure": model})])
def test_the_closure_is_watched_and_what_it_returns_is_what_its_end_gives_back(
    kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    optimizer: Any = kind(parameters())
    ended: list[float] = []
    watch = special_steps.ClosureWatch(lambda returned: ended.append(returned) or 2.0, lambda: None)  # type: ignore[func-returns-value]

    found = special_steps.watch(optimizer, (optimizer, *args), kwargs, watch)

    assert found is not None
    (_, *given), named = found
    assert [closure() for closure in (*given, *named.values())] == [2.0]
    assert ended == [1.0]


@pytest.mark.parametrize("args", [(), (None,)])
def test_a_step_without_a_closure_is_left_alone(args: tuple[Any, ...]) -> None:
    optimizer = Plain(parameters())

    assert special_steps.watch(optimizer, (optimizer, *args), {}, special_steps.ClosureWatch(print, print)) is None


def test_what_an_optimizer_takes_in_place_of_a_closure_is_left_alone() -> None:
    optimizer = OfModel(parameters())

    assert special_steps.watch(optimizer, (optimizer, model), {}, special_steps.ClosureWatch(print, print)) is None


def _session(**known: Any) -> Rank:
    patch_table.apply_all(with_replay=False)
    register_optimizer_step_pre_hook(step_hooks.before_step)
    register_optimizer_step_post_hook(step_hooks.after_step)
    session = make_session(**known)
    become(session)
    return session


def _steps_seen(take: Callable[[Rank], None]) -> tuple[int, str]:
    session = _session()
    take(session)
    return session.applied, session.unprotected.text


def _one_call(session: Rank) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    seen = []

    def closure() -> torch.Tensor:
        seen.append(session.is_applying)
        loss = weight.sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    assert seen == [False]


def _several_calls(session: Rank) -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def _no_call(session: Rank) -> None:
    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return None

    Deaf(parameters()).step(print)


def _after_a_failed_one(session: Rank) -> None:
    def fail() -> float:
        raise ValueError("a batch that is no good")

    with pytest.raises(ValueError, match="no good"):
        torch.optim.SGD(parameters()).step(fail)
    other = torch.optim.SGD(parameters())
    other.step()


def _within_another(session: Rank) -> None:
    class Around(torch.optim.Optimizer):
        def __init__(self, within: torch.optim.Optimizer) -> None:
            super().__init__(parameters(), {})
            self.within = within

        def step(self, closure: Any = None) -> Any:
            return self.within.step(closure)

    Around(torch.optim.SGD(parameters())).step(model)


def test_a_closure_runs_before_the_weights_count_as_changing() -> None:
    assert run_alone(_steps_seen, _one_call) == (1, "")


def test_a_closure_that_is_called_again_costs_the_protection_with_the_reason() -> None:
    steps, reason = run_alone(_steps_seen, _several_calls)

    assert steps == 1
    assert reason.startswith("the optimizer calls its closure several times per step (LBFGS with max_iter > 1)")


def test_a_closure_that_is_never_called_costs_the_protection() -> None:
    steps, reason = run_alone(_steps_seen, _no_call)

    assert steps == 1
    assert reason == "the optimizer has taken a step without calling its closure"


def test_a_step_that_an_exception_has_ended_does_not_hide_those_of_another_optimizer() -> None:
    assert run_alone(_steps_seen, _after_a_failed_one) == (1, "")


def test_a_step_inside_of_another_optimizer_s_step_is_one_with_it() -> None:
    assert run_alone(_steps_seen, _within_another) == (1, "")


class _AtTarget(Mode):
    """A replay whose boundary is that of the step which it comes to."""

    is_live = False

    def __init__(self, session: Rank, order: list[str]) -> None:
        self._session, self._order = session, order

    def before_step(self, frame: Any, returned: Any = None, optimizer: Any = None) -> Any:
        return returned

    def begin_step(self, optimizer: torch.optim.Optimizer) -> bool:
        return False

    def after_step(self) -> None:
        self._order.append("goes live")
        self._session.go_live()


def _hooks_behind_a_replayed_step() -> list[str]:
    session, order = _session(), list[str]()
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    first = optimizer.register_step_post_hook(lambda *_: order.append("first"))
    optimizer.register_step_post_hook(lambda *_: order.append("second"))
    session.stand_in(_AtTarget(session, order))
    optimizer.step()
    first.remove()
    optimizer.step()
    return order


def test_a_replay_goes_live_before_the_hooks_of_the_script_behind_the_step() -> None:
    """What they print or send would be lost: the lost rank may not have come to them."""
    assert run_alone(_hooks_behind_a_replayed_step) == ["goes live", "first", "second", "second"]
