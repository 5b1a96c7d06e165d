"""A slot outlives whoever sits there, and gets its next process when there is one for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.frozen import Freezer
from tests.agent.nodes import node_of, part
from tests.agent.starting import LIMIT_S, wait_for_end, wait_until_ready
from tests.agent.test_supervisor import begin, comes_around, make, supervisor, verdict_of  # noqa: F401 - fixtures
from ttprun import recovery
from ttprun.agent.base import stack_dumps
from ttprun.agent.between.agent import Agent
from ttprun.agent.launcher.supervisor import Supervisor
from ttprun.agent.node import process_watch
from ttprun.agent.node.node import Process
from ttprun.agent.node.node_agent import NodeAgent
from ttprun.agent.node.rank_processes import RankHandler, Standby, StandbyHandler, kill_session
from ttprun.agent.node.standbys import Standbys
from ttprun.protocol import process_orders
from ttprun.protocol.board import FINISHED, Board, Field
from ttprun.protocol.from_rank import Put
from ttprun.protocol.rank_events import Event, SpawnFailed
from ttprun.protocol.to_rank import Freeze, Resume

FREEZE, RESUME, AGAIN = Freeze((0,), 2, (1,)), Resume((), 3, boundary=0), Freeze((0,), 4, (1,))


def test_a_slot_reports_how_its_process_ended_and_what_it_leaves(started: Callable[..., RankHandler]) -> None:
    board = Board.create(1)[1]
    ends = {}
    for how, command in {"killed": "kill -9 $$", "failed": "exit 3", "done": "exit 0"}.items():
        slot = Process(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
        slot.assign(started("-c", command, entry="/bin/sh", is_python=False))
        slot.is_protected = how == "failed"
        board.set(0, Field.RECORDED, 7)
        event = slot.leave(slot.bury(), board, lambda number, pid: "")
        ends[how] = (event.code, event.signal, event.boundary, event.is_script_error, slot.is_finished)

    assert ends == {
        "killed": (None, 9, 7, False, False),
        "failed": (3, None, 7, False, False),
        "done": (0, None, 7, False, True),
    }


def test_a_slot_holds_the_newest_order_till_its_process_greets(
    started: Callable[..., RankHandler],
) -> None:
    slot = Process(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
    slot.assign(started("-c", "exec sleep 600", entry="/bin/sh", is_python=False))
    theirs = slot.handler.channel
    sent: list[Any] = []
    theirs.send = lambda message, fds=(): sent.append(message)  # type: ignore[method-assign]

    slot.send(FREEZE)
    slot.send_if_present(Put(2, "a", ""))
    slot.send(RESUME)
    before = list(sent)
    slot.greet(main_thread=1)
    slot.send(AGAIN)

    assert before == []
    assert sent == [RESUME, AGAIN]


class Welcomed:
    """Notes the processes that are welcomed as replacements."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def let_die(self, slot: Process) -> None: ...

    def welcome(self, slot: Process, is_replacement: bool) -> None:
        assert is_replacement
        self.pids.append(slot.pid)


def actuator_of(node: Agent, standbys: Standbys, welcomed: Welcomed) -> NodeAgent:
    return part(NodeAgent, node, standbys=standbys, watch=welcomed, replace_handler=lambda local_rank, handler: None)


