"""Modules of the user's that the lost rank had loaded on its way, and its replacement has not."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

from tests.rank.fakes import FakeChannel, make_session
from tests.rank.processes import run_alone
from ttprun.capture.position import user_code
from ttprun.capture.records.packing import Record
from ttprun.capture.values import pack
from ttprun.groups.results import Answers
from ttprun.introspect import ownership
from ttprun.protocol import rank_events
from ttprun.protocol.channel import Message
from ttprun.rank.proof import MismatchError
from ttprun.rank.replay.replay_run import ReplayRun
from ttprun.rank.step.record import describe

# The first epoch ended with a validation; the replacement comes straight to a later one.
SCRIPT = """
def validate():
    import metrics
    metrics.calls += 1
    return metrics.calls

if is_lost:
    validate()
train()
calls = validate()
"""


class Refused(MismatchError):
    """Ends a replay where the agent would end the process."""


class RefusingChannel(FakeChannel):
    def send(self, message: Message, fds: Any = ()) -> None:
        if isinstance(message, rank_events.MismatchFound):
            raise Refused(message.reason)


def run_script(directory: str, record: tuple[bytes, list[bytes]] | None) -> tuple[Any, int]:
    """(record at its step, the number of calls that the module has counted), of the lost rank or of a replacement."""
    ownership.add_user_directory(directory)
    vars(builtins).update(user_code.BUILTINS)
    user_code.install()
    sys.path.insert(0, directory)
    session = make_session(directory, channel=RefusingChannel())
    made: list[Any] = []

    def train() -> None:
        frame = sys._getframe(1)
        if record is None:
            fields, blobs, _ = describe(session, 1, frame)
            made.append((pack(fields), [bytes(blob.numpy()) for blob in blobs]))
        else:
            known = Record.of(record[0], b"".join(record[1]))
            ReplayRun(session, known, None, Answers({}, [])).before_step(frame)

    scope: dict[str, Any] = {"__name__": "script", "train": train, "is_lost": record is None}
    exec(user_code.compile_followed(SCRIPT.encode(), f"{directory}/script.py"), scope)
    return (made[0] if made else None), scope["calls"]


def reason_of(directory: str, record: Any) -> str:
    try:
        run_script(directory, record)
    except Refused as refused:
        return str(refused)
    return ""


def test_a_module_that_the_replay_has_not_come_by_is_imported_and_its_variables_are_those_of_the_lost_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "metrics.py").write_text("calls = 0\n")

    record, calls_of_lost = run_alone(run_script, str(tmp_path), None)
    _, calls = run_alone(run_script, str(tmp_path), record)

    assert calls_of_lost == calls == 2


def test_a_module_that_can_no_longer_be_imported_ends_the_replay_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text("calls = 0\n")
    record, _ = run_alone(run_script, str(tmp_path), None)

    (tmp_path / "metrics.py").unlink()
    reason = run_alone(reason_of, str(tmp_path), record)

    assert reason == (
        "the lost rank had imported the module metrics, which fails in the replay: "
        "ModuleNotFoundError(\"No module named 'metrics'\")"
    )
