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
def test_a_soak_draws_faults_that_can_strike_and_only_at_moments_that_are_asked_for(subject: Subject) -> None:
    for seed in range(50):
        all_moments, usual = drawn(subject, seed, *MOMENTS), drawn(subject, seed, *DRAWN)

        assert drawn(subject, seed, *MOMENTS) == all_moments
        assert (len(all_moments), len({fault.rank for fault in all_moments}) < RANKS) == (COUNT, True)
        killed_workers = [fault.step or 0 for fault in all_moments if fault.kind == "worker-kill"]
        assert all(subject.epoch_steps and step % subject.epoch_steps for step in killed_workers)
        for first, second in pairwise(drawn(subject, seed, "step", "recovery")):
            assert second.phase not in OF_REPLACEMENT or first.rank == second.rank
        assert not any(fault.kind == "worker-kill" or fault.phase == "exit" for fault in usual)
        assert max(fault.step or 0 for fault in usual) < subject.steps - 2
