"""The supervisor's thread: what it does when something goes wrong in it, and between two groups of ranks."""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerState

from tests.agent.starting import LIMIT_S, wait_for_end
from ttprun import recovery
from ttprun.agent.base import stack_dumps
from ttprun.agent.base.ground import FirstFailure, Verdict
from ttprun.agent.base.peers import Peers
from ttprun.agent.base.stored_states import Stored
from ttprun.agent.launcher.elastic_agent import ReplacingAgent
from ttprun.agent.launcher.group import Group, NewGroup
from ttprun.agent.launcher.supervisor import Supervisor
from ttprun.agent.lead.membership import Elasticity
from ttprun.agent.lead.resume import Resumption
from ttprun.agent.node import node as process
from ttprun.agent.node.rank_processes import RankHandler
from ttprun.config import Config
from ttprun.observe.events import read_events
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.rank_events import Event
from ttprun.state.store import CheckpointStore


@pytest.fixture
def make(tmp_path: Path, started: Callable[..., RankHandler]) -> Iterator[Callable[..., Supervisor]]:
    """`make()`: a supervisor of two ranks, none of which has been started; its thread runs.

    It ends before the processes of `started` do: it would replace them.
    """
    made: list[Supervisor] = []

    def make_supervisor(resume_from: Any = None, standbys: int = 0) -> Supervisor:
        run = RunDirectory.create("run", tmp_path / "run")
        store = CheckpointStore(tmp_path / "checkpoints", 3)
        config = Config(standbys=standbys)
        resumption = resume_from or Resumption(config, store, 2, ["train.py"], is_place_named=True)
        made.append(Supervisor(config, run, 2, True, 0, store, resumption, Elasticity()))
        made[-1].start()
        return made[-1]

    yield make_supervisor
    for supervisor in made:
        supervisor.stop(0)
        supervisor.node.run.release()


class OneCheckpoint:
    """A save directory with one checkpoint."""

    is_named = is_of_leader = False
    is_found_by_same_command = True

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self.noted: list[str] = []

    def find(self) -> tuple[recovery.Saved, ...]:
        return (recovery.Saved(self._stored.boundary, self._stored.place),)

    def opened(self, place: str, is_new: bool = False) -> Stored:
        return self._stored

    def note_unusable(self, place: str, reason: str, is_refused: bool) -> None:
        self.noted.append(reason)


@pytest.fixture
def supervisor(make: Callable[..., Supervisor]) -> Supervisor:
    return make()


def begin_group(supervisor: Supervisor, *ranks: int) -> None:
    supervisor.begin_group(NewGroup([(rank, local) for local, rank in enumerate(ranks)], lambda *_: None))


def begin(supervisor: Supervisor, handlers: list[RankHandler], is_restart: bool = False) -> None:
    """Ranks 0, 1, ... sit there, and are welcomed."""
    begin_group(supervisor, *range(len(handlers)))
    sit(supervisor, handlers, is_restart)


def sit(supervisor: Supervisor, handlers: list[RankHandler], is_restart: bool = False) -> None:
    for local_rank, handler in enumerate(handlers):
        supervisor.assign(local_rank, handler)
    supervisor.group_started(is_restart)


def break_down(supervisor: Supervisor) -> None:
    def fail() -> None:
        raise RuntimeError("a bug of ours")

    for _ in range(2):  # after the first time it begins anew
        supervisor.node.call(fail)
        assert comes_around(supervisor)
    assert supervisor.node.is_broken


def comes_around(supervisor: Supervisor) -> bool:
    """Whether the thread has come to its selector again, and to all that is ready there."""
    done, visits = threading.Event(), iter(range(2))
    ready, end = os.pipe()
    os.write(end, b"x")

    def visit() -> None:
        if next(visits, None) is None:
            supervisor.node.selector.unregister(ready)
            done.set()

    def listen() -> None:
        supervisor.node.selector.register(ready, selectors.EVENT_READ, visit)

    supervisor.node.call(listen)
    is_seen = done.wait(LIMIT_S)
    os.close(ready)
    os.close(end)
    return is_seen


def verdict_of(supervisor: Supervisor) -> str | None:
    """Once there is one; None if there is none before long."""
    give_up_at_s = time.monotonic() + LIMIT_S
    while supervisor.node.verdict is None and time.monotonic() < give_up_at_s and comes_around(supervisor):
        pass
    return None if supervisor.node.verdict is None else supervisor.node.verdict.kind


def test_ranks_are_welcomed_even_if_the_supervisor_breaks_as_it_welcomes_them(
    supervisor: Supervisor, started: Callable[..., RankHandler]
) -> None:
    handlers = [started("-c", "") for _ in range(2)]
    begin_group(supervisor, 0, 1)
    healthy = supervisor.node.advance

    def break_once(event: Event) -> None:
        supervisor.node.advance = healthy
        raise RuntimeError("broken on purpose")

    supervisor.node.advance = break_once
    sit(supervisor, handlers)

    assert [handler.proc.wait(LIMIT_S) for handler in handlers] == [0, 0]
    assert verdict_of(supervisor) == "done"


