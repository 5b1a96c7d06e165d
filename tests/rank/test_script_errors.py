"""An exception that ends the script: what is reported to the agent of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.options import OPTIONS
from tests.rank.fakes import FakeChannel, become, make_session
from tests.rank.scripts import run_plain, run_under_shim
from ttprun.device import interface
from ttprun.device.interface import MemoryFigures
from ttprun.introspect.current_rank import Mode, Rank
from ttprun.protocol import from_rank
from ttprun.protocol.board import Board
from ttprun.protocol.to_rank import Welcome
from ttprun.rank.bootstrap import install
from ttprun.rank.bootstrap.presence import Presence


class ReplayUnderWay(Mode):
    """A replay of which the script's first step was elsewhere, if `difference` says how."""

    is_live = False

    def __init__(self, difference: str) -> None:
        self.difference = difference


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    """A rank that has torch, and has not stepped yet."""
    line = FakeChannel()
    welcome = Welcome(0, 0, 2, 2, 1, str(tmp_path), is_replacement=False, options=OPTIONS)
    presence = Presence(line, welcome, [Board.create(2)[0]])
    monkeypatch.setattr(install, "_presence", presence)
    found = make_session(channel=line)
    become(found)
    yield found
    become(None)
    line.close()


def reported_of(error: Exception, session: Rank) -> str:
    """The reason that the agent gets."""
    install.report_before(lambda *reported: None)(type(error), error, error.__traceback__)
    channel = session.channel
    assert isinstance(channel, FakeChannel)
    (message,) = [one for one in channel.sent if isinstance(one, from_rank.ScriptError)]
    return message.error


def test_an_error_of_the_script_is_reported_as_it_is(session: Rank) -> None:
    assert reported_of(KeyError("epoch"), session) == "KeyError: 'epoch'"


def test_an_error_of_a_replay_that_was_never_where_it_should_have_been_is_reported_with_that(session: Rank) -> None:
    """Then the error says little of the script: it comes of the wrong place, or of what was skipped."""
    session.mode = ReplayUnderWay("its loops stand at 3, the lost rank's at 4")

    reported = reported_of(NameError("name 'loss' is not defined"), session)

    assert reported == (
        "NameError: name 'loss' is not defined; the replay did not reach its boundary: "
        "its loops stand at 3, the lost rank's at 4"
    )


def test_an_error_of_a_replay_that_has_stepped_nowhere_else_is_reported_as_it_is(session: Rank) -> None:
    session.mode = ReplayUnderWay("")

    assert reported_of(KeyError("epoch"), session) == "KeyError: 'epoch'"


SHOWS_WHAT_IT_CATCHES = """
import sys
try:
    {}["lr"]
except KeyError:
    sys.excepthook(*sys.exc_info())
sys.excepthook(1, "no exception", 1)
print("goes on")
"""


def test_an_error_that_the_script_catches_and_shows_by_the_hook_itself_is_not_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOWS_WHAT_IT_CATCHES)

    ours = run_under_shim(["train.py"], tmp_path)

    assert (ours.code, ours.printed) == (0, run_plain(["train.py"], tmp_path).printed)
    assert [one for one in ours.messages if isinstance(one, from_rank.ScriptError)] == []


class ReturningMemory:
    """A device to which a killed process's memory returns late and in pieces, by a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def memory(self) -> MemoryFigures:
        pieces = min(8, max(0, int(self.now_s - 7)))
        return MemoryFigures(free_bytes=10 + pieces, total_bytes=80)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def test_memory_that_returns_late_and_piece_by_piece_is_waited_for_by_one_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, sent = ReturningMemory(), list[object]()
    monkeypatch.setattr(install, "time", device)
    monkeypatch.setattr(interface, "current", lambda: device)

    install._wait_for_room(SimpleNamespace(channel=SimpleNamespace(send=sent.append)))  # type: ignore[arg-type]

    assert device.memory().free_bytes == 18
    assert device.now_s < 20
    assert len(sent) == 1
