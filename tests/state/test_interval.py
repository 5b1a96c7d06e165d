"""How often a snapshot is taken."""

from __future__ import annotations

import math

import pytest

from ttprun.state.cost_limits import LONGEST_S, SHORTEST_S, SnapshotInterval, best_interval_s, parse_interval

DAY_S = 24 * 3600.0


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("500steps", SnapshotInterval(steps=500)),
        ("1 step", SnapshotInterval(steps=1)),
        ("20min", SnapshotInterval(seconds=1200.0)),
        ("90s", SnapshotInterval(seconds=90.0)),
        ("1.5 h", SnapshotInterval(seconds=5400.0)),
        (" 2m ", SnapshotInterval(seconds=120.0)),
        ("auto", SnapshotInterval()),
        ("never", SnapshotInterval(is_never=True)),
    ],
)
def test_an_interval_is_steps_or_time_or_one_word(text: str, interval: SnapshotInterval) -> None:
    assert parse_interval(text) == interval


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not an interval; write 500steps, 20min, 90s, auto or never"),
        ("20", "'20' is not an interval; write"),
        ("-5min", "'-5min' is not an interval; write"),
        ("0s", "'0s' is not an interval; write"),
        ("0steps", "'0steps' is not an interval; write"),
        ("5 weeks", "'5 weeks' is not an interval; write"),
        ("1.5steps", "'1.5steps' is not a whole number of steps; write 500steps"),
    ],
)
def test_what_is_no_interval_is_refused_with_what_to_write(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="; write") as caught:
        parse_interval(text)

    assert str(caught.value).startswith(complaint)


def test_the_best_interval_is_that_of_young_and_daly() -> None:
    cost_s, run_s, failures = 20.0, 3 * DAY_S, 9

    found_s = best_interval_s(cost_s, run_s, failures)

    assert found_s == pytest.approx(math.sqrt(2 * cost_s * 4 * DAY_S / 10) - cost_s)
    assert SHORTEST_S < found_s < LONGEST_S


@pytest.mark.parametrize(
    ("cost_s", "run_s", "failures", "found_s"),
    [
        (0.0, 0.0, 0, SHORTEST_S),  # nothing is known yet
        (0.3, DAY_S, 0, SHORTEST_S),  # cheap
        (600.0, DAY_S, 0, LONGEST_S),  # dear
        (60.0, 3600.0, 500, SHORTEST_S),  # it fails all the time
    ],
)
def test_the_interval_stays_within_its_bounds(cost_s: float, run_s: float, failures: int, found_s: float) -> None:
    assert best_interval_s(cost_s, run_s, failures) == found_s


def test_a_job_that_fails_more_often_takes_more_snapshots() -> None:
    calm_s, restless_s = (best_interval_s(20.0, 3 * DAY_S, failures) for failures in (3, 9))

    assert restless_s < calm_s
