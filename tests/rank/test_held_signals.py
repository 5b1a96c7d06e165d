"""A rank that gets a signal by which schedulers end jobs: alone, or together with the launcher."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.rank.processes import run_alone
from tests.waits import becomes_ready
from ttprun.protocol.board import LEADER, Board, Field
from ttprun.protocol.patience import MOST_TIMES
from ttprun.rank import held_signals

LIVES = -1  # in place of the signal that has ended a process
LIMIT_S = 60.0
NUMBERS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])


class Rank:
    """A process that holds its signals, and does something else meanwhile.

    set_up   called before `does`, behind `hold`
    """

    def __init__(
        self, does: Callable[[], object] = lambda: time.sleep(LIMIT_S), set_up: Callable[[], object] = lambda: None
    ) -> None:
        self.board = Board.create(1)[1]
        self.order_r, self.order_w = os.pipe()
        self._ready_r, ready_w = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            held_signals.hold(self.board)
            set_up()
            threading.Thread(target=self._hear, daemon=True).start()
            os.write(ready_w, b"x")
            does()
            os._exit(0)
        os.read(self._ready_r, 1)

    def _hear(self) -> None:
        os.read(self.order_r, 1)
        held_signals.let_end()

    def let_end(self) -> None:
        """As the agent does it, behind its signal."""
        os.write(self.order_w, b"x")

    def ended_by(self, within_s: float) -> int:
        """The signal that ends it; LIVES if none does within that time."""
        ends_s = time.monotonic() + within_s
        while time.monotonic() < ends_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status) * -1
            time.sleep(0.01)
        return LIVES


def hit(is_end_asked: bool, number: int) -> list[int]:
    """What becomes of a rank behind the moment, and once it is ordered to end."""
    rank = Rank()
    rank.board.set(LEADER, Field.END_ASKED, int(is_end_asked))
    os.kill(rank.pid, number)
    wait_s = 3 * held_signals.MOMENT_S * (1 if is_end_asked else MOST_TIMES)
    alone = rank.ended_by(within_s=wait_s)
    if alone != LIVES:
        return [alone]
    rank.let_end()
    return [alone, rank.ended_by(LIMIT_S)]


@NUMBERS
def test_a_rank_that_is_signalled_alone_dies_of_it(number: int) -> None:
    assert run_alone(hit, False, number) == [number]


@NUMBERS
def test_a_rank_that_is_signalled_together_with_the_launcher_lives_till_the_agent_orders_it_to_end(number: int) -> None:
    assert run_alone(hit, True, number) == [LIVES, number]


def ordered_first(number: int) -> list[int]:
    held_signals.MOMENT_S = 10 * LIMIT_S  # what is held is not let go in this test's time
    rank = Rank()
    rank.let_end()
    lives = rank.ended_by(within_s=0.2)
    os.kill(rank.pid, number)
    return [lives, rank.ended_by(LIMIT_S)]


def test_a_rank_that_has_been_ordered_to_end_dies_of_the_signal_at_once() -> None:
    assert run_alone(ordered_first, signal.SIGTERM) == [LIVES, signal.SIGTERM]


def stand_behind(set_up: Callable[[], object]) -> int:
    """The signal that ends a rank which has got one, and is quiesced after it; LIVES if it continues."""

    def signal_itself() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        held_signals.wait_while_meant_alone(signal.SIGTERM)
        os.write(went_on_w, b"x")
        time.sleep(LIMIT_S)

    went_on_r, went_on_w = os.pipe()
    rank = Rank(signal_itself, set_up)
    os.close(went_on_w)
    if not os.read(went_on_r, 1):  # it has ended
        return rank.ended_by(LIMIT_S)
    os.kill(rank.pid, signal.SIGKILL)
    os.waitpid(rank.pid, 0)
    return LIVES


def ask_for_the_end() -> None:
    assert held_signals._board is not None
    held_signals._board.set(LEADER, Field.END_ASKED, 1)


def handle_it() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("set_up", "end"),
    [
        (nothing, signal.SIGTERM),
        (ask_for_the_end, LIVES),
        (handle_it, LIVES),
    ],
    ids=["meant alone", "together with the launcher", "a handler of the script's"],
)
def test_who_is_stopped_by_a_signal_dies_there_if_it_was_meant_alone(set_up: Callable[[], object], end: int) -> None:
    assert run_alone(stand_behind, set_up) == end


def hit_with_a_handler() -> int:
    # Not an Event: its lock is held while the main thread begins to wait, where the handler could not set it.
    handled_r, handled_w = os.pipe()

    def handle_itself() -> None:
        """A script that does something of its own when its job is ended."""
        is_handled = becomes_ready(handled_r, LIMIT_S)
        time.sleep(2 * held_signals.MOMENT_S)
        os._exit(0 if is_handled else 1)

    def note(number: int, frame: object) -> None:
        os.write(handled_w, b"x")

    rank = Rank(handle_itself, lambda: signal.signal(signal.SIGTERM, note))
    os.kill(rank.pid, signal.SIGTERM)
    return rank.ended_by(2 * LIMIT_S)


def test_a_scripts_own_handler_takes_the_place_of_ours() -> None:
    assert run_alone(hit_with_a_handler) == 0


def end_a_child() -> None:
    """What a script does with a process that it has forked."""
    ready_r, ready_w = os.pipe()
    child = os.fork()
    if child == 0:
        held_signals.release_in_child()
        os.write(ready_w, b"x")
        time.sleep(LIMIT_S)
        os._exit(0)
    os.read(ready_r, 1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    os._exit(0 if os.WIFSIGNALED(status) else 1)  # 1: it has lived till the end of its sleep


def test_what_a_rank_forks_dies_of_its_signals_at_once() -> None:
    assert run_alone(end_of_a_rank_that_ends_a_child) == 0


def end_of_a_rank_that_ends_a_child() -> int:
    held_signals.MOMENT_S = 10 * LIMIT_S  # what is held is not let go in this test's time
    return Rank(end_a_child).ended_by(LIMIT_S)


def seen_by_the_script() -> list[bool]:
    held_signals.hold(Board.create(1)[1])
    getsignal = held_signals.wrap_getsignal(signal.getsignal)
    set_handler = held_signals.wrap_signal(signal.signal)
    found = [getsignal(signal.SIGTERM) is signal.SIG_DFL, set_handler(signal.SIGTERM, print) is signal.SIG_DFL]
    return [*found, getsignal(signal.SIGTERM) is print]


def test_to_the_script_the_signals_have_their_default() -> None:
    assert run_alone(seen_by_the_script) == [True, True, True]


def worker_dies(is_end_asked: bool) -> str:
    board = Board.create(1)[1]
    held_signals.hold(board)
    board.set(LEADER, Field.END_ASKED, int(is_end_asked))

    def found_dead() -> None:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    try:
        held_signals.wrap_error_if_any_worker_fails(found_dead)()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_dataloaders_worker_that_is_signalled_with_the_whole_job_breaks_nothing_off() -> None:
    assert run_alone(worker_dies, True) == ""
    assert "is killed by signal" in run_alone(worker_dies, False)


def watches_a_high_descriptor() -> bool:
    """Whether what is written to it is read."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    read_fd, write_fd = os.pipe()
    high = fcntl.fcntl(read_fd, fcntl.F_DUPFD, 2000)
    os.set_blocking(high, False)
    threading.Thread(target=held_signals._watch, args=(high,), daemon=True).start()
    os.write(write_fd, b"\0")
    for _ in range(500):
        if not becomes_ready(read_fd, 0.0):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_signals_are_held_in_a_process_with_more_files_than_select_can_name() -> None:
    assert run_alone(watches_a_high_descriptor)
