"""A NaN in what a rank gives to a collective is found in the journal's copies; a rank that is odd stops."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.rank.fakes import FakeChannel, make_session
from ttprun.groups.journal import Journal
from ttprun.groups.operations import Entry, Input
from ttprun.protocol import channel, from_rank, to_rank
from ttprun.rank import verification
from ttprun.rank.replay.order_thread import Recovery
from ttprun.rank.verification import Verifier, find_nan, nan_in
from ttprun.tensors import holdings

OPTIMIZER = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)
NAN, INFINITE = float("nan"), float("inf")


def journal_of(*steps_inputs: list[torch.Tensor]) -> Journal:
    """A journal in which each collective was given such inputs, and has been looked at."""
    journal = Journal(limit_bytes=1 << 30)
    for inputs in steps_inputs:
        entry: Any = Entry(None, "allreduce", (), [])  # type: ignore[arg-type]
        journal.save(entry, inputs)
        journal.entries.append(entry)
        entry.nan = entry.input.count_nans()
    return journal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at", [0, 123_456, 299_999])
def test_one_nan_anywhere_in_a_gradient_is_found_and_counted(dtype: torch.dtype, at: int) -> None:
    gradient = torch.ones(300_000, dtype=dtype)
    gradient[at] = NAN

    found = nan_in(journal_of([torch.ones(3)], [torch.ones(2), gradient]))

    assert found == "allreduce number 1 of the step, 1 of 300000 elements"


def test_infinities_of_both_signs_and_whole_numbers_are_no_nan() -> None:
    infinite = torch.tensor([INFINITE, 1.0, -INFINITE])

    assert nan_in(journal_of([infinite, torch.arange(5)], [])) == ""


def test_what_a_collective_has_made_of_the_gradient_meanwhile_does_not_matter() -> None:
    gradient = torch.ones(4)
    journal = journal_of([gradient])

    gradient.fill_(NAN)

    assert nan_in(journal) == ""


def reduced(*results: torch.Tensor, copies: list[torch.Tensor] | None = None) -> Journal:
    """A journal in which each collective has given such results, of inputs of which there may be copies."""
    journal = Journal(limit_bytes=1 << 30)
    for result in results:
        entry: Any = Entry(None, "allreduce", (), [result])  # type: ignore[arg-type]
        entry.is_done = True
        entry.input = Input(copies or [])
        journal.entries.append(entry)
    return journal


def with_nan(size: int, at: int) -> torch.Tensor:
    found = torch.ones(size)
    found[at] = NAN
    return found


@pytest.mark.parametrize("at", [0, 12_345, 299_999])
def test_one_nan_in_a_result_is_found_within_sixteen_steps_and_one_all_over_it_at_once(at: int) -> None:
    journal = reduced(torch.ones(3), with_nan(300_000, at))

    assert ("allreduce number 1 of the step", False) in [find_nan(journal, step) for step in range(20, 36)]
    assert find_nan(reduced(torch.full((300_000,), NAN)), 3) == ("allreduce number 0 of the step", False)


def test_the_rank_whose_copy_of_its_own_input_holds_the_nan_says_so_and_no_other_does() -> None:
    result = with_nan(9, 4)

    assert find_nan(reduced(result, copies=[with_nan(9, 4)]), 3) == (
        "allreduce number 0 of the step, 1 of 9 elements",
        True,
    )
    assert find_nan(reduced(result, copies=[torch.ones(9)]), 3) == ("", False)


def test_infinities_and_whole_numbers_in_a_result_are_no_nan() -> None:
    assert find_nan(reduced(torch.tensor([INFINITE, -INFINITE]), torch.arange(5)), 16) == ("", False)


def test_with_the_next_step_the_nan_is_forgotten() -> None:
    journal = journal_of([torch.tensor([NAN])])
    assert nan_in(journal)

    journal.clear()

    assert nan_in(journal) == ""


class Line:
    """What a rank has sent, of each message the boundary and whether it was a full look."""

    def __init__(self) -> None:
        self.agent, self.rank = channel.pair()

    def looks(self) -> list[tuple[int, bool]]:
        return [(reported.boundary, reported.is_full) for reported in self.agent.read_available()]


@pytest.fixture
def line() -> Iterator[Line]:
    """The line to the agent."""
    found = Line()
    yield found
    found.agent.close()
    found.rank.close()


def test_a_rank_with_a_nan_whose_agent_does_not_end_the_job_says_so_and_takes_no_step(line: Line) -> None:
    verifier = Verifier(line.rank, journal_of([torch.tensor([NAN])]), every=0, nan_limit_s=0.05)

    with pytest.raises(RuntimeError, match="has not ended the job within 0 s"):
        verifier.look(8, OPTIMIZER, None, are_new=False)

    assert [type(reported) for reported in line.agent.read_available()] == [from_rank.NanFound]


def test_a_rank_that_is_ordered_to_stop_does_so_behind_its_next_boundary_and_only_there(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "_KILL_LIMIT_S", 0.3)
    verifier = Verifier(line.rank, Journal(limit_bytes=1), every=1, nan_limit_s=None)

    verifier.stop_if_divergent()
    not_odd_s = time.monotonic()
    verifier.mark_divergent()
    verifier.stop_if_divergent()
    odd_s = time.monotonic()

    assert odd_s - not_odd_s >= 0.3
    assert line.agent.read_available() == [from_rank.StoppedDivergent()]


def test_what_is_new_and_what_follows_a_recovery_is_looked_at_in_full_and_the_rest_now_and_then(line: Line) -> None:
    verifier = Verifier(line.rank, Journal(limit_bytes=1), every=5, nan_limit_s=None)

    for boundary in range(1, 12):
        verifier.look(boundary, OPTIMIZER, None, are_new=boundary <= 2)
        if boundary == 7:
            verifier.prove_from(7)
        assert verifier._is_idle.wait(60.0)

    assert line.looks() == [(1, True), (2, True), (5, False), (8, True), (9, True), (10, False)]


def test_after_a_full_look_the_next_step_waits_until_the_agent_has_compared_all_ranks(line: Line) -> None:
    """By then a rank knows what it must mirror: its loss in the next step costs nothing."""
    verifier = Verifier(line.rank, Journal(limit_bytes=1), every=5, nan_limit_s=None)
    verifier.look(1, OPTIMIZER, None, are_new=True)
    has_waited = threading.Event()
    step = threading.Thread(target=lambda: (verifier.await_answer(), has_waited.set()))

    step.start()
    verifier.note_compared(0)
    is_early = has_waited.wait(0.1)
    verifier.note_compared(1)
    step.join()

    assert not is_early
    assert has_waited.is_set()


def test_a_recovery_does_not_wait_for_an_answer_that_may_never_come() -> None:
    """It waits for the end of the step, in which a rank still waits for what was compared with the lost one."""
    session = make_session()
    session[Verifier].look(1, OPTIMIZER, None, are_new=True)
    before = session[Verifier]._is_answered.is_set()

    Recovery(session).take(to_rank.Freeze((0,), 1, (1,), committed=1))
    session.channel.close()

    assert (before, session[Verifier]._is_answered.is_set()) == (False, True)


def test_a_full_look_that_was_not_answered_in_time_is_the_last_one_that_is_waited_for(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []
    verifier = Verifier(line.rank, Journal(limit_bytes=1), every=5, nan_limit_s=None)
    monkeypatch.setattr(verifier._is_answered, "wait", waits_s.append)  # it returns nothing: no answer

    for boundary in (1, 2, 3):
        verifier.look(boundary, OPTIMIZER, None, are_new=boundary <= 2)
        verifier.await_answer()

    assert waits_s == [verification._ANSWER_LIMIT_S]


def test_where_nobody_is_a_replica_of_anybody_nothing_is_looked_at() -> None:
    line = FakeChannel()
    verifier = Verifier(line, Journal(limit_bytes=1), every=1, nan_limit_s=None, is_compared=False)

    verifier.look(1, OPTIMIZER, None, are_new=True)

    assert line.sent == []
    line.close()


def test_weights_that_cannot_be_hashed_are_reported_once_and_no_recovery_counts_as_proved_from_then_on(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(optimizer: torch.optim.Optimizer) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(holdings, "in_full", fail)
    verifier = Verifier(line.rank, Journal(limit_bytes=1), every=1, nan_limit_s=None)

    verifier.look(1, OPTIMIZER, None, are_new=True)
    verifier.prove_from(1)
    verifier.look(2, OPTIMIZER, None, are_new=True)
    verifier.look(4, OPTIMIZER, None, are_new=False)
    reported = line.agent.read_available()

    assert [type(message) for message in reported] == [from_rank.Note] * 2
    assert "MemoryError: no room" in reported[0].text
    assert "the ranks' weights are not compared" in reported[0].text
    assert "at step 2 the recovery is not proved" in reported[1].text


def test_a_nan_that_the_weights_held_before_the_step_is_blamed_on_no_rank(line: Line) -> None:
    nan = torch.full((4,), NAN)
    verifier = Verifier(line.rank, reduced(nan, copies=[nan]), every=0, nan_limit_s=None)

    verifier.look(8, torch.optim.SGD([nan.clone().requires_grad_()]), None, are_new=False)

    (reported,) = line.agent.read_available()
    assert not reported.is_own
    assert reported.where == "allreduce number 0 of the step, 4 of 4 elements; the weights held it before this step"
