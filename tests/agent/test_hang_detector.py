"""Signs of life and stacks of real processes: heartbeat, /proc and the stack that a rank writes itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent.nodes import NothingFails
from ttprun import recovery
from ttprun.agent.base import stack_dumps
from ttprun.agent.base.ground import FirstFailure
from ttprun.agent.base.life_signs import state_of
from ttprun.agent.between.agent import Agent
from ttprun.agent.lead.hang_detector import HangDetector
from ttprun.agent.lead.rows import Row
from ttprun.agent.node import node as process_module
from ttprun.agent.node.node_agent import NodeEyes
from ttprun.agent.node.rank_processes import RankHandler
from ttprun.protocol.board import ROW_FIELDS, Board, Field
from ttprun.protocol.from_rank import Broken, RankProtected
from ttprun.protocol.rank_events import RankStarted
from ttprun.recovery import Settings, new_job
from ttprun.recovery.hang_observations import Doing, Observation
from ttprun.recovery.hangs import Hung, Way

PERIOD_S = 0.02
LIMIT_S = 60.0  # against one that hangs
PROGRAM = """\
import ctypes, os, sys, threading, time
from ttprun.protocol.board import Board
from ttprun.rank import heartbeat
heartbeat.EVERY_S = {period_s}
heartbeat.write_when_asked({stack_fd})
heartbeat.start(Board({board_fd}, 1), 0)

def stand_there():
    print(threading.main_thread().ident, flush=True)
    {what}

