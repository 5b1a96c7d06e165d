"""The event log: what is written is read again, and a disk that fails stops nothing."""

import logging
from datetime import datetime
from pathlib import Path

import pytest

from ttprun.observe.events import EventLog, read_events


def test_events_are_read_back_in_order_with_their_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")

    log.append("run_started", run_id="r1")
    log.append("rank_exited", rank=1, path=Path("/x"))
    log.close()

    first, second = read_events(tmp_path / "events.jsonl")
    assert datetime.fromisoformat(str(first.pop("at"))).tzinfo is not None
    assert first == {"event": "run_started", "run_id": "r1"}
    assert (second["event"], second["rank"], second["path"]) == ("rank_exited", 1, "/x")
    assert (tmp_path / "events.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("path", ["/dev/full", "/proc/nowhere/events.jsonl"])
def test_a_log_that_cannot_be_written_warns_once_and_stops_nothing(path: str, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(path)

    with caplog.at_level(logging.WARNING):
        log.append("run_started")
        log.append("run_ended")
    log.close()

    assert len(caplog.records) == 1
    assert "the job continues" in caplog.text


def test_a_line_that_was_cut_off_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "a"}\n{"event": "b", "ra\n\n{"event": "c"}\n')

    assert [event["event"] for event in read_events(tmp_path / "events.jsonl")] == ["a", "c"]
