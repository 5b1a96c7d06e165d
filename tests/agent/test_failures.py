"""The root cause is distinguished from what followed from it."""

from __future__ import annotations

import json
from pathlib import Path

from ttprun.agent.base.ground import Failure, FirstFailure

CAUSE = Failure(1, 101, 1, "ValueError: loss is negative", "Traceback: ...")
COLLATERAL = Failure(0, 100, 1, "RuntimeError: allreduce: Connection closed by peer [127.0.0.1]:4711")


def test_the_first_failure_is_the_cause_of_the_others() -> None:
    first = FirstFailure()

    first.note(CAUSE, is_new_incident=True)
    first.note(Failure(2, 102, -9), is_new_incident=False)

    assert first.found is CAUSE


def test_a_broken_connection_that_is_seen_first_is_collateral() -> None:
    first = FirstFailure()

    first.note(COLLATERAL, is_new_incident=True)
    first.note(CAUSE, is_new_incident=False)

    assert first.found is CAUSE


def test_a_failure_that_was_repaired_is_no_cause_of_a_later_one() -> None:
    first = FirstFailure()

    first.note(Failure(0, 100, -9), is_new_incident=True)
    first.note(CAUSE, is_new_incident=True)

    assert first.found is CAUSE


def test_torch_reports_the_traceback_of_the_cause(tmp_path: Path) -> None:
    reported = CAUSE.as_torch_reports_it(0, str(tmp_path / "error.json"))

    assert reported.message["extraInfo"]["py_callstack"] == "Traceback: ..."  # type: ignore[index]
    assert (reported.exitcode, reported.pid) == (1, 101)


def test_an_error_file_that_record_has_written_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "by record", "extraInfo": {"timestamp": "5"}}}))

    reported = CAUSE.as_torch_reports_it(0, str(path))

    assert reported.message["message"] == "by record"  # type: ignore[index]


def test_a_failure_of_which_nothing_is_known_is_reported_all_the_same(tmp_path: Path) -> None:
    reported = Failure(0, 0, 1, "the ranks differ").as_torch_reports_it(0, str(tmp_path / "error.json"))

    assert reported.error_file == "<N/A>"
