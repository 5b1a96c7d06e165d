"""A NaN in what a rank gives to a collective is found in the journal's copies; a rank that is odd stands aside."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ttprun import channel
from ttprun.rank import verification
from ttprun.rank.journal import Entry, Journal
from ttprun.rank.verification import Verifier, look_for_nan, nan_in

NAN, INFINITE = float("nan"), float("inf")


def journal_of(*steps_inputs: list[torch.Tensor]) -> Journal:
    """A journal in which each collective was given such inputs, and has been looked at."""
    journal = Journal(limit_bytes=1 << 30)
    for inputs in steps_inputs:
        entry: Any = Entry(None, "allreduce", (), [])  # type: ignore[arg-type]
        journal.save(entry, inputs)
        journal.entries.append(entry)
        look_for_nan(entry)
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


def test_with_the_next_step_the_nan_is_forgotten() -> None:
    journal = journal_of([torch.tensor([NAN])])
    assert nan_in(journal)

    journal.clear()

    assert nan_in(journal) == ""


def test_a_rank_with_a_nan_whose_agent_does_not_end_the_job_says_so_and_takes_no_step() -> None:
    agent, rank = channel.pair()
    verifier = Verifier(rank, journal_of([torch.tensor([NAN])]), every=0, nan_limit_s=0.05)

    with pytest.raises(RuntimeError, match="has not ended the job within 0 s"):
        verifier.look(8, lambda: [torch.ones(3)])

    assert [told["op"] for told in agent.read_available()] == ["nan"]
    agent.close()
    rank.close()


def test_a_rank_that_is_told_to_stand_aside_stops_behind_its_next_boundary_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verification, "_KILL_LIMIT_S", 0.3)
    agent, rank = channel.pair()
    verifier = Verifier(rank, Journal(limit_bytes=1), every=1, nan_limit_s=None)

    verifier.step_aside_if_odd()
    not_odd_s = time.monotonic()
    verifier.stand_aside()
    verifier.step_aside_if_odd()
    odd_s = time.monotonic()

    assert odd_s - not_odd_s >= 0.3
    assert agent.read_available() == [{"op": "aside"}]
    agent.close()
    rank.close()


def test_a_recovery_that_could_not_be_proved_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_HASH_LIMIT_S", 0.05)
    agent, rank = channel.pair()
    verifier = Verifier(rank, Journal(limit_bytes=1), every=0, nan_limit_s=None)
    verifier._is_idle.clear()  # as while an earlier look is being hashed

    verifier.prove_from(7)
    verifier.look(8, lambda: [torch.ones(3)])
    (told,) = agent.read_available()
    verifier.look(10, lambda: [torch.ones(3)])  # behind the proof's steps: nobody waits

    assert told["op"] == "note"
    assert "at step 8 the recovery is not proved" in told["text"]
    agent.close()
    rank.close()


def test_weights_that_cannot_be_hashed_are_told_once_and_no_recovery_counts_as_proved_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(tensor: torch.Tensor) -> memoryview:
        raise MemoryError("no room")

    monkeypatch.setattr(verification, "bytes_of", fail)
    monkeypatch.setattr(verification, "_HASH_LIMIT_S", 5.0)
    agent, rank = channel.pair()
    verifier = Verifier(rank, Journal(limit_bytes=1), every=1, nan_limit_s=None)

    verifier.look(1, lambda: [torch.ones(3)])
    verifier.prove_from(1)
    verifier.look(2, lambda: [torch.ones(3)])
    verifier.look(4, lambda: [torch.ones(3)])
    told = agent.read_available()

    assert [message["op"] for message in told] == ["note", "note"]
    assert "MemoryError: no room" in told[0]["text"]
    assert "the ranks' weights are not compared" in told[0]["text"]
    assert "at step 2 the recovery is not proved" in told[1]["text"]
    agent.close()
    rank.close()