def test_a_standby_that_cannot_be_started_is_reported_and_done_without(
    make: Callable[..., Supervisor], started: Callable[..., RankHandler], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make(standbys=1)
    handlers = [started("-c", "import torch") for _ in range(2)]
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    begin(supervisor, handlers)
    supervisor.node.call(supervisor.run.standby_watch.start)
    assert verdict_of(supervisor) == "done"

    events = {event["event"]: event for event in read_events(supervisor.node.run.events)}
    assert "/nowhere/python" in str(events["standby_failed"]["reason"])
    assert "supervisor_failed" not in events


def test_ranks_that_cannot_be_ordered_where_to_resume_are_ended_and_the_job_does_not_begin_anew_by_itself(
    make: Callable[..., Supervisor], started: Callable[..., RankHandler]
) -> None:
    def read(rank: int) -> dict[str, Any]:
        raise RuntimeError("a bug of ours")

    supervisor = make(OneCheckpoint(Stored(5, "step-00000005", (), [], (), read)))

    begin(supervisor, [started("-c", "") for _ in range(2)])

    assert verdict_of(supervisor) == "fail"
    assert supervisor.node.verdict is not None
    assert "a bug of ours" in supervisor.node.verdict.reason


def test_a_supervisor_that_has_broken_outlives_a_restart_and_still_reports_how_its_ranks_end(
    supervisor: Supervisor, started: Callable[..., RankHandler]
) -> None:
    begin(supervisor, [started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)])
    break_down(supervisor)

    begin_group(supervisor, 0, 1)
    is_alive, before = comes_around(supervisor), supervisor.node.verdict
    ends = ("exit 3", "exec sleep 600")
    sit(supervisor, [started("-c", end, entry="/bin/sh", is_python=False) for end in ends], is_restart=True)

    assert (is_alive, before) == (True, None)
    assert verdict_of(supervisor) == "restart"


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_signal_between_two_groups_ends_the_job_at_once(
    supervisor: Supervisor, started: Callable[..., RankHandler], is_broken: bool
) -> None:
    begin(supervisor, [started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)])
    if is_broken:
        break_down(supervisor)
    supervisor.pause()
    begin_group(supervisor, 0, 1)

    ending = threading.Thread(target=supervisor.end, args=(signal.SIGTERM, 1.0, lambda: 60.0), daemon=True)
    ending.start()
    ending.join(LIMIT_S)

    assert not ending.is_alive()


def test_a_job_has_finished_when_the_scripts_of_all_ranks_have_ended_though_their_processes_live(
    supervisor: Supervisor,
) -> None:
    node = supervisor.node
    before = node.has_finished
    begin_group(supervisor, 0, 1)
    node.board.set(0, Field.ENDED, 1)
    with_one = node.has_finished

    node.board.set(1, Field.RECORDED, FINISHED)

    assert (before, with_one, node.has_finished) == (False, False, True)


