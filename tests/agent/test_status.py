"""What the agent publishes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.base.peers import Peers
from ttprun.agent.between.agent import Agent
from ttprun.agent.launcher.status_publisher import LEAST_LOOKS, MOST_LOOKS, BusyShares, StatusPublisher, protection_of
from ttprun.agent.lead.incidents import Incidents
from ttprun.agent.node.standbys import Standbys
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RankStatus, RunStatus, read_status
from ttprun.protocol import node_messages
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.recovery.members import RankState
from ttprun.recovery.phases import open_incident
from ttprun.recovery.replicas import Replicas

PARTS: tuple[Any, ...] = (
    Standbys(0, ""),
    SimpleNamespace(status=None),
)
NOW = "2026-01-31T12:00:00.000+00:00"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    run = RunDirectory.create("r1", tmp_path / "run")
    yield run
    run.release()


def publishing(run: RunDirectory) -> tuple[StatusPublisher, recovery.Incident, Incidents]:
    """A run of one rank that is lost: its publisher, and its incident, which is not in its list yet."""
    job = open_incident(recovery.new_job(recovery.Settings(world_size=1)), 10.0, "signal 9", "rank 0 was ended", 0.0)
    node = Agent(Config(), run, True, job)
    incidents = Incidents(node)
    assert job.incident is not None
    return StatusPublisher(node, incidents, *PARTS), job.incident, incidents


def test_an_incident_that_goes_on_is_open_in_the_status_as_in_the_event_log(run: RunDirectory) -> None:
    publisher, incident, incidents = publishing(run)

    incidents.note(incident)
    publisher.publish()

    (published,) = read_status(run.status).incidents
    assert (incident.outcome, published.outcome) == ("open", "open")


@pytest.mark.parametrize(
    ("applied", "is_done", "outcomes"),
    [(8, False, ["open", "failed"]), (8, True, ["open", "recovered"]), (9, False, ["recovered", "recovered"])],
)
def test_an_incident_is_recovered_when_a_step_has_been_completed_after_it_or_all_is_done(
    run: RunDirectory, applied: int, is_done: bool, outcomes: list[str]
) -> None:
    publisher, incident, incidents = publishing(run)
    node = publisher._node
    node.begin_group([(0, 0)])

    incidents.note(replace(incident, outcome="recovered", phase="RUNNING", boundary=8, ranks=(0,), total_s=0.5))
    incidents.note_setup(0.25)
    node.board.set(0, Field.APPLIED, applied)
    incidents.look()
    shown = [incidents.published()[0].outcome]
    incidents.conclude(is_done)
    shown.append(incidents.published()[0].outcome)

    assert shown == outcomes
    published = incidents.published()[0]
    assert (published.total_s, published.setup_s, published.first_step_s is not None) == (0.5, 0.25, applied == 9)


def test_an_incident_has_one_list_of_what_is_not_proved(run: RunDirectory) -> None:
    publisher, incident, incidents = publishing(run)
    incidents.not_proved.take(0, (Reason(text="game (sim.Game): it can change, and does not show its state"),))

    incidents.note(replace(incident, ranks=(0,)))
    incidents.note_compared(0, ["1 batch"], ["1 loss is another one but for rounding"])
    publisher.publish()

    (published,) = read_status(run.status).incidents
    assert published.equal == ("rank 0: 1 batch",)
    assert published.not_proved == (
        "game (sim.Game): it can change, and does not show its state",
        "rank 0: 1 loss is another one but for rounding",
    )


def test_a_run_that_is_done_is_as_protected_as_it_was_before_its_ranks_finished(run: RunDirectory) -> None:
    sharded = Replicas(compared_at=1, shards={"w": (0, 1)}, mirrored=frozenset((0, 1)))
    job = replace(recovery.new_job(recovery.Settings(world_size=2)), replicas=sharded)
    node = Agent(Config(), run, True, job)
    node.begin_group([(0, 0), (1, 1)])
    for slot in node.slots:
        slot.is_protected = True
        node.board.set(slot.rank, Field.APPLIED, 1)
        node.board.set(slot.rank, Field.REHEARSED, 1)
    publisher = StatusPublisher(node, Incidents(node), *PARTS)
    publisher.publish()

    job = job.with_member(0, life=RankState.FINISHED).with_member(1, life=RankState.FINISHED)
    node.job = replace(job, replicas=replace(sharded, mirrored=frozenset()))
    publisher.publish()
    publisher.end(0, "")

    assert read_status(run.status).protection == "on"


def test_a_run_that_has_lost_its_protection_since_the_last_status_says_so_at_its_end(run: RunDirectory) -> None:
    job = recovery.new_job(recovery.Settings(world_size=2))
    node = Agent(Config(), run, True, job)
    node.begin_group([(0, 0), (1, 1)])
    publisher = StatusPublisher(node, Incidents(node), *PARTS)
    publisher.publish()

    node.job = replace(job, unprotected_reason=Reason(text="rank 0 reports: it has started the ranks itself"))
    publisher.end(0, "")

    assert read_status(run.status).protection.startswith("off: rank 0 reports")


def test_nothing_is_promised_before_the_ranks_have_been_started(run: RunDirectory) -> None:
    node = Agent(Config(), run, True, recovery.new_job(recovery.Settings(world_size=2)))

    StatusPublisher(node, Incidents(node), *PARTS).publish()

    assert read_status(run.status).protection == "not yet: no optimizer step so far"


def test_the_agent_of_any_node_shows_the_whole_job_with_its_own_ranks_as_they_are_now(run: RunDirectory) -> None:
    job = recovery.new_job(recovery.Settings(world_size=2))
    node = Agent(Config(), run, True, job)
    node.begin_group([(1, 0)], Peers(1, "10.0.0.2", 1, {}, {0: "10.0.0.1", 1: "10.0.0.2"}, 2))
    publisher = StatusPublisher(node, Incidents(node), *PARTS)
    ranks = (RankStatus(0, 0, 71, "running", 9, node=0), RankStatus(1, 0, 72, "running", 8, node=1))
    names = ("10.0.0.1", "10.0.0.2")
    of_leader = RunStatus("other", "healthy", 3, 2, 1, NOW, NOW, protection="on", ranks=ranks, nodes=names)

    publisher.take(node_messages.Published("status", of_leader.to_json()))
    publisher.publish()

    shown = read_status(run.status)
    assert (shown.generation, shown.protection, shown.nodes) == (3, "on", names)
    assert (shown.node, shown.is_leading) == (1, False)
    assert shown.ranks[0] == ranks[0]
    assert (shown.ranks[1].node, shown.ranks[1].pid) == (1, None)

    node.begin_group([(0, 0)], Peers(0, "10.0.0.2", 1, {}, {0: "10.0.0.2"}, 1))  # the others have left: it leads
    publisher.end(0, "")
    shown = read_status(run.status)
    assert (shown.generation, shown.is_leading, len(shown.ranks)) == (0, True, 1)


def test_protection_is_promised_once_what_the_ranks_have_recorded_was_read_back() -> None:
    job = recovery.new_job(recovery.Settings(world_size=2))

    assert protection_of(job, [], unchecked=[1]).kind == "being-checked"
    assert protection_of(job, []).text == "on"


def test_what_no_replay_could_restore_is_part_of_the_promise() -> None:
    job = recovery.new_job(recovery.Settings(world_size=2))

    found = protection_of(job, [], unrecorded=[Reason(text="main: lines cannot be recorded: it is a csv.reader")] * 2)

    assert found.text == (
        "on, but a rank that is lost before the first loss of its step is not replaced: main: lines cannot be "
        "recorded: it is a csv.reader (and 1 more)"
    )


def test_what_cannot_be_restored_is_said_once_on_the_console_and_is_named_with_each_incident(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, incident, incidents = publishing(run)

    for rank in (0, 1):
        lines = Reason(text="main: lines cannot be recorded: it is a csv.reader")
        incidents.not_proved.take(rank, (lines,), is_unrecorded=True)
    incidents.note(replace(incident, ranks=(0,)))
    publisher.publish()

    status = read_status(run.status)
    assert (
        status.not_proved == status.incidents[0].not_proved == ("main: lines cannot be recorded: it is a csv.reader",)
    )
    assert caplog.text.count("lines cannot be recorded") == 1
    assert "If a rank is lost before the first loss of its step, it is not replaced" in caplog.text


def test_the_rank_that_is_seen_at_work_most_often_has_the_highest_share_once_it_was_seen_often_enough() -> None:
    shares = BusyShares()

    for look in range(LEAST_LOOKS):
        assert shares.share(0) is None
        shares.note(0, Phase.COMPUTING)
        shares.note(1, Phase.COMPUTING if look % 2 else Phase.COMMITTING)
        shares.note(2, Phase.WAITING)

    assert [shares.share(rank) for rank in range(4)] == [1.0, 0.5, 0.0, None]


def test_a_rank_for_which_the_others_wait_is_named_to_whoever_moves_it(run: RunDirectory) -> None:
    node = Agent(Config(move_on=["straggler"]), run, True, recovery.new_job(recovery.Settings(world_size=2)))
    node.begin_group([(0, 0), (1, 1)])
    moved: list[int] = []
    shares: Any = SimpleNamespace(share=float)  # the second rank computes all the time

    StatusPublisher(node, Incidents(node), *PARTS, on_straggler=moved.append, _busy_shares=shares).publish()

    assert moved == [1]


def test_a_rank_that_becomes_slow_is_seen_though_it_was_quick_for_long() -> None:
    shares = BusyShares()

    for _ in range(100 * MOST_LOOKS):
        shares.note(0, Phase.WAITING)
    for _ in range(MOST_LOOKS):
        shares.note(0, Phase.COMPUTING)

    share = shares.share(0)
    assert share is not None
    assert share > 0.6
