"""Processes of the agent end with it, and with each other; a seat outlives whoever sits there."""

from __future__ import annotations

import os
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ttprun.agent import stacks
from ttprun.agent.orders import Orders
from ttprun.agent.processes import Copy, RankHandler, Standby, StandbyHandler, kill_session
from ttprun.agent.seat import Seat
from ttprun.agent.standbys import Standbys
from ttprun.board import Board, Field
from ttprun.observe.run_directory import RunDirectory
from ttprun.recovery import SpawnRank

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
    "run_dir": "/tmp", "is_replacement": False, "faults": [], "options": {{"user_paths": [], "prints_traceback": True, "may_rerun": False, "mindio": False,
     "device_errors": {{}}}}}},
    [Board.create(1)[0], os.memfd_create("record"), os.memfd_create("stack")])
program = RankHandler(start("/bin/sh", "-c", "echo program $$; exec sleep 600"), "/tmp", True, False)
standby = Standby("/tmp")
while not standby.is_ready:
    standby.read()
print("standby", standby.process.pid, flush=True)
print("copy", standby.copy().process.pid, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def has_ended() -> dict[str, bool]:
    """An agent starts one process of each kind and is killed: which of them have ended then."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert agent.stdout is not None
    pids = dict(agent.stdout.readline().split() for _ in range(5))
    agent.kill()
    agent.wait()
    agent.stdout.close()
    ended = {kind: wait_for_end(int(pid)) for kind, pid in pids.items()}
    for kind, has_ended in ended.items():
        if not has_ended:
            os.kill(int(pids[kind]), signal.SIGKILL)
    return ended


@pytest.mark.parametrize("kind", ["rank", "worker", "program", "standby", "copy"])
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


def wait_until_ready(standby: Standby) -> None:
    """Blocks until it has imported what it was to import."""
    while not standby.is_ready:
        standby.read()


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    """One that can be copied, for several tests."""
    found = Standby(str(tmp_path_factory.mktemp("run")))
    wait_until_ready(found)
    yield found
    found.end()


@pytest.fixture
def become_rank(tmp_path: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """`become_rank(process, script)`: it runs the script as a rank; its exit code, and what it has written."""
    fds: list[int] = []

    def become(process: Standby | Copy, script: str) -> tuple[int, str]:
        (tmp_path / "script.py").write_text(script)
        words = [str(tmp_path / "script.py"), "--lr", "1"]
        handler = StandbyHandler(start_of(tmp_path, "-u", *words, is_redirected=True), process)
        fds.extend((Board.create(1)[0], os.memfd_create("record"), stacks.create()))
        os.ftruncate(fds[-2], 128 << 20)
        welcome = {
            "op": "welcome", "rank": 0, "local_rank": 0, "world_size": 1, "local_world_size": 1, "generation": 2,
            "run_dir": str(tmp_path), "is_replacement": True, "faults": [], "arguments": words,
            "env": {"ROLE": "mine", "PATH": os.environ["PATH"]},
            "options": {
                "user_paths": [], "prints_traceback": True, "record_limit_mib": 1, "journal_limit_mib": 1,
                "allow_faults": False, "may_rerun": False, "mindio": False, "retry_on": [], "device_errors": {}, "keeps_state": False,
                "shelves": [], "snapshot_every_steps": 0, "commit_timeout_s": 5.0, "is_replaced": True, "verify_every": 0, "on_nan": "warn",
            },
        }  # fmt: skip
        handler.channel.send(welcome, [*fds[-3:], *handler.outputs()])
        order = {"op": "resume", "generation": 2, "boundary": 0, "expected": {}, "skip_lines": [0, 0]}
        handler.channel.send(order)
        code = handler.proc.wait(LIMIT_S)
        handler.close(signal.SIGKILL)
        handler.channel.close()
        return code, (tmp_path / "stdout").read_text() + (tmp_path / "stderr").read_text()

    yield become
    for fd in fds:
        os.close(fd)


TELL = "import os, sys\nprint(sys.argv[1:], os.environ['ROLE'], os.getcwd(), __name__, flush=True)\n"
TOLD = f"['--lr', '1'] mine {os.getcwd()} __main__\n"


def test_a_standby_becomes_the_rank_that_it_is_told_to_be(
    standby: Standby, become_rank: Callable[..., tuple[int, str]]
) -> None:
    standby.warm_up(["json", "there_is_no_such_module"])

    assert become_rank(standby, TELL) == (0, TOLD)


def test_copies_of_a_standby_become_ranks_one_after_the_other_and_it_stays(
    ready: Standby, become_rank: Callable[..., tuple[int, str]]
) -> None:
    ready.warm_up(["there_is_no_such_module"])
    wait_until_ready(ready)
    draw = TELL + "import random, numpy\nprint(random.random(), numpy.random.random(), flush=True)\n"

    copies = [ready.copy() for _ in range(2)]
    ends = [become_rank(copy, draw) for copy in copies]

    drawn = [written.splitlines()[-1].split() for _, written in ends]
    assert [(code, written.splitlines(keepends=True)[-2]) for code, written in ends] == [(0, TOLD)] * 2
    assert all(first != second for first, second in zip(*drawn, strict=True))
    assert ready.process.poll() is None


def test_a_copy_computes_on_several_threads_what_a_fresh_process_computes(
    ready: Standby, become_rank: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    compute = """
import hashlib, sys, numpy, torch
torch.set_num_threads(2)
torch.manual_seed(0)
x, y = torch.randn(300, 300, requires_grad=True), torch.randn(8, 16, 32, 32)
(torch.nn.functional.conv2d(y, torch.ones(4, 16, 3, 3)).sum() * torch.linalg.inv(x @ x.T + torch.eye(300)).sum()).backward()
z = numpy.random.default_rng(0).random((200, 200)); z = z @ z
sys.stdout.write(hashlib.sha256(x.grad.numpy().tobytes() + z.tobytes()).hexdigest())
"""
    fresh = subprocess.run([sys.executable, "-c", compute], capture_output=True, text=True, check=True).stdout

    code, copied = become_rank(ready.copy(), compute)

    assert (code, copied) == (0, fresh)


def test_a_copy_is_a_process_of_the_agent_whose_end_is_told_as_of_any_other(ready: Standby) -> None:
    copy = ready.copy()
    assert copy is not None
    stat = Path(f"/proc/{copy.process.pid}/stat").read_text().rpartition(")")[2].split()

    with pytest.raises(subprocess.TimeoutExpired):
        copy.process.wait(0.01)
    kill_session(copy.process.pid)

    assert stat[1:4] == [str(os.getpid()), str(copy.process.pid), str(copy.process.pid)]  # parent, group, session
    assert [copy.process.wait(LIMIT_S), copy.process.poll()] == [-signal.SIGKILL] * 2
    assert ready.process.poll() is None
    copy.channel.close()


def test_a_copy_outlives_its_standby(standby: Standby) -> None:
    wait_until_ready(standby)
    copy = standby.copy()
    assert copy is not None

    standby.end()

    assert copy.process.poll() is None
    copy.channel.close()
    assert copy.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "a thread"),
        ("import torch; torch.cuda._is_in_bad_fork = lambda: True", "a device"),
    ],
)
def test_a_standby_that_has_a_thread_or_a_device_is_not_copied_but_taken_itself(
    module: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_with_more.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), ROOT)))
    standbys, watched = Standbys(1, str(tmp_path)), list[Standby]()
    standbys.warm_up(["module_with_more"])
    standbys.refill(watched.append)
    wait_until_ready(watched[0])

    taken = standbys.take()

    assert taken is watched[0]
    watched[0].end()


def test_a_standby_that_gives_no_copy_is_killed_and_another_one_is_taken(tmp_path: Path) -> None:
    standbys, watched = Standbys(2, str(tmp_path)), list[Standby]()
    standbys.refill(watched.append)
    for standby in watched:
        wait_until_ready(standby)
    watched[0].channel.sock.shutdown(2)

    taken = standbys.take()

    assert isinstance(taken, Copy)
    assert taken.process.pid not in [standby.process.pid for standby in watched]
    assert watched[0].process.wait(LIMIT_S) is not None
    kill_session(taken.process.pid)
    taken.process.wait()
    taken.channel.close()
    standbys.end()
    watched[0].channel.close()


def test_a_standby_that_is_not_needed_ends_with_the_line(standby: Standby) -> None:
    standby.read()

    standby.channel.sock.shutdown(2)

    assert standby.process.wait(LIMIT_S) == 0


def test_standbys_are_refilled_and_a_ready_one_is_taken_first(tmp_path: Path) -> None:
    watched: list[Standby] = []
    standbys = Standbys(2, str(tmp_path))
    standbys.refill(watched.append)
    first, second = watched
    wait_until_ready(second)
    second.is_copyable = False

    taken = standbys.take()
    standbys.refill(watched.append)

    try:
        assert taken is second
        assert [standby is first or standby is second for standby in watched] == [True, True, False]
        assert standbys.ready == 0
        assert standbys.take() is None
        assert standbys.is_on_its_way
    finally:
        second.end()
        standbys.end()
    assert [standby.process.returncode for standby in watched] == [-signal.SIGKILL] * 3


def test_a_standby_that_ends_while_it_imports_more_is_followed_by_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_kills.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), ROOT)))
    standbys, watched = Standbys(1, str(tmp_path)), list[Standby]()
    standbys.warm_up(["module_that_kills"])
    standbys.refill(watched.append)
    with pytest.raises(EOFError):
        wait_until_ready(watched[0])
    has_started = watched[0].has_started
    watched[0].bury()

    standbys.forget_modules()
    standbys.refill(watched.append)
    wait_until_ready(watched[1])

    assert has_started
    assert watched[1].process.poll() is None
    standbys.end()


def test_a_standby_that_has_died_is_never_taken(tmp_path: Path) -> None:
    watched: list[Standby] = []
    standbys = Standbys(1, str(tmp_path))
    standbys.refill(watched.append)
    wait_until_ready(watched[0])
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
        event = seat.leave(seat.bury(), board, lambda number, pid: "")
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


@dataclass
class FakeSupervisor:
    """What Orders needs of a supervisor to start a process."""

    seats: list[Seat]
    run: RunDirectory
    replace_handler: Any = lambda *_: None
    standbys: Any = field(default_factory=lambda: Standbys(0, ""))
    selector: Any = None
    welcomed: list[int] = field(default_factory=list)

    @property
    def watch(self) -> FakeSupervisor:
        return self

    def welcome(self, seat: Seat, is_replacement: bool) -> None:
        assert is_replacement
        self.welcomed.append(seat.pid)


def test_a_replacement_is_not_started_before_the_memory_of_a_dying_process_is_free(
    started: Callable[..., RankHandler], tmp_path: Path
) -> None:
    seat = Seat(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
    seat.sit(started("-c", "kill -9 $$", entry="/bin/sh", is_python=False))
    lost = seat.pid
    supervisor = FakeSupervisor([seat], RunDirectory(tmp_path))
    seat.is_dying = True
    seat.leave(-9, Board.create(1)[1], lambda number, pid: "")

    orders = Orders(supervisor)  # type: ignore[arg-type]
    orders.spawn_rank(SpawnRank(0, 2))
    before = (seat.pid, list(supervisor.welcomed))
    code = seat.bury()
    orders.spawn_those_that_wait()

    assert before == (lost, [])
    assert code == -9
    assert supervisor.welcomed == [seat.pid] != [lost]
    kill_session(seat.pid)
    assert seat.bury() is not None
    seat.handler.channel.close()


def test_a_standby_that_is_on_its_way_is_waited_for_and_stays_for_the_next_fault(
    started: Callable[..., RankHandler], tmp_path: Path
) -> None:
    standbys, watched = Standbys(1, str(tmp_path)), list[Standby]()
    standbys.refill(watched.append)
    seats = [Seat(rank, rank, handler=None, record_fd=-1) for rank in range(2)]  # type: ignore[arg-type]
    for seat in seats:
        seat.sit(started("-c", "kill -9 $$", entry="/bin/sh", is_python=False))
        seat.leave(seat.bury(), Board.create(2)[1], lambda number, pid: "")
    supervisor = FakeSupervisor(seats, RunDirectory(tmp_path), standbys=standbys, selector=selectors.DefaultSelector())
    orders = Orders(supervisor)  # type: ignore[arg-type]

    for rank in range(2):
        orders.spawn_rank(SpawnRank(rank, 2))
    before = list(supervisor.welcomed)
    wait_until_ready(watched[0])
    orders.spawn_those_that_wait()

    assert before == []
    assert supervisor.welcomed == [seat.pid for seat in seats]
    assert all(isinstance(seat.handler, StandbyHandler) for seat in seats)
    assert watched[0].process.poll() is None
    assert standbys.ready == 1
    for seat in seats:
        kill_session(seat.pid)
        assert seat.bury() == -signal.SIGKILL
        seat.handler.channel.close()
    standbys.end()
