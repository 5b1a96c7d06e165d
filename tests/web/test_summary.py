"""What a run comes to, from its files."""

from dataclasses import replace

import pytest

from tests.web.runs import STARTED_S, incident_event, status_of
from ttprun.observe.events import Point
from ttprun.observe.run_view import summarize


def points(*pairs: tuple[float, int]) -> list[Point]:
    return [Point(STARTED_S + after_s, step) for after_s, step in pairs]


def test_each_second_of_a_run_is_productive_or_has_a_reason() -> None:
    history = points((0, 0), (10, 1), (20, 11), (32, 21), (42, 31))
    events = [incident_event(22.01, "open", 22), incident_event(24, "recovered", 22)]

    summary = summarize(status_of(after_s=45, state="done"), history, events)

    assert summary.wall_s == pytest.approx(45)
    assert summary.productive_s == pytest.approx(30)
    assert summary.lost_s == pytest.approx({"startup": 10, "recovery": 2, "restart": 0, "again": 0, "end": 3})


def test_steps_that_are_run_again_after_a_restart_are_not_productive() -> None:
    history = points((0, 0), (10, 1), (20, 11), (50, 1), (60, 11), (70, 21))
    events = [incident_event(20.01, "open", 20), incident_event(21, "restarted", 20)]

    summary = summarize(status_of(after_s=70, step=21), history, events)

    assert summary.productive_s == pytest.approx(20)
    assert summary.lost_s == pytest.approx({"startup": 10, "recovery": 1, "restart": 29, "again": 10, "end": 0})


def test_a_resume_counts_as_a_restart_and_an_open_incident_until_now() -> None:
    history = points((0, 0), (5, 40), (10, 50))
    resume = {"event": "resume", "id": 0}
    events = [
        incident_event(0.5, "open", 0) | resume,
        incident_event(4, "recovered", 0) | resume,
        incident_event(12, "open", 12),
    ]

    summary = summarize(status_of(after_s=15, step=50, state="recovering"), history, events)

    assert summary.productive_s == pytest.approx(5)
    assert summary.lost_s == pytest.approx({"startup": 1, "recovery": 3, "restart": 4, "again": 0, "end": 0})


def test_the_speed_is_that_of_the_last_minute_without_incidents_and_without_the_start() -> None:
    history = points((0, 0), (50, 1), (100, 101), (110, 111), (152, 151))
    events = [incident_event(120.01, "open", 120), incident_event(122, "recovered", 120)]

    summary = summarize(status_of(after_s=152), history, events)

    assert summary.steps_per_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"state": "starting", "incidents": ()}, "Starting 4 ranks."),
        ({}, "Training on 4 ranks: step 50. A lost rank is replaced without losing a step."),
        ({"protection": "off: no"}, "Training on 4 ranks: step 50. Not protected: no."),
        (
            {"away": (1, 3)},
            "Training on 4 ranks, without 2 of them: step 50. A lost rank is replaced without losing a step.",
        ),
        ({"state": "recovering"}, "Recovering: rank 1 was killed (SIGKILL) in step 40."),
        ({"state": "done"}, "Done after step 50 on 4 ranks, with 1 incident, 0 steps lost."),
        ({"state": "done", "incidents": ()}, "Done after step 50 on 4 ranks, without an incident."),
        ({"state": "stopped", "exit_code": 130, "reason": "ended by SIGINT"}, "Stopped at step 50: ended by SIGINT."),
        ({"state": "failed", "exit_code": 1, "reason": "why"}, "Failed with exit code 1 at step 50: why."),
    ],
)
def test_one_sentence_says_how_the_job_stands(fields: dict[str, object], sentence: str) -> None:
    status = replace(status_of(), **fields)  # type: ignore[arg-type]

    assert summarize(status, [], []).sentence == sentence


def test_a_rank_that_is_at_work_much_more_often_than_the_others_is_a_straggler() -> None:
    busy = (0.5, 0.55, 0.98, None, 0.8, 0.6)
    status = status_of(ranks=6)
    ranks = tuple(replace(rank, busy=share) for rank, share in zip(status.ranks, busy, strict=True))

    summary = summarize(replace(status, ranks=ranks), [], [])

    assert (summary.usual_busy, summary.stragglers) == (0.6, (2,))