def test_what_has_become_ready_under_a_number_that_is_given_anew_is_not_taken_for_the_new_owner(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """Both pipes are ready in one look; whoever comes first closes the other one, whose number goes to a third."""
    called: list[str] = []
    pipes = {name: os.pipe() for name in ("a", "b")}
    for _, end in pipes.values():
        os.write(end, b"x")

    def answer(name: str, other: str) -> None:
        called.append(name)
        number = pipes[other][0]
        for name_of in (name, other):
            supervisor.node.selector.unregister(pipes[name_of][0])
        third, third_end = os.pipe()
        pipes["third"] = (os.dup2(third, number), third_end)
        os.close(third)
        supervisor.node.selector.register(number, selectors.EVENT_READ, lambda: called.append("third"))

    def listen() -> None:
        for name, other in (("a", "b"), ("b", "a")):
            supervisor.node.selector.register(
                pipes[name][0], selectors.EVENT_READ, lambda n=name, o=other: answer(n, o)
            )

    supervisor.node.call(listen)

    assert comes_around(supervisor)
    assert called in (["a"], ["b"])
    assert caplog.records == []


def test_what_a_finished_rank_has_started_ends_with_it_and_who_has_got_its_number_since_is_left_alone(
    supervisor: Supervisor, started: Callable[..., RankHandler], tmp_path: Path
) -> None:
    child = tmp_path / "child"
    leave_a_child = f"sleep 600 & echo $! > {child}"
    stays, finishes, other = (
        started("-c", script, entry="/bin/sh", is_python=False)
        for script in ("exec sleep 600", leave_a_child, "exec sleep 600")
    )
    begin(supervisor, [stays, finishes])
    assert finishes.proc.wait(LIMIT_S) == 0

    has_ended = wait_for_end(int(child.read_text()))
    assert comes_around(supervisor)
    supervisor.node.here[1].pid = other.proc.pid
    supervisor.end_ranks_at_once()
    supervisor.stop(0)

    assert has_ended
    assert stays.proc.wait(LIMIT_S) == -signal.SIGKILL
    assert other.proc.poll() is None


def test_the_supervisor_never_looks_at_a_group_that_is_only_half_begun(
    make: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = make()
    has_looked, is_past, look = threading.Event(), threading.Event(), Group.look

    def note_look(group: Group) -> None:
        try:
            look(group)
        finally:
            has_looked.set()

    def create_after_a_look() -> int:
        supervisor.node.wake()
        has_looked.wait(0.5)
        return stack_dumps.create()

    monkeypatch.setattr(Group, "look", note_look)
    monkeypatch.setattr(process, "stack_dumps", SimpleNamespace(create=create_after_a_look))

    begin_group(supervisor, 0, 1)
    supervisor.node.call(is_past.set)

    assert is_past.wait(LIMIT_S)
    assert not supervisor.node.is_broken


def test_a_supervisor_that_has_failed_begins_anew_and_goes_on_with_the_calls_behind_what_broke_it(
    supervisor: Supervisor, started: Callable[..., RankHandler], caplog: pytest.LogCaptureFixture
) -> None:
    begin(supervisor, [started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)])
    behind = threading.Event()

    def fail() -> None:
        supervisor.node.call(behind.set)
        raise RuntimeError("a bug of ours")

    supervisor.node.call(fail)

    assert behind.wait(LIMIT_S)
    assert not supervisor.node.is_broken
    assert [record.message for record in caplog.records] == [
        "ttprun's supervisor failed; a new one continues from the events recorded so far"
    ]


def test_an_exit_that_was_not_decided_as_the_supervisor_failed_is_decided_by_the_new_one(
    supervisor: Supervisor, started: Callable[..., RankHandler]
) -> None:
    begin(supervisor, [started("-c", f"exit {code}", entry="/bin/sh", is_python=False) for code in (3, 0)])
    node, lost = supervisor.node, []
    report = node.report_what_is_left

    def break_once(rank: int) -> None:
        if not lost:
            lost.append(rank)
            raise RuntimeError("broken on purpose")
        report(rank)

    node.report_what_is_left = break_once  # type: ignore[method-assign]

    assert verdict_of(supervisor) is not None
    assert supervisor.node.job.members[0].pid is None
    assert not supervisor.node.is_broken


def test_of_the_parts_of_older_groups_nothing_is_left_when_ranks_are_started_again_and_again(
    make: Callable[..., Supervisor],
) -> None:
    supervisor, groups = make(), list[list[weakref.ref[Any]]]()
    node, outlive = supervisor.node, [supervisor.node, supervisor.run, *vars(supervisor.run).values()]

    for _ in range(20):
        begin_group(supervisor, 0, 1)
        supervisor.pause()
        node.is_paused = False
        parts = [part for part in vars(supervisor.group).values() if hasattr(part, "__dict__")]
        of_group = [part for part in parts if not any(part is other for other in outlive)]
        groups.append([weakref.ref(part) for part in (supervisor.group, *of_group, *node.here, *node.slots)])
    del parts, of_group

    gc.collect()
    assert len(groups[-1]) > 15
    assert [part() for older in groups[:-1] for part in older if part() is not None] == []


def test_the_agent_of_a_node_keeps_as_much_memory_open_in_a_job_of_many_nodes_as_in_one_of_few(
    make: Callable[..., Supervisor],
) -> None:
    supervisor, opened = make(), []

    def begin(nodes: int) -> int:
        names = {number: f"10.0.0.{number}" for number in range(nodes)}
        supervisor.node.job = recovery.with_size(supervisor.node.job, nodes)
        supervisor._begin_group(NewGroup([(0, 0)], lambda *_: None), Peers(0, "10.0.0.0", 1, {}, names, nodes))
        files = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
        return sum(os.path.lexists(path) and os.readlink(path).startswith("/memfd:ttprun") for path in files)

    for nodes in (2, 200, 2):
        opened.append(supervisor._on_thread(lambda nodes=nodes: begin(nodes)))

    assert max(opened) == opened[0], opened  # what other tests have left may be let go meanwhile


class FakeSupervisor:
    """The job is ended by somebody just before the group that is to be restarted is left alone."""

    def __init__(self) -> None:
        verdict, peers = Verdict("restart", "a rank is lost"), SimpleNamespace(has_lost=False)
        self.node = SimpleNamespace(verdict=verdict, first_failure=FirstFailure(), peers=peers)

    def pause(self) -> None:
        self.node.verdict = Verdict("fail", "ended by the scheduler", has_progress=False)


def test_a_job_that_is_ended_as_its_group_is_to_be_restarted_is_not_restarted() -> None:
    agent: Any = object.__new__(ReplacingAgent)
    agent.supervisor, agent._remaining_restarts = FakeSupervisor(), 3
    agent._pcontext = SimpleNamespace(error_files={0: ""})
    group: Any = SimpleNamespace(workers=[SimpleNamespace(global_rank=0, local_rank=0)])

    result = agent._monitor_workers(group)

    assert (result.state, agent._remaining_restarts) == (WorkerState.FAILED, 0)
