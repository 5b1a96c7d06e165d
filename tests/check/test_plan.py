"""Which moments a check kills a rank at."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ttprun.chaos.trial.kills import LEAST_GAP, plan

PHASES = ("forward", "backward", "collective", "before_step", "in_step", "after_step")


def seen(steps: int, *more: tuple[str, int]) -> dict[int, set[tuple[str, int]]]:
    moments = {("setup", 0), *more} | {(phase, step) for phase in PHASES for step in range(steps)}
    return {0: moments, 1: moments}


def test_each_phase_of_a_step_is_tried_once_and_one_of_them_late_again() -> None:
    launches, missed = plan(seen(16), 16, [0, 1])

    assert [[(one.phase, one.step, one.rank) for one in kills] for kills in launches] == [
        [
            ("setup", 0, 1),
            ("forward", 2, 0),
            ("backward", 4, 1),
            ("collective", 6, 0),
            ("before_step", 8, 1),
            ("in_step", 10, 0),
            ("after_step", 12, 1),
            ("backward", 14, 0),
        ]
    ]
    assert missed == ["validation", "checkpoint"]


def test_kills_that_could_overlap_go_to_another_launch() -> None:
    launches, _ = plan(seen(6), 6, [0, 1])

    steps = [[one.step or 0 for one in kills] for kills in launches]
    gaps = [after - before for kills in steps for before, after in pairwise(kills)]
    assert len(launches) == 3
    assert min(gaps) == LEAST_GAP
    assert max(max(kills) for kills in steps) <= 4


def test_validation_and_checkpoints_are_tried_where_the_steps_come_to_them() -> None:
    launches, missed = plan(seen(16, ("validation", 7), ("checkpoint", 7)), 16, [0, 1])

    tried = {(one.phase, one.step) for kills in launches for one in kills}
    assert {("validation", 7), ("checkpoint", 7)} <= tried
    assert missed == []


def test_one_rank_alone_is_killed_itself() -> None:
    launches, missed = plan({0: seen(16)[0] - {("collective", step) for step in range(16)}}, 16, [0])

    assert {one.rank for kills in launches for one in kills} == {0}
    assert "collective" in missed


@pytest.mark.parametrize("ranks", [[0, 3, 1, 2], [0, 7, 1, 2, 3, 4, 5, 6]])
def test_each_rank_that_is_named_is_killed(ranks: list[int]) -> None:
    moments = dict.fromkeys(ranks, seen(16)[0])

    launches, _ = plan(moments, 16, ranks)

    kills = [one for planned in launches for one in planned]
    assert {one.rank for one in kills} == {*ranks}
    assert {one.phase for one in kills} == {"setup", *PHASES}


def test_a_rank_that_alone_validates_is_killed_there() -> None:
    moments = seen(16)[0]

    launches, _ = plan({0: moments, 3: moments, 1: moments | {("validation", 7)}}, 16, [0, 3, 1])

    assert [one.rank for planned in launches for one in planned if one.phase == "validation"] == [1]


def test_a_script_that_takes_no_step_has_no_moment() -> None:
    launches, _ = plan({}, 16, [0])

    assert launches == []
