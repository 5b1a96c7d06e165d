"""Processes of the agent end with it, and with each other; a seat outlives whoever sits there."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ttprun.agent import stacks
from ttprun.agent.processes import RankHandler, Standby, StandbyHandler, kill_session
from ttprun.agent.seat import Seat
from ttprun.agent.standbys import Standbys
from ttprun.board import Board, Field

ROOT = str(Path(__file__).resolve().parents[2])
LIMIT_S = 20.0


def start_of(tmp_path: Path, *words: str, is_redirected: bool = False, entry: str = sys.executable) -> dict[str, Any]:
    """What torch gives a subprocess handler."""
    logs = {name: str(tmp_path / name) if is_redirected else None for name in ("stdout", "stderr")}
    return {
        "entrypoint": entry,
        "args": words,
        "env": {"PYTHONPATH": ROOT},
        **logs,
        "local_rank_id": 0,
        "numa_options": None,
    }


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., RankHandler]]:
    """`started(*words)`: a rank's process; ended with the test."""
    handlers: list[RankHandler] = []

    def start(*words: str, is_new: bool = True, is_python: bool = True, **how: Any) -> RankHandler:
        handlers.append(RankHandler(start_of(tmp_path, *words, **how), str(tmp_path), is_new, is_python))
        return handlers[-1]

    yield start
    for handler in handlers:
        kill_session(handler.proc.pid)
        handler.proc.wait()
        handler.close(signal.SIGKILL)
        handler.channel.close()


def wait_for_end(pid: int) -> bool:
    """Whether a process, of whatever parent, ends."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], LIMIT_S)[0])
    finally:
        os.close(fd)


AGENT = f"""
import os, signal, sys
from ttprun.agent.processes import RankHandler, Standby
from ttprun.board import Board

def start(entry, *words):
    return {{"entrypoint": entry, "args": words, "env": {{"PYTHONPATH": {ROOT!r}}}, "stdout": None, "stderr": None,
            "local_rank_id": 0, "numa_options": None}}

rank = RankHandler(start(sys.executable, "-c", '''
import os, signal
worker = os.fork()
if worker:
    print("rank", os.getpid(), flush=True)
    print("worker", worker, flush=True)
signal.pause()
'''), "/tmp", True, True)
rank.channel.send({{"op": "welcome", "rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "generation": 1,
    "run_dir": "/tmp", "is_replacement": False, "faults": [], "options": {{"user_paths": [], "prints_traceback": True, "may_rerun": False,
     "device_errors": {{}}}}}},
    [Board.create(1)[0], os.memfd_create("record"), os.memfd_create("stack")])
