"""A scheduler is notified in MindIO's words, and what it asks for becomes an event of the state machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.config import Config
from ttprun.mindio.schedulers import Scheduler
from ttprun.protocol import mindio
from ttprun.protocol.board import Board, Field
from ttprun.protocol.mindio import SchedulerAsked
from ttprun.protocol.rank_events import Event, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.recovery import Incident, JobPhase

KILLED = Reason(text="rank 1 was killed (SIGKILL)")
OPENED = Incident(
    id=1, kind="signal 9", ranks=(1,), rung="replace", outcome="open", reason=KILLED, phase=JobPhase.FREEZING,
    generation=1, opened_at_s=0.0,
)  # fmt: skip


def recover(scheduler: Scheduler, incident: Incident, *phases: JobPhase) -> None:
    """An incident comes by these phases to its end."""
    for phase in (JobPhase.FREEZING, *phases):
        scheduler.note_incident(replace(incident, phase=phase))
    scheduler.note_incident(replace(incident, phase=JobPhase.RUNNING, outcome="recovered"))


class FakeSlot:
    """A place of a rank that notes what the rank is sent."""

    def __init__(self, rank: int) -> None:
        self.rank = self.local_rank = rank
        self.pid = 100 + rank
        self.is_present = True
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class FakeNode:
    """Two ranks that train at step 4, and nobody else."""

    def __init__(self) -> None:
        self.slots = [FakeSlot(0), FakeSlot(1)]
        self.job = recovery.new_job(recovery.Settings(world_size=2, are_replicas_declared=True))
        self.why_not_repairable = ""
        self.config = Config(pause_timeout_s=1e-9, freeze_timeout_s=1e-9)
        self.logged: list[tuple[str, dict[str, object]]] = []
        self.board = Board.create(2)[1]
        for rank in range(2):
            self.board.set(rank, Field.APPLIED, 4)
        self.events: list[Event] = []

    def advance(self, event: Event) -> None:
        self.events.append(event)

    def log(self, event: str, **fields: object) -> None:
        self.logged.append((event, fields))


@pytest.fixture
def node() -> FakeNode:
    """Its ranks have no scheduler yet."""
    return FakeNode()


@pytest.fixture
def scheduler(node: FakeNode) -> Scheduler:
    """It lives in rank 0."""
    found = Scheduler(node, lambda ranks: node.why_not_repairable)  # type: ignore[arg-type]
    found.register(node.slots[0])  # type: ignore[arg-type]
    return found


def test_a_replaced_rank_is_reported_from_the_fault_to_the_result(node: FakeNode, scheduler: Scheduler) -> None:
    recover(scheduler, OPENED, JobPhase.REPLAYING, JobPhase.RESUMING)

    assert [(sent.action, sent.arguments) for sent in node.slots[0].sent] == [
        ("report_fault_ranks", [{1: 1}, {1: ""}]),
        ("report_stop_complete", [0, "stopped", {1: 1}]),
        ("report_strategies", [{1: 1}, ["recover", "dump", "exit"]]),
        ("report_result", [0, "rank 1 was killed (SIGKILL)", {1: 1}, "recover"]),
    ]


def test_failed_memory_is_a_fault_of_kind_zero_that_is_retried(node: FakeNode, scheduler: Scheduler) -> None:
    memory = replace(OPENED, kind="memory-persistent", rung="rerun")
    scheduler.note_incident(memory)
    scheduler.note_incident(replace(memory, phase=JobPhase.FAILED, outcome="failed"))

    assert node.slots[0].sent[0].arguments[0] == {1: 0}
    assert node.slots[0].sent[-1].arguments[0] == 405
    assert node.slots[0].sent[-1].arguments[3] == "retry"


def test_without_a_scheduler_nobody_is_notified(node: FakeNode) -> None:
    Scheduler(node, lambda ranks: "").note_incident(OPENED)  # type: ignore[arg-type]

    assert node.slots[0].sent == []


def test_a_rank_that_the_scheduler_calls_faulty_is_replaced(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("stop", {1: 1}))

    (event,) = node.events
    assert isinstance(event, recovery.RankHung)
    assert (event.rank, event.pid) == (1, 101)


def test_a_rank_whose_memory_the_scheduler_calls_faulty_repairs_it_in_its_process(
    node: FakeNode, scheduler: Scheduler
) -> None:
    scheduler.notified(SchedulerAsked("stop", {1: 0}))

    assert node.events == []
    assert node.slots[1].sent == [mindio.FailMemory(0)]


def test_a_fault_that_is_known_already_is_no_news(node: FakeNode, scheduler: Scheduler) -> None:
    node.job = node.job.with_member(1, life=recovery.RankState.LOST)

    scheduler.notified(SchedulerAsked("stop", {1: 1}))

    assert node.events == []


@pytest.mark.parametrize("what", ["dump", "exit"])
def test_the_scheduler_can_end_the_job(node: FakeNode, scheduler: Scheduler, what: str) -> None:
    scheduler.notified(SchedulerAsked(what))

    assert [type(event) for event in node.events] == [StopAsked]


def all_wait(node: FakeNode, scheduler: Scheduler, number: int) -> None:
    """Each rank says that it waits."""
    for slot in node.slots:
        scheduler.pause.take(slot, number)  # type: ignore[arg-type]


def test_a_pause_is_asked_for_on_the_board_and_ends_when_it_is_reported(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("pause", timeout_s=None))
    asked = node.board.get(0, Field.PAUSE_ASKED)
    was_paused_at_once = scheduler.is_paused
    all_wait(node, scheduler, asked)
    was_paused = scheduler.is_paused
    scheduler.notified(SchedulerAsked("continue"))

    assert (asked, was_paused_at_once, was_paused) == (1, False, True)
    assert not scheduler.is_paused
    assert node.board.get(0, Field.PAUSE_ASKED) == 0


@pytest.mark.parametrize(("timeout_s", "why"), [(0.0, "as the scheduler has asked"), (None, "pause_timeout_s")])
def test_a_pause_ends_by_itself_when_its_time_is_over_and_the_reason_is_reported(
    node: FakeNode, scheduler: Scheduler, timeout_s: float | None, why: str
) -> None:
    scheduler.notified(SchedulerAsked("pause", timeout_s=timeout_s))
    all_wait(node, scheduler, number=1)
    scheduler.pause.look()

    assert node.board.get(0, Field.PAUSE_ASKED) == 0
    assert not scheduler.is_paused
    event, fields = node.logged[-1]
    assert event == "pause_ended"
    assert why in str(fields["reason"])


def test_healthy_ranks_are_replaced_once_all_have_finished_the_step(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("hot switch", {1: 1}))
    all_wait(node, scheduler, number=9)  # what is said of another pause counts for nothing
    before = list(node.events)
    all_wait(node, scheduler, number=1)

    (event,) = node.events
    assert before == []
    assert isinstance(event, recovery.ReplacementAsked)
    assert (event.ranks, scheduler.switched) == ((1,), (1,))


def test_a_switch_that_is_taken_back_lets_all_go_on(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("hot switch", {1: 1}))
    scheduler.notified(SchedulerAsked("stop switch"))
    all_wait(node, scheduler, number=1)

    assert node.events == []
    assert node.board.get(0, Field.PAUSE_ASKED) == 0
    assert [sent.arguments[0] for sent in node.slots[0].sent] == [404]


def test_a_switch_is_refused_when_a_rank_does_not_come_behind_its_step(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("hot switch", {1: 1}))
    scheduler.pause.take(node.slots[0], 1)  # type: ignore[arg-type]
    scheduler.pause.look()

    ((code, reason, _, _),) = [sent.arguments for sent in node.slots[0].sent]
    assert (code, node.board.get(0, Field.PAUSE_ASKED)) == (404, 0)
    assert "freeze_timeout_s" in reason


def test_a_switch_that_has_begun_is_not_ended_by_the_limit_for_coming_together(
    node: FakeNode, scheduler: Scheduler
) -> None:
    scheduler.notified(SchedulerAsked("hot switch", {1: 1}))
    all_wait(node, scheduler, number=1)
    scheduler.pause.look()

    assert scheduler.switched == (1,)
    assert node.board.get(0, Field.PAUSE_ASKED) == 1


def test_a_switch_is_dropped_for_a_fault_that_comes_first(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("hot switch", {1: 1}))
    scheduler.note_incident(OPENED)

    assert node.board.get(0, Field.PAUSE_ASKED) == 0
    assert node.slots[0].sent[0].arguments[:2] == [404, f"a fault came first: {OPENED.reason}"]


@pytest.mark.parametrize("why_not", ["phase", "state"])
def test_a_switch_that_cannot_be_is_refused_with_its_reason_and_nobody_waits(
    node: FakeNode, scheduler: Scheduler, why_not: str
) -> None:
    if why_not == "phase":
        node.job = replace(node.job, phase=JobPhase.FREEZING)
    else:
        node.why_not_repairable = "no other rank holds the state of rank 1"

    scheduler.notified(SchedulerAsked("hot switch", {1: 1}))

    ((code, reason, _, strategy),) = [sent.arguments for sent in node.slots[0].sent]
    assert (code, strategy) == (404, "migration")
    assert reason in ("the job is FREEZING", "no other rank holds the state of rank 1")
    assert node.board.get(0, Field.PAUSE_ASKED) == 0


def test_a_hot_switch_is_reported_as_a_migration(node: FakeNode, scheduler: Scheduler) -> None:
    recover(scheduler, replace(OPENED, kind="planned"), JobPhase.REPLAYING)

    assert [(sent.action, sent.arguments[-1]) for sent in node.slots[0].sent] == [
        ("report_strategies", ["migration", "exit"]),
        ("report_result", "migration"),
    ]


def leave(node: FakeNode, rank: int) -> None:
    """The others train on without a rank."""
    node.job = node.job.with_member(rank, life=recovery.RankState.AWAY)


def test_ranks_that_are_away_are_called_back_with_what_the_scheduler_gives(
    node: FakeNode, scheduler: Scheduler
) -> None:
    leave(node, 1)
    scheduler.notified(SchedulerAsked("upgrade", params='{"scale-out-strategy": "DP", "x": 1}'))

    (event,) = node.events
    assert isinstance(event, recovery.UpgradeAsked)
    assert scheduler.params("upgrade") == '{"scale-out-strategy": "DP", "x": 1}'
    assert scheduler.params("downgrade") == '{"scale-in-strategy": "DP"}'


def test_an_upgrade_of_a_whole_group_is_refused_with_its_reason(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("upgrade", params=""))

    assert node.events == []
    assert node.logged[-1][0] == "upgrade_refused"
    assert [sent.arguments for sent in node.slots[0].sent] == [[404, "no rank is away", {}, "upgrade"]]


def test_a_downgrade_is_offered_while_a_replacement_is_waited_for(node: FakeNode, scheduler: Scheduler) -> None:
    for rank in range(2):
        node.job, _ = recovery.advance(node.job, recovery.ElasticDeclared(rank=rank, at_s=0.0))
    node.job = node.job.with_member(1, life=recovery.RankState.LOST)
    scheduler.note_incident(OPENED)
    scheduler.note_incident(replace(OPENED, phase=JobPhase.REPLAYING))

    assert node.slots[0].sent[-1].arguments == [{1: 1}, ["recover", "downgrade", "dump", "exit"]]


def test_nobody_is_called_back_to_a_training_that_is_over(node: FakeNode, scheduler: Scheduler) -> None:
    leave(node, 1)
    node.board.set(0, Field.LEAVING, 1)

    assert scheduler.call_back("ttprun recall") == "a rank has reached the end of its train function"
    assert node.events == []


def test_a_downgrade_is_left_to_the_state_machine(node: FakeNode, scheduler: Scheduler) -> None:
    scheduler.notified(SchedulerAsked("downgrade", params=""))

    assert [type(event) for event in node.events] == [recovery.DowngradeAsked]
    assert scheduler.params("downgrade") == '{"scale-in-strategy": "DP"}'


@pytest.mark.parametrize("what", ["pause", "hot switch"])
def test_while_ranks_are_away_nobody_is_paused(node: FakeNode, scheduler: Scheduler, what: str) -> None:
    leave(node, 1)
    scheduler.notified(SchedulerAsked(what, {0: 1}, timeout_s=None))

    assert node.board.get(0, Field.PAUSE_ASKED) == 0
    assert node.events == []


def test_a_downgrade_is_reported_with_the_ranks_that_leave(node: FakeNode, scheduler: Scheduler) -> None:
    leave(node, 1)
    recover(scheduler, replace(OPENED, rung="resize"), JobPhase.RESUMING)

    assert [(sent.action, sent.arguments[0], sent.arguments[-1]) for sent in node.slots[0].sent] == [
        ("report_fault_ranks", {1: 1}, {1: ""}),
        ("report_result", 201, "downgrade"),
        ("report_result", 0, "downgrade"),
    ]


@pytest.mark.parametrize(("is_back", "code"), [(True, 0), (False, 406)])
def test_an_upgrade_has_failed_if_ranks_are_still_away(
    node: FakeNode, scheduler: Scheduler, is_back: bool, code: int
) -> None:
    upgrade = replace(OPENED, kind="upgrade", rung="resize")
    scheduler.note_incident(upgrade)
    if not is_back:
        leave(node, 1)
    scheduler.note_incident(replace(upgrade, phase=JobPhase.RUNNING, outcome="recovered"))

    assert node.slots[0].sent[-1].arguments[0] == code
