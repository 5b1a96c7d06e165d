"""Ranks that have issued different collectives are found before all wait for each other."""

from __future__ import annotations

from ttprun.recovery.replicas import Difference, find_difference

STEP = ["broadcast 8", "allreduce 64", "allreduce 32"]


def test_ranks_that_are_only_not_equally_far_agree() -> None:
    issued = {0: {"world": STEP}, 1: {"world": STEP[:1]}, 2: {}, 3: {"world": STEP, "pair": ["barrier"]}}

    assert find_difference(issued) is None


def test_the_rank_that_has_left_a_collective_out_is_named() -> None:
    issued = {0: {"world": STEP[1:]}, 1: {"world": STEP}, 2: {"world": STEP}, 3: {"world": STEP[:1]}}

    found = find_difference(issued)

    assert found == Difference(
        (0,), "rank 0 has issued 'allreduce 64' where rank 1 has 'broadcast 8', as number 1 of the step"
    )


def test_of_two_ranks_nobody_can_say_which_is_wrong() -> None:
    found = find_difference({0: {"world": ["barrier", "allreduce 64"]}, 1: {"world": ["barrier", "allreduce 32"]}})

    assert found is not None
    assert found.ranks == ()
    assert "as number 2 of the step" in found.sentence


def test_groups_are_compared_each_for_itself() -> None:
    found = find_difference({0: {"a": ["barrier"]}, 1: {"a": ["barrier"], "b": ["allreduce 1"]}, 2: {"b": ["barrier"]}})

    assert found is not None
    assert found.ranks == ()
