"""What a soak draws: each fault can strike, one rank is spared, and moments that are not asked for do not come."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from scripts.soak_faults import DRAWN, MOMENTS, OF_REPLACEMENT, SUBJECTS, Subject, draw_faults
from ttprun.chaos.faults import ENDING_KINDS, Fault, parse_fault

RANKS, COUNT = 3, 4


def drawn(subject: Subject, seed: int, *moments: str) -> list[Fault]:
    texts = draw_faults(random.Random(seed), subject, COUNT, RANKS, list(ENDING_KINDS), moments)
    return [parse_fault(text) for text in texts]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.script)
def test_each_run_gets_its_number_of_faults_and_one_rank_none(subject: Subject) -> None:
    for seed in range(50):
        faults = drawn(subject, seed, *MOMENTS)

        assert len(faults) == COUNT
        assert len({fault.rank for fault in faults}) < RANKS
        assert drawn(subject, seed, *MOMENTS) == faults


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.script)
def test_killed_workers_and_the_last_steps_are_drawn_only_if_asked_for(subject: Subject) -> None:
    faults = [fault for seed in range(50) for fault in drawn(subject, seed, *DRAWN)]

    assert "worker-kill" not in {fault.kind for fault in faults}
    assert max(fault.step or 0 for fault in faults) < subject.steps - 2
    assert "exit" not in {fault.phase for fault in faults}


def test_a_fault_in_a_recovery_follows_the_one_that_is_repaired() -> None:
    pairs = [
        (first, second)
        for seed in range(50)
        for faults in [drawn(SUBJECTS[0], seed, "step", "recovery")]
        for first, second in pairwise(faults)
        if second.phase in OF_REPLACEMENT
    ]

    assert {second.phase for _, second in pairs} == set(OF_REPLACEMENT)
    assert all(first.rank == second.rank for first, second in pairs)


def test_workers_are_killed_in_scripts_that_have_some_but_not_between_two_epochs() -> None:
    killed = [
        (subject, fault.step or 0)
        for subject in SUBJECTS
        for seed in range(200)
        for fault in drawn(subject, seed, "step", "worker")
        if fault.kind == "worker-kill"
    ]

    assert {subject.script for subject, _ in killed} == {"epochs_dataloader.py"}
    assert all(step % subject.epoch_steps for subject, step in killed)