stand_there()
"""
RUN = "while True: pass"
SLEEP = "time.sleep(60)"
OWN_CALLS = [
    SLEEP,
    "import socket; pair = socket.socketpair(); pair[0].recv(1)",
    "import subprocess; subprocess.run(['sleep', '60'])",
    "import shutil; os.mkfifo(sys.argv[0] + '.pipe'); shutil.copyfileobj(open(sys.argv[0] + '.pipe'), sys.stderr)",
    "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    RUN,
]
HOLD_GIL = "ctypes.PyDLL(None).sem_wait(ctypes.create_string_buffer(64))"
CRASH = "ctypes.string_at(0)"


@dataclass
class Process:
    """A process with a heartbeat that is at `what`."""

    process: subprocess.Popen[str]
    board: Board
    stack_fd: int
    main_thread: int = 0

    def signs(self) -> tuple[bool, bool]:
        """Whether the pulse, and whether the main thread's beats go on."""
        pulse, beats = self.board.get(0, Field.PULSE_NS), self.board.get(0, Field.MAIN_BEATS)
        time.sleep(0.3)
        return self.board.get(0, Field.PULSE_NS) > pulse, self.board.get(0, Field.MAIN_BEATS) > beats

    def comes_to(self, signs: tuple[bool, bool]) -> bool:
        """Whether it shows these signs before long: on a busy machine it may not be at `what` yet."""
        give_up_at_s = time.monotonic() + LIMIT_S
        while self.signs() != signs:
            if time.monotonic() > give_up_at_s:
                return False
        return True

    def stop(self) -> None:
        """Until it is: a thread that waits for a processor stops when it gets one."""
        self.process.send_signal(signal.SIGSTOP)
        give_up_at_s = time.monotonic() + LIMIT_S
        while state_of(self.process.pid)[0] != "T":
            assert time.monotonic() < give_up_at_s
            time.sleep(0.01)

    def stack(self, is_stopped: bool = False) -> str:
        """The main thread's."""
        return stack_dumps.main_thread_of(stack_dumps.take(self.writer, is_stopped), self.main_thread)

    @property
    def writer(self) -> stack_dumps.Writer:
        return stack_dumps.Writer(self.process.pid, self.stack_fd, self.board, 0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    """`start(what)`: a process that is at `what` by now."""
    started: list[Process] = []

    def start_process(what: str) -> Process:
        board_fd, board = Board.create(1)
        stack_fd = stack_dumps.create()
        script = tmp_path / "stands.py"
        script.write_text(PROGRAM.format(what=what, period_s=PERIOD_S, board_fd=board_fd, stack_fd=stack_fd))
        process = subprocess.Popen(
            [sys.executable, str(script)],
            pass_fds=(board_fd, stack_fd),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
            start_new_session=True,
        )
        found = Process(process, board, stack_fd)
        started.append(found)
        assert process.stdout is not None
        found.main_thread = int(process.stdout.readline())
        time.sleep(0.1)
        return found

    yield start_process
    for found in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(found.process.pid, signal.SIGKILL)  # a child would hold the pipe for as long as it sleeps
        found.process.communicate()
        os.close(found.stack_fd)


@pytest.mark.parametrize(
    ("what", "signs"),
    [(RUN, (True, True)), (SLEEP, (True, False)), (HOLD_GIL, (False, False))],
    ids=["runs bytecode", "waits in C", "holds the GIL"],
)
def test_the_heartbeat_reports_what_the_main_thread_is_at(
    start: Callable[[str], Process], what: str, signs: tuple[bool, bool]
) -> None:
    process = start(what)

    assert process.comes_to(signs)


@pytest.mark.parametrize("what", [RUN, SLEEP, HOLD_GIL], ids=["runs bytecode", "waits in C", "holds the GIL"])
def test_a_rank_writes_its_stack_whatever_its_main_thread_is_at(start: Callable[[str], Process], what: str) -> None:
    process = start(what)

    texts = [process.stack() for _ in range(3)]

    frames = [stack_dumps.innermost_user_frame(text) for text in texts]
    assert all(frame.endswith("in stand_there") for frame in frames), texts
    assert [text.count("in stand_there") for text in texts] == [1, 1, 1]  # each is written over the one before


def test_a_stopped_process_writes_its_stack_and_stops_again(start: Callable[[str], Process]) -> None:
    process = start(RUN)
    process.stop()

    stack = process.stack(is_stopped=True)

    assert stack_dumps.innermost_user_frame(stack).endswith("in stand_there")
    assert process.comes_to((False, False))
    assert state_of(process.process.pid)[0] == "T"


@pytest.mark.parametrize("what", [RUN, SLEEP], ids=["runs bytecode", "waits in C"])
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_where_the_gil_can_be_had_the_thread_that_has_it_writes_so_that_no_frame_changes_meanwhile(
    start: Callable[[str], Process], what: str, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler that reads what other threads run has crashed ranks."""
    monkeypatch.setattr(stack_dumps, "_BOARD_LIMIT_S", LIMIT_S)  # on a busy machine it has the GIL late
    process = start(what)
    if is_stopped:
        process.stop()

    text = stack_dumps.take(process.writer, is_stopped)

    assert "heartbeat.py" in stack_dumps.current_thread_of(text)
    assert stack_dumps.innermost_user_frame(stack_dumps.main_thread_of(text, process.main_thread)).endswith(
        "in stand_there"
    )


def test_the_main_thread_of_a_stopped_process_writes_not_one_that_may_have_no_room_for_it(
    start: Callable[[str], Process],
) -> None:
    """The kernel prefers the main thread, but not where all threads are stopped."""
    threads = "for _ in range(30): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    process = start(f"{threads}\n    {HOLD_GIL}")
    mark = f"Current thread 0x{process.main_thread:016x}"
    give_up_at_s = time.monotonic() + LIMIT_S
    while mark not in stack_dumps.take(process.writer, is_stopped=False):  # it does not hold the GIL yet
        assert time.monotonic() < give_up_at_s

    for _ in range(5):
        process.stop()
        text = stack_dumps.take(process.writer, is_stopped=True)

        assert mark in text


def test_several_processes_write_their_stacks_at_once_and_one_that_catches_nothing_is_left_alone(
    start: Callable[[str], Process],
) -> None:
    ranks = [start(RUN), start(SLEEP)]
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        deaf = stack_dumps.Writer(stranger.pid, stack_dumps.create(), Board.create(1)[1], 0)
        texts = stack_dumps.ask_all([*(rank.writer for rank in ranks), deaf])
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()
        os.close(deaf.fd)

    assert all(stack_dumps.innermost_user_frame(text).endswith("in stand_there") for text in texts[:2])
    assert texts[2] == ""


def test_frames_of_imports_and_of_ttprun_are_left_out_of_a_stack_that_is_compared() -> None:
    ours = Path(stack_dumps.__file__)
    text = f"""Thread 0x00007f0000000000 (most recent call first):
  File "{ours}", line 9 in wait
  File "/job/train.py", line 4 in load
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "/job/train.py", line 1 in <module>
"""

    assert stack_dumps.of_the_user(text) == (
        '  File "/job/train.py", line 4 in load\n  File "/job/train.py", line 1 in <module>'
    )


def test_a_crash_leaves_its_stack(start: Callable[[str], Process]) -> None:
    process = start(CRASH)
    process.process.wait(LIMIT_S)

    stack = stack_dumps.left_behind(process.stack_fd)

    assert process.process.returncode == -signal.SIGSEGV
    assert stack.startswith("Fatal Python error: Segmentation fault")
    assert stack_dumps.innermost_user_frame(stack).endswith("in stand_there")
    assert stack_dumps.left_behind(process.stack_fd) == ""


def test_a_forked_child_does_not_beat(start: Callable[[str], Process]) -> None:
    process = start("os.kill(os.getpid(), 19) if os.fork() else time.sleep(3)")

    assert process.comes_to((False, False))


def test_a_process_with_a_heartbeat_ends_well(start: Callable[[str], Process]) -> None:
    process = start("time.sleep(0.05)")

    assert process.process.wait(LIMIT_S) == 0


def test_the_heartbeat_costs_next_to_nothing(start: Callable[[str], Process]) -> None:
    process = start(SLEEP)
    before = state_of(process.process.pid)[1]

    time.sleep(50 * PERIOD_S)

    assert state_of(process.process.pid)[1] - before <= 25 * PERIOD_S  # 0.01 s if it sleeps between beats


def test_frames_of_py_spy_are_read_too() -> None:
    text = 'Thread 7 (idle): "MainThread"\n    wait (x/site-packages/c.py:3)\n    train (/home/me/train.py:33)\n'

    assert stack_dumps.innermost_user_frame(text) == "train.py:33 in train"


def test_the_main_thread_is_found_in_what_py_spy_writes_without_names() -> None:
    text = "Process 7: python train.py\nPython v3.11.7\n\nThread 8 (idle)\n    load (/a.py:1)\nThread 7 (idle)\n    train (/b.py:2)\n"

    assert stack_dumps.main_thread_of(text, 0x7F0000000000) == "Thread 7 (idle)\n    train (/b.py:2)"


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
@pytest.mark.parametrize("what", [RUN, SLEEP, HOLD_GIL], ids=["runs bytecode", "waits in C", "holds the GIL"])
def test_py_spy_reports_the_stack_where_it_is_installed(
    start: Callable[[str], Process], what: str, is_stopped: bool
) -> None:
    process = start(what)
    if is_stopped:
        process.stop()

    text = stack_dumps.take(process.writer, is_stopped)

    assert text.startswith(f"Process {process.process.pid}:")
    main = stack_dumps.main_thread_of(text, process.main_thread)
    assert main.startswith(f"Thread {process.process.pid} ")
    assert stack_dumps.innermost_user_frame(main).endswith("in stand_there")
    assert (state_of(process.process.pid)[0] == "T") == is_stopped


class FakeNode(Agent):
    """As much of a node as is asked when a rank reports broken connections; keeps what becomes of it."""

    def __init__(self) -> None:
        self._board = Board.create(2)[1]
        self.config = SimpleNamespace(hang_timeout_s="auto")
        self.domains = NothingFails()
        self.job = new_job(Settings(world_size=2))
        self.slots: list[Any] = []
        self.reported: list[Any] = []
        self.forward: Any = None
        self.here: list[Any] = []
        nothing: Any = SimpleNamespace(newest=lambda rank: None, stored=None, own_part=None)
        self.eyes = NodeEyes(self, nothing)

    def log(self, event: str, **fields: Any) -> None:
        pass

    def advance(self, event: Any) -> None:
        self.reported.append(event)


def hang_detector_of(node: Any, kind: type[HangDetector] = HangDetector) -> HangDetector:
    nobody: Any = None
    return kind(node, nobody)


class BlindLookout(HangDetector):
    """Sees no process, and all at boundary 7."""

    def _observations(self) -> list[Any]:
        return []

    def _boundary(self) -> int:
        return 7


@pytest.mark.parametrize(("ranks", "looks"), [(2, 5), (2048, 5), (8192, 2), (65536, 2)])
def test_the_more_ranks_there_are_the_less_often_all_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, ranks: int, looks: int
) -> None:
    node: Any = FakeNode()
    node.slots = [None] * ranks
    looked: list[None] = []
    node.domains.look = lambda name, action: looked.append(None)
    detector = hang_detector_of(node)

    for quarter in range(5):
        monkeypatch.setattr(time, "monotonic", lambda at_s=100.0 + quarter / 4: at_s)
        detector.look()

    assert len(looked) == looks


@pytest.mark.parametrize(
    ("fault", "rank", "kind"),
    [
        ("", None, "connection"),
        ("link", 1, "link"),
        ("remote-suspect", None, "remote-suspect"),
        ("collective-timeout", None, "collective-timeout"),
    ],
)
def test_only_a_device_that_has_lost_a_link_of_its_own_speaks_against_its_rank(
    fault: str, rank: int | None, kind: str
) -> None:
    node: Any = FakeNode()
    slot: Any = SimpleNamespace(rank=1)
    reported = Broken(generation=0, reason="allreduce: it broke", after_s=1.0, device_fault=fault)

    hang_detector_of(node, BlindLookout).take_broken(slot, reported)

    (event,) = node.reported
    assert (event.rank, event.kind, event.boundary, event.reason) == (rank, kind, 7, "rank 1: allreduce: it broke")


def test_connections_that_break_by_a_ranks_end_are_no_fault_of_their_own(started: Callable[..., RankHandler]) -> None:
    """On a busy machine the agent may read what the others say of it first."""
    ended = started("-c", "exit 9", entry="/bin/sh", is_python=False)
    os.waitid(os.P_PID, ended.proc.pid, os.WEXITED | os.WNOWAIT)
    node: Any = FakeNode()
    node.slots = [Row(0, 0, node.forward, pid=ended.proc.pid)]
    reporter: Any = SimpleNamespace(rank=1, pid=11)
    broken = Broken(generation=0, reason="reset by peer", after_s=1.0, device_fault="")

    hang_detector_of(node, BlindLookout).take_broken(reporter, broken)

    assert node.reported == []


class NodeThatGoesBack(FakeNode):
    """Two ranks hang; whatever is reported, all get new processes, and have done nothing yet."""

    def __init__(self, lost: Sequence[RankHandler], fresh: Sequence[RankHandler]) -> None:
        super().__init__()
        self.first_failure = FirstFailure()
        self.here = [
            process_module.Process(rank, rank, handler, record_fd=-1, stack_fd=stack_dumps.create())
            for rank, handler in enumerate(lost)
        ]
        self.slots = [Row(rank, rank, lambda *_: None) for rank in range(len(lost))]
        self._fresh = fresh
        self._sit(lost)

    def advance(self, event: Any) -> None:
        super().advance(event)
        self._sit(self._fresh)

    def in_background(self, work: Callable[[], Any], then: Callable[[Any], None], failed: Any) -> None:
        then(work())

    def process(self, rank: int) -> Any:
        return self.here[rank]

    def board_row(self, rank: int) -> list[int]:
        return [0] * ROW_FIELDS

    def _sit(self, handlers: Sequence[RankHandler]) -> None:
        for slot, row, handler in zip(self.here, self.slots, handlers, strict=True):
            slot.assign(handler)
            row.begin_process(slot.pid)


def test_of_two_ranks_that_hang_the_second_ones_new_process_is_not_taken_for_the_old_one(
    started: Callable[..., RankHandler],
) -> None:
    lost, fresh = ([started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)] for _ in "12")
    node: Any = NodeThatGoesBack(lost, fresh)
    observations = [
        Observation(rank=slot.rank, pid=slot.pid, boundary=7, meetings=0, doing=Doing.COMPUTING) for slot in node.slots
    ]
    hang_detector = hang_detector_of(node)

    for observation in observations:
        hang_detector._act(Hung(observation=observation, way=Way.IDLE, for_s=60.0, limit_s=10.0, awaited=None))

    assert [(event.rank, event.pid) for event in node.reported] == [(0, lost[0].proc.pid)]
    assert [handler.proc.poll() for handler in fresh] == [None, None]


def running(pids: Sequence[int]) -> recovery.Job:
    """A job whose protected ranks have these processes."""
    job = new_job(Settings(world_size=len(pids)))
    for rank, pid in enumerate(pids):
        job, _ = recovery.advance(job, RankStarted(at_s=0.0, rank=rank, pid=pid))
        job, _ = recovery.advance(job, RankProtected(at_s=0.0, rank=rank))
    return job


class NodeThatLooksAtStacks(NodeThatGoesBack):
    """What follows on a stack waits in `later`, and the machine decides about what is reported."""

    def __init__(self, ranks: Sequence[RankHandler]) -> None:
        super().__init__(ranks, ranks)
        self.job = running([handler.proc.pid for handler in ranks])
        self.later: list[Callable[[], None]] = []

    def advance(self, event: Any) -> None:
        self.reported.append(event)
        self.job, _ = recovery.advance(self.job, event)

    def in_background(self, work: Callable[[], Any], then: Callable[[Any], None], failed: Any) -> None:
        found = work()
        self.later.append(lambda: then(found))


def test_the_last_rank_with_the_state_is_left_alone_though_it_was_not_the_last_when_its_stack_was_asked_for(
    started: Callable[..., RankHandler],
) -> None:
    ranks = [started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)]
    node: Any = NodeThatLooksAtStacks(ranks)
    hang_detector = hang_detector_of(node)
    for slot in node.slots:
        stands = Observation(rank=slot.rank, pid=slot.pid, boundary=7, meetings=0, doing=Doing.COMPUTING)
        hang_detector._act(Hung(observation=stands, way=Way.STOPPED, for_s=3.0, limit_s=2.0, awaited=None))

    for conclude in node.later:
        conclude()

    assert [(event.rank, event.pid) for event in node.reported] == [(0, ranks[0].proc.pid)]


def test_a_hang_is_reported_once_while_its_stack_is_being_taken(started: Callable[..., RankHandler]) -> None:
    """That lasts if a thread of the rank holds the GIL, and each look meanwhile finds the same hang."""
    node: Any = NodeThatLooksAtStacks(
        [started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)]
    )
    hang_detector = hang_detector_of(node)
    slot = node.slots[0]
    stands = Observation(rank=slot.rank, pid=slot.pid, boundary=7, meetings=0, doing=Doing.COMPUTING)

    for _ in range(3):
        hang_detector._act(Hung(observation=stands, way=Way.STOPPED, for_s=3.0, limit_s=2.0, awaited=None))

    assert len(node.later) == 1


@pytest.mark.parametrize("what", [*OWN_CALLS, HOLD_GIL])
def test_a_rank_in_a_call_of_its_own_is_named_once_with_that_line_and_nothing_is_done_to_it(
    start: Callable[[str], Process], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    process = start(what)
    handler: Any = SimpleNamespace(proc=process.process)
    node: Any = NodeThatLooksAtStacks([handler, handler])
    node._board = process.board
    node.here[0].stack_fd, node.slots[0].main_thread = process.stack_fd, process.main_thread
    stands = Observation(rank=0, pid=process.process.pid, boundary=7, meetings=0, doing=Doing.COMPUTING)
    waits = Observation(rank=1, pid=0, boundary=7, meetings=1, doing=Doing.WAITING)
    late = Hung(observation=stands, way=Way.IDLE, for_s=10.4, limit_s=300.0, awaited=waits, is_due=False)
    hang_detector = hang_detector_of(node)

    for _ in range(3):
        hang_detector._act(late)
        for conclude in node.later:
            conclude()
        node.later.clear()

    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("rank 0 has not come for 10 s, and rank 1 waits for it: it is in stands.py:"), said
    assert f"(`{what[:97]}" in said
    assert said.endswith("After 300 s it is replaced (--hang-timeout-s SECONDS sets that limit)")
    assert (node.reported, process.process.poll()) == ([], None)