def test_a_replacement_is_not_started_before_the_memory_of_a_dying_process_is_free(
    started: Callable[..., RankHandler], tmp_path: Path
) -> None:
    slot = Process(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
    slot.assign(started("-c", "kill -9 $$", entry="/bin/sh", is_python=False))
    lost = slot.pid
    node, welcomed = node_of(tmp_path, slot), Welcomed()
    slot.is_dying = True
    slot.leave(-9, Board.create(1)[1], lambda number, pid: "")

    actuator = actuator_of(node, Standbys(0, ""), welcomed)
    actuator.carry_out(process_orders.SpawnRank(0, 2))
    before = (slot.pid, list(welcomed.pids))
    code = slot.bury()
    actuator.look()

    assert before == (lost, [])
    assert code == -9
    assert welcomed.pids == [slot.pid] != [lost]
    kill_session(slot.pid)
    assert slot.bury() is not None
    slot.handler.channel.close()


def test_a_process_that_cannot_be_started_is_an_event_and_does_not_end_the_agent(
    started: Callable[..., RankHandler], tmp_path: Path
) -> None:
    slot = Process(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
    slot.assign(started("-c", "kill -9 $$", entry="/bin/sh", is_python=False))
    slot.leave(slot.bury(), Board.create(1)[1], lambda number, pid: "")
    slot.handler.start["entrypoint"] = str(tmp_path / "nothing")
    events, welcomed = list[Event](), Welcomed()
    node = node_of(tmp_path, slot, advance=events.append)

    actuator_of(node, Standbys(0, ""), welcomed).carry_out(process_orders.SpawnRank(0, 2))

    (event,) = events
    assert isinstance(event, SpawnFailed)
    assert "No such file or directory" in event.reason
    assert welcomed.pids == []
    assert not slot.is_spawn_due


def test_nobody_waits_for_a_rank_that_leaves_and_whose_stack_is_looked_at_meanwhile(
    started: Callable[..., RankHandler], tmp_path: Path
) -> None:
    slot = Process(0, 0, handler=None, record_fd=-1)  # type: ignore[arg-type]
    slot.assign(started("-c", "exec sleep 600", entry="/bin/sh", is_python=False))
    node, dies = node_of(tmp_path, slot), Welcomed()
    node.board_fd, node._board = Board.create(1)
    node.board.set(0, Field.RECORDED, 7)
    afterwards = list[Callable[[str], None]]()
    node.in_background = lambda work, then, failed=None: afterwards.append(then)  # type: ignore[method-assign,assignment,misc]
    actuator = part(NodeAgent, node, watch=dies)

    actuator.carry_out(process_orders.KillRank(0, "it leaves", is_late=True))
    node.board.announce(0, Field.RECORDED, FINISHED)  # the others are to train without it
    afterwards[0]("its stack")

    assert node.board.get(0, Field.RECORDED) == FINISHED
    assert slot.bury() == -signal.SIGKILL


def test_a_standby_that_is_on_its_way_is_waited_for_and_stays_for_the_next_fault(
    started: Callable[..., RankHandler], tmp_path: Path
) -> None:
    standbys, watched = Standbys(1, str(tmp_path)), list[Standby]()
    standbys.refill(watched.append, {})
    slots = [Process(rank, rank, handler=None, record_fd=-1) for rank in range(2)]  # type: ignore[arg-type]
    for slot in slots:
        slot.assign(started("-c", "kill -9 $$", entry="/bin/sh", is_python=False))
        slot.leave(slot.bury(), Board.create(2)[1], lambda number, pid: "")
    node, welcomed = node_of(tmp_path, *slots), Welcomed()
    actuator = actuator_of(node, standbys, welcomed)

    for rank in range(2):
        actuator.carry_out(process_orders.SpawnRank(rank, 2))
    before = list(welcomed.pids)
    wait_until_ready(watched[0])
    actuator.look()

    assert before == []
    assert welcomed.pids == [slot.pid for slot in slots]
    assert all(isinstance(slot.handler, StandbyHandler) for slot in slots)
    assert watched[0].process.poll() is None
    assert standbys.ready == 1
    for slot in slots:
        kill_session(slot.pid)
        assert slot.bury() == -signal.SIGKILL
        slot.handler.channel.close()
    standbys.end()


NOT_IN_TIME_S = 100 * LIMIT_S  # a wait of the loop for this would be seen: it does not come around


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    made = Freezer()
    yield made
    made.remove()


@pytest.fixture
def two_ranks(
    supervisor: Supervisor,  # noqa: F811
    freezer: Freezer,
    started: Callable[..., RankHandler],
) -> Iterator[Supervisor]:
    """Neither does anything, and rank 0 is frozen."""
    begin(supervisor, [started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)])
    freezer.freeze(supervisor.node.here[0].pid)
    (first, _), node = [slot.handler for slot in supervisor.node.here], supervisor.node
    yield supervisor
    freezer.thaw()
    supervisor.stop(0)
    if (replacement := node.here[0].handler) is not first:
        replacement.proc.wait()
        replacement.close(signal.SIGKILL)
        replacement.channel.close()


def hang(supervisor: Supervisor) -> None:  # noqa: F811
    """The machine hears that rank 0 hangs, and orders its end and a replacement."""
    node = supervisor.node
    event = recovery.RankHung(
        at_s=time.monotonic(), rank=0, pid=node.here[0].pid, boundary=0, detected_after_s=1.0, reason="it is frozen"
    )
    node.call(lambda: node.advance(event))


def test_while_a_rank_does_not_die_the_loop_goes_round_and_another_rank_s_end_is_answered(
    two_ranks: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_watch, "DEATH_LIMIT_S", NOT_IN_TIME_S)
    frozen, other = two_ranks.node.here

    hang(two_ranks)
    goes_round = comes_around(two_ranks)
    os.kill(other.pid, signal.SIGKILL)
    verdict = verdict_of(two_ranks)

    assert (goes_round, verdict) == (True, "fail")  # no restart is left
    assert frozen.handler.proc.poll() is None


def test_a_replacement_does_not_wait_for_ever_for_a_process_that_does_not_die(
    two_ranks: Supervisor, freezer: Freezer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_watch, "DEATH_LIMIT_S", 1.0)
    slot = two_ranks.node.here[0]
    lost = slot.handler.proc

    hang(two_ranks)
    give_up_at_s = time.monotonic() + LIMIT_S
    while slot.pid == lost.pid and time.monotonic() < give_up_at_s and comes_around(two_ranks):
        time.sleep(0.01)

    assert slot.pid != lost.pid
    assert Path(f"/proc/{lost.pid}").exists()
    freezer.thaw()
    assert wait_for_end(lost.pid)


def test_while_the_stack_of_a_rank_is_read_the_loop_goes_round(
    two_ranks: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late rank is asked for its stack before it is killed; this one never answers."""
    monkeypatch.setattr(stack_dumps, "_BOARD_LIMIT_S", NOT_IN_TIME_S)
    order = process_orders.KillRank(0, "it is late", is_late=True)

    two_ranks.node.call(lambda: two_ranks.group.agent.carry_out(order))

    assert comes_around(two_ranks)