program = RankHandler(start("/bin/sh", "-c", "echo program $$; exec sleep 600"), "/tmp", True, False)
standby = Standby("/tmp")
print("standby", standby.process.pid, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def has_ended() -> dict[str, bool]:
    """An agent starts one process of each kind and is killed: which of them have ended then."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert agent.stdout is not None
    pids = dict(agent.stdout.readline().split() for _ in range(4))
    agent.kill()
    agent.wait()
    agent.stdout.close()
    ended = {kind: wait_for_end(int(pid)) for kind, pid in pids.items()}
    for kind, has_ended in ended.items():
        if not has_ended:
            os.kill(int(pids[kind]), signal.SIGKILL)
    return ended


@pytest.mark.parametrize("kind", ["rank", "worker", "program", "standby"])
def test_nothing_that_an_agent_has_started_outlives_its_sigkill(kind: str, has_ended: dict[str, bool]) -> None:
    assert has_ended[kind]


def test_what_a_rank_has_started_ends_with_it(started: Callable[..., RankHandler], tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("sleep 600 & echo $!; sleep 600\n")
    handler = started(str(tmp_path / "script.sh"), entry="/bin/sh", is_python=False, is_redirected=True)
    log = tmp_path / "stdout"
    waiting = select.poll()
    while not log.read_text().endswith("\n"):
        waiting.poll(10)
    child = int(log.read_text())

    kill_session(handler.proc.pid)
    handler.proc.wait()

    assert wait_for_end(child)


def test_to_kill_a_process_that_is_gone_is_no_error(started: Callable[..., RankHandler]) -> None:
    handler = started("-c", "", entry="/bin/sh", is_python=False)
    handler.proc.wait()

    kill_session(handler.proc.pid)
    handler.close(signal.SIGTERM)


def test_the_log_of_a_rank_is_continued_by_its_replacement(started: Callable[..., RankHandler], tmp_path: Path) -> None:
    for is_new, word in ((True, "first"), (False, "second")):
        handler = started("-c", f"echo {word}", entry="/bin/sh", is_new=is_new, is_python=False, is_redirected=True)
        handler.proc.wait()

    assert (tmp_path / "stdout").read_text() == "first\nsecond\n"


# Standbys.


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Standby]:
    found = Standby(str(tmp_path))
    yield found
    found.end()


def test_a_standby_becomes_the_rank_that_it_is_told_to_be(standby: Standby, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(sys.argv, os.environ['ROLE'], os.getcwd(), __name__, flush=True)\n")
    start = start_of(tmp_path, "-u", str(script), "--lr", "1", is_redirected=True)
    assert next(standby.channel.messages()) == {"op": "ready"}
    standby.channel.send({"op": "warm", "modules": ["json", "there_is_no_such_module"]})
    handler = StandbyHandler(start, standby)
    board_fd, _ = Board.create(1)
    record_fd, stack_fd = (os.memfd_create(name) for name in ("record", "stack"))
    os.ftruncate(record_fd, 128 << 20)
    stack_fd = stacks.create()
    welcome = {
        "op": "welcome", "rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "generation": 2,
        "run_dir": str(tmp_path), "is_replacement": True, "faults": [], "arguments": [str(script), "--lr", "1"],
        "env": {"ROLE": "mine", "PATH": os.environ["PATH"]},
        "options": {
            "user_paths": [], "prints_traceback": True, "record_limit_mib": 1, "journal_limit_mib": 1, "allow_faults": False,
            "may_rerun": False, "retry_on": [], "device_errors": {},
            "commit_timeout_s": 5.0, "is_replaced": True, "verify_every": 0, "on_nan": "warn",
        },
    }  # fmt: skip

    handler.channel.send(welcome, [board_fd, record_fd, stack_fd, *handler.outputs()])
    order = {"op": "resume", "generation": 2, "boundary": 0, "expected": {}, "skip_lines": [0, 0]}
    handler.channel.send(order)

    assert handler.proc.wait(LIMIT_S) == 0, (tmp_path / "stderr").read_text()
    handler.close(signal.SIGKILL)
    assert (tmp_path / "stdout").read_text() == f"{[str(script), '--lr', '1']} mine {os.getcwd()} __main__\n"
    for fd in (board_fd, record_fd, stack_fd):
        os.close(fd)


def test_a_standby_that_is_not_needed_ends_with_the_line(standby: Standby) -> None:
    next(standby.channel.messages())

    standby.channel.sock.shutdown(2)

    assert standby.process.wait(LIMIT_S) == 0


def test_standbys_are_refilled_and_a_ready_one_is_taken_first(tmp_path: Path) -> None:
    watched: list[Standby] = []
    standbys = Standbys(2, str(tmp_path))
    standbys.refill(watched.append)
    first, second = watched
    second.is_ready = True

    taken = standbys.take()
    standbys.refill(watched.append)

    try:
        assert taken is second
        assert [standby is first or standby is second for standby in watched] == [True, True, False]
        assert standbys.ready == 0
    finally:
        second.end()
        standbys.end()
    assert [standby.process.returncode for standby in watched] == [-signal.SIGKILL] * 3


def test_a_standby_that_has_died_is_never_taken(tmp_path: Path) -> None:
    watched: list[Standby] = []
    standbys = Standbys(1, str(tmp_path))
    standbys.refill(watched.append)
    watched[0].is_ready = True
    watched[0].process.kill()
    watched[0].process.wait()

    assert standbys.take() is None
    assert standbys.ready == 0
    standbys.end()
    watched[0].channel.close()


# Seats.


def test_a_seat_tells_how_its_process_ended_and_what_it_leaves(started: Callable[..., RankHandler]) -> None:
    board = Board.create(1)[1]
    ends = {}
    for how, command in {"killed": "kill -9 $$", "failed": "exit 3", "done": "exit 0"}.items():
        seat = Seat(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
        seat.sit(started("-c", command, entry="/bin/sh", is_python=False))
        seat.is_protected = how == "failed"
        board.set(0, Field.RECORDED, 7)
        board.set(0, Field.LINES_OUT, 2)
        event = seat.leave(board, lambda number, pid: "")
        ends[how] = (event.code, event.signal, event.boundary, event.is_script_error, seat.is_finished, seat.lost_lines)

    assert ends == {
        "killed": (None, 9, 7, False, False, (2, 0)),
        "failed": (3, None, 7, False, False, (2, 0)),
        "done": (0, None, 7, False, True, (2, 0)),
    }


def test_a_seat_holds_the_newest_order_and_all_news_till_its_process_greets(
    started: Callable[..., RankHandler],
) -> None:
    seat = Seat(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
    seat.sit(started("-c", "exec sleep 600", entry="/bin/sh", is_python=False))
    theirs = seat.handler.channel
    sent: list[Any] = []
    theirs.send = lambda message, fds=(): sent.append(message)  # type: ignore[method-assign]

    seat.tell({"op": "freeze", "generation": 2})
    seat.pass_on({"op": "put", "key": "a"})
    seat.tell({"op": "resume", "generation": 3})
    before = list(sent)
    seat.greet()
    seat.tell({"op": "freeze", "generation": 4})

    assert before == []
    assert sent == [
        {"op": "resume", "generation": 3}, {"op": "put", "key": "a"}, {"op": "freeze", "generation": 4},
    ]  # fmt: skip
