"""Ctrl-C: what a rank shows of an interrupt that has ended its script."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.options import OPTIONS
from tests.rank.fakes import FakeChannel
from tests.rank.processes import run_alone
from ttprun.groups.journal import EndedError
from ttprun.protocol.board import Board, Field
from ttprun.protocol.to_rank import Welcome
from ttprun.rank import held_signals
from ttprun.rank.bootstrap import install
from ttprun.rank.bootstrap.presence import Presence


@pytest.fixture
def presence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Presence]:
    """Rank 1 of two, whose standard error is the terminal's."""
    (tmp_path / "logs").mkdir()
    options = replace(OPTIONS, prints_traceback=False)
    welcome = Welcome(1, 1, 2, 2, 0, str(tmp_path), is_replacement=False, options=options)
    line = FakeChannel()
    found = Presence(line, welcome, [Board.create(2)[0]])
    monkeypatch.setattr(install, "_presence", found)
    yield found
    line.close()


def shown(error: BaseException) -> list[Any]:
    """What our hook passes on to Python's own, which prints it."""
    printed: list[Any] = []
    install.report_before(lambda *reported: printed.append(reported[1]))(type(error), error, error.__traceback__)
    return printed


def test_an_interrupt_that_the_launcher_has_passed_on_is_kept_in_a_file_and_not_printed_by_each_rank(
    presence: Presence, tmp_path: Path
) -> None:
    Board(presence.fds[0], 2).set(0, Field.ENDED_BY, 2)

    printed = shown(KeyboardInterrupt("here"))

    assert printed == []
    assert "KeyboardInterrupt: here" in (tmp_path / "logs" / "interrupted-rank1.log").read_text()


def test_what_fails_because_the_job_is_ended_is_kept_in_that_file_too(presence: Presence, tmp_path: Path) -> None:
    """As torch hands it on from a future: in words."""
    Board(presence.fds[0], 2).set(0, Field.ENDED_BY, 15)

    printed = shown(RuntimeError(f"Got the following error when running the callback: {EndedError.__name__}: ..."))

    assert printed == []
    assert EndedError.__name__ in (tmp_path / "logs" / "interrupted-rank1.log").read_text()


def test_an_error_of_the_scripts_own_handler_is_printed_and_not_reported_to_an_agent_that_ends_the_job(
    presence: Presence,
) -> None:
    Board(presence.fds[0], 2).set(0, Field.ENDED_BY, 15)
    error = TypeError("handler() takes 0 positional arguments but 2 were given")

    assert shown(error) == [error]
    assert presence.channel.sent == []  # type: ignore[attr-defined]


def test_an_interrupt_from_elsewhere_is_printed(presence: Presence) -> None:
    error = KeyboardInterrupt()

    assert shown(error) == [error]


def test_a_rank_with_a_log_of_its_own_has_the_traceback_there(presence: Presence, tmp_path: Path) -> None:
    Board(presence.fds[0], 2).set(0, Field.ENDED_BY, 2)
    presence.welcome = replace(presence.welcome, options=OPTIONS)
    error = KeyboardInterrupt()

    assert shown(error) == [error]
    assert not list((tmp_path / "logs").iterdir())


def fail_while_the_job_is_ended(directory: str, is_interrupted: bool) -> list[str]:
    """An exception of the script between the launcher's signal and ours; what is shown of it once the rank is ended."""
    board_fd, board = Board.create(1)
    line = FakeChannel()
    welcome = Welcome(0, 0, 1, 1, 0, directory, is_replacement=False, options=OPTIONS)
    install._presence = Presence(line, welcome, [board_fd])
    held_signals.hold(board)
    board.set(0, Field.END_ASKED, 1)
    is_parked = threading.Event()

    def end() -> None:
        is_parked.wait()
        board.set(0, Field.ENDED_BY, signal.SIGINT)
        if is_interrupted:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        held_signals.let_end()  # also behind a signal of which the script's own handler makes nothing

    threading.Thread(target=end).start()
    wait_until_saved = held_signals.wait_until_saved

    def wait() -> None:
        is_parked.set()
        wait_until_saved()

    held_signals.wait_until_saved = wait  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    printed = shown(RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated."))
    return [*map(repr, printed), *(type(message).__name__ for message in line.sent)]


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_a_script_that_fails_while_the_job_is_ended_waits_for_its_state_to_be_saved(
    tmp_path: Path, is_interrupted: bool
) -> None:
    shown_and_reported = run_alone(fail_while_the_job_is_ended, str(tmp_path), is_interrupted)

    assert shown_and_reported == ["RuntimeError('DataLoader worker (pid 7) is killed by signal: Terminated.')"]
