"""Run directories as an agent leaves them, without an agent."""

import json
import os
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import IncidentStatus, RankStatus, RunStatus, write_status

STARTED_S = 1_700_000_000.0
REPLACED = IncidentStatus(
    1,
    "signal 9",
    (1,),
    "replace",
    "recovered",
    "rank 1 was killed (SIGKILL) in step 40",
    detect_s=0.0,
    freeze_s=0.1,
    spawn_s=0.3,
    replay_s=0.9,
    transfer_s=0.2,
    rebuild_s=0.3,
    reissue_s=0.5,
    total_s=2.0,
    steps_lost=0,
    boundary=40,
    equal=("rank 1: 1 loss in step 40",),
    not_proved=("cache (sqlite3.Connection): it is in a file",),
)


def at(after_s: float) -> str:
    """A moment after the launch, as in the files."""
    return datetime.fromtimestamp(STARTED_S + after_s, UTC).isoformat(timespec="milliseconds")


def status_of(ranks: int = 4, after_s: float = 60.0, step: int = 50, **fields: Any) -> RunStatus:
    """A healthy run, some time after its launch."""
    shown = tuple(
        RankStatus(rank, rank % 8, 1000 + rank, "running", step, "computing", 0.1, "on") for rank in range(ranks)
    )
    status = RunStatus("r1", "healthy", 0, ranks, os.getpid(), at(0), at(after_s), ranks=shown, incidents=(REPLACED,))
    return replace(status, **fields)


def incident_event(after_s: float, outcome: str, opened_after_s: float, number: int = 1) -> dict[str, Any]:
    """What the log has of an incident."""
    times = {"at_s": 1000.0 + after_s, "opened_at_s": 1000.0 + opened_after_s}
    return {
        "at": at(after_s),
        "event": "incident",
        "kind": "signal 9",
        "id": number,
        "outcome": outcome,
        "rank": None,
        **times,
    }


def write_run(path: Path, status: RunStatus) -> RunDirectory:
    """A run directory with a status, events of one replacement, and a history."""
    run = RunDirectory.create("r1", path)
    write_status(run.status, status)
    events = [
        {"at": at(-100), "event": "run_ended", "exit_code": 1, "reason": "an earlier launch"},
        {"at": at(1), "event": "rank_started", "rank": 1, "pid": 7, "is_replacement": False},
        {"at": at(40), "event": "rank_exited", "at_s": 1040.0, "rank": 1, "pid": 7, "signal": 9, "code": None},
        incident_event(40.01, "open", 40),
        {"at": at(40.3), "event": "rank_started", "rank": 1, "pid": 8, "is_replacement": True},
        {"at": at(41), "event": "compared", "incident": 1, "rank": 1, "equal": ["1 loss"], "not_proved": []},
        incident_event(42, "recovered", 40),
        {"at": at(43), "event": "note", "rank": 0, "text": "</script><b>bold</b>"},
    ]
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"at": "cut o')
    points = [(-50, 700), (0, 0), (10, 1), *((10 + second, 1 + second) for second in range(1, 30)), (43, 40), (50, 50)]
    run.history.write_text("".join(f"{STARTED_S + after_s:.3f},{step}\n" for after_s, step in points) + "17000000")
    return run


def server_of(run: RunDirectory) -> int:
    """Pid of the process that serves the page of a run."""
    return next(int(process.name) for process in Path("/proc").glob("[0-9]*") if _serves(process, run))


def end_server_of(run: RunDirectory) -> None:
    """SIGKILL to it."""
    os.kill(server_of(run), signal.SIGKILL)


def _serves(process: Path, run: RunDirectory) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"ttprun.web.server" in words and str(run.path).encode() in words
