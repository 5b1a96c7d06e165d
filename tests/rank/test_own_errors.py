"""An error in ttprun's own hooks is never the script's: the job goes on unprotected, or the replay is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.capture.records import record_of
from tests.rank.fakes import become, make_session
from tests.rank.processes import run_alone
from ttprun.capture.data import workers
from ttprun.capture.records.packing import Record
from ttprun.groups.results import Answers
from ttprun.introspect import ownership
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import rank_events
from ttprun.rank import proof
from ttprun.rank.bootstrap import patch_table
from ttprun.rank.replay import kept_steps
from ttprun.rank.replay.replay_run import ReplayRun
from ttprun.rank.step import step_hooks
from ttprun.tensors.replicated import PostStepWeights


def _batches_of_a_loader_that_cannot_be_recorded() -> tuple[list[int], str]:
    def capture() -> None:
        raise ValueError("no states")

    ownership.add_user_directory(str(Path(__file__).parent))
    patch_table.apply_all(with_replay=False)
    session = make_session()
    become(session)
    workers.random_state.capture = capture  # type: ignore[assignment]
    return [int(batch) for batch in DataLoader(torch.arange(4), 1)], session.unprotected.text  # type: ignore[arg-type]


def test_a_loader_that_cannot_be_recorded_is_iterated_without_protection() -> None:
    batches, unprotected = run_alone(_batches_of_a_loader_that_cannot_be_recorded)

    assert batches == [0, 1, 2, 3]
    assert "test_own_errors.py" in unprotected
    assert "cannot be recorded: ValueError('no states')" in unprotected


def _before_step(note: Callable[[int], None]) -> tuple[Rank, torch.optim.Optimizer]:
    """`note` is called with each step's number, to keep the weights."""
    patch_table.apply_all(with_replay=False)
    session = make_session()
    become(session)
    session[PostStepWeights].note = note  # type: ignore[method-assign]
    session.made.living["a group"] = None  # type: ignore[assignment]  # without one nothing is recorded
    return session, torch.optim.SGD([torch.ones(2, requires_grad=True)])


def _step_without_memory() -> tuple[int, str]:
    def note(number: int) -> None:
        raise MemoryError(f"for step {number}")

    session, optimizer = _before_step(note)
    optimizer.param_groups[0]["params"][0].sum().backward()
    step_hooks._running, step_hooks._boundary = optimizer, 1
    step_hooks.after_step(optimizer, (), {})
    return session.applied, session.unprotected.text


def test_weights_that_cannot_be_noted_cost_the_protection_and_not_the_step() -> None:
    assert run_alone(_step_without_memory) == (
        1,
        "the weights after step 1 cannot be noted: MemoryError('for step 1')",
    )


def _step_on_failed_memory() -> tuple[str, str]:
    def note(number: int) -> None:
        raise RuntimeError("UCE ERROR, error code is 507053")

    session, optimizer = _before_step(note)
    step_hooks._running = optimizer
    try:
        step_hooks.after_step(optimizer, (), {})
    except RuntimeError as error:
        return str(error), session.unprotected.text
    return "", session.unprotected.text


def test_an_error_of_the_device_that_our_own_operation_meets_is_the_scripts_and_is_repaired() -> None:
    assert run_alone(_step_on_failed_memory) == ("UCE ERROR, error code is 507053", "")


def test_a_replay_that_fails_in_its_own_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_KILL_LIMIT_S", 0.0)
    session = make_session(str(tmp_path))
    target: Any = Record(record_of(2), [])
    replay = ReplayRun(session, target, None, Answers((), ()))

    with pytest.raises(proof.MismatchError):
        replay.before_step(sys._getframe())
    replay.output.end()

    (mismatch,) = session.channel.sent  # type: ignore[attr-defined]
    assert isinstance(mismatch, rank_events.MismatchFound)
    assert mismatch.reason.text == "the variables of the lost rank cannot be restored: KeyError(1)"
    session.channel.close()


def test_a_result_that_cannot_be_copied_ends_the_keeping_of_steps_and_nothing_else() -> None:
    options = SimpleNamespace(keep_steps=1, keep_steps_mib=1)
    session: Any = SimpleNamespace(options=options, channel=SimpleNamespace(send=lambda _: None))
    keeper, row = kept_steps.Keeper(session, ()), ["", "", [], None]
    keeper._step = kept_steps._Step(1, is_verified=False)
    keeper.complete(SimpleNamespace(kept_row=row, outputs=[torch.empty(1, device="meta")]))
    assert (row[3], keeper._count) == (None, 0)
