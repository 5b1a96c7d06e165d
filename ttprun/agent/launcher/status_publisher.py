"""Publishes how the run stands: `status.json`, written when something has changed and every half second.

Which ranks the others wait for is shown by how often each is seen at work instead of waiting (`BusyShares`): in a job
whose ranks wait for each other all take the same time for a step; the slow one is the one that waits least. A rank that
computes while its collectives are under way, as DDP's do, counts as waiting: shares can be compared, and say nothing
alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ttprun.agent.between.agent import Agent
from ttprun.agent.lead.incidents import Incidents
from ttprun.agent.lead.rows import Row
from ttprun.agent.lead.writer import CheckpointWriter
from ttprun.agent.node.node import Process
from ttprun.agent.node.standbys import Standbys
from ttprun.errors import in_short
from ttprun.introspect.costs import PARTS
from ttprun.observe.events import History, timestamp
from ttprun.observe.run_directory import RunDirectory, replace_file
from ttprun.observe.status import (
    CostStatus,
    RankStatus,
    RunState,
    RunStatus,
    parse_status,
    read_status,
    state_at_end,
    stragglers_of,
    write_status,
)
from ttprun.protocol import node_messages
from ttprun.protocol.board import FINISHED, Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.recovery import Job, JobPhase, cost_of_a_loss, cost_of_a_loss_alone, is_elastic
from ttprun.recovery.job_events import name_ranks
from ttprun.recovery.state_origins import may_rewind

LEAST_LOOKS = 60  # before a share is worth a word: half a minute
MOST_LOOKS = 240  # what lies further back counts less and less
_WAITING = frozenset((Phase.COLLECTIVE, Phase.WAITING, Phase.COMMITTING, Phase.CONNECTING))


class BusyShares:
    """Counts what is seen at each look."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}
        self._shares: dict[int, float] = {}

    def note(self, rank: int, phase: Phase) -> None:
        """A rank was seen while all train."""
        looks = self._looks[rank] = min(MOST_LOOKS, self._looks.get(rank, 0) + 1)
        share = self._shares.get(rank, 0.0)
        self._shares[rank] = share + ((phase not in _WAITING) - share) / looks

    def share(self, rank: int) -> float | None:
        """From 0 to 1; None: too little was seen."""
        return round(self._shares[rank], 3) if self._looks.get(rank, 0) >= LEAST_LOOKS else None


logger = logging.getLogger("ttprun")
_EVERY_S = 0.5
_MOST_SHARE = 9.0  # times that writing it took, until it may be written again: nobody waits for it, and for us many do
_MOST_RANKS_FOR_ALL = 1024  # of larger jobs the status would be the most that crosses nodes
# What an agent knows of its own node better than the one that leads.
_OF_THIS_NODE = (
    "run_id",
    "agent_pid",
    "started_at",
    "updated_at",
    "standbys",
    "standby_state",
    "exit_code",
    "reason",
    "save_dir",
    "host",
    "node",
    "is_leading",
    "leader",
    "pages",
)
_STATES: dict[JobPhase, RunState] = {
    JobPhase.RUNNING: "healthy",
    JobPhase.PERSISTING: "healthy",
    JobPhase.RESTARTING: "restarting",
    JobPhase.DONE: "done",
    JobPhase.FAILED: "failed",
}


class OfGroup(NamedTuple):
    """What a status shows of the present group of ranks, beside what its node knows.

    restarts_left   how often torch may still restart them all
    waits_for       what they wait for, a sentence; "": nothing
    snapshot_step   of the newest snapshot
    quarantine      addresses that may not train yet
    """

    restarts_left: int = 0
    waits_for: str = ""
    snapshot_step: int | None = None
    quarantine: tuple[str, ...] = ()


@dataclass
class StatusPublisher:
    """Writes the status of a run.

    of_group   returns what it shows of the present group
    on_straggler   called with a rank as long as the others wait for it, if such ranks are to be moved
    step       optimizer steps that it had done at its end
    """

    _node: Agent
    _incidents: Incidents
    _standbys: Standbys
    _checkpoint_writer: CheckpointWriter
    of_group: Callable[[], OfGroup] = OfGroup
    on_straggler: Callable[[int], None] = lambda _: None
    _busy_shares: BusyShares = field(default_factory=BusyShares)
    _started_at: str = field(default_factory=timestamp)
    _written_s: float = 0.0
    _not_before_s: float = 0.0
    _seen: tuple[object, ...] = ()
    _of_all: RunStatus | None = None
    _protection_in_run: str = ""
    _has_announced: bool = False  # that the ranks are protected
    step: int = 0

    def __post_init__(self) -> None:
        self._history = History(self._node.run.history)

    def publish(self) -> None:
        """Write the status if something has changed, or if half a second has passed."""
        if time.monotonic() < self._not_before_s:
            return
        job, slots = self._node.job, self._slots
        seen = (job.phase, self._node.generation, self._incidents.changes, tuple(slot.pid for slot in slots))
        if seen == self._seen and time.monotonic() - self._written_s < _EVERY_S:
            return
        self._seen = seen
        self._written_s = time.monotonic()
        state = _STATES.get(job.phase, "recovering")
        if state == "healthy" and not any(slot.is_present for slot in slots):
            state = "starting"
        for slot in slots if state == "healthy" else ():
            row = self._node.board_row(slot.rank)
            if slot.is_present and 0 < row[Field.APPLIED] < FINISHED:
                self._busy_shares.note(slot.rank, Phase(row[Field.PHASE]))
        status = self._compose(state)
        if not job.finished:
            self._protection_in_run = status.protection
        if status.is_leading and not self._has_announced and status.protection.startswith("on"):
            self._has_announced = True
            limits = ", with limits: see 'ttprun status'"
            logger.warning("protected from step %d on%s", status.step, limits * (status.protection != "on"))
        if status.is_leading and "straggler" in self._node.config.move_on:
            for rank in stragglers_of(status)[0][:1]:  # one at a time
                self.on_straggler(rank)
        write_status(self._node.run.status, status)
        self._history.note(status.step)
        if status.is_leading and len(slots) <= _MOST_RANKS_FOR_ALL:
            self._node.peers.to_all(node_messages.Published("status", status.to_json()))
        now = time.monotonic()
        self._not_before_s = now + _MOST_SHARE * (now - self._written_s)

    @property
    def _slots(self) -> Sequence[Process | Row]:
        """The ranks of which this agent knows: all, or those of its node if another one leads."""
        return self._node.here if self._node.peers.is_follower else self._node.slots

    def take(self, published: node_messages.Published) -> None:
        """The leader has published something: `ttprun` shows the whole job here too."""
        with contextlib.suppress(OSError, ValueError):  # it comes again, or the disk is full, which the status says
            if published.name == "topology":
                replace_file(self._node.run.topology, published.text)
            else:
                self._of_all = parse_status(published.text)

    def end(self, exit_code: int, reason: str, is_stopped: bool = False) -> None:
        """Write the last status of the run.

        exit_code, is_stopped   as for `state_at_end`
        reason                  why it has not come to its end, a sentence
        """
        status = self._compose(state_at_end(exit_code, is_stopped), exit_code, reason)
        job = self._node.job
        is_unprotected = job.unprotected_reason or any(own.unprotected_reason for own in job.alone.values())
        if exit_code == 0 and self._protection_in_run and not is_unprotected:  # what ranks hold ends with them
            status = replace(status, protection=self._protection_in_run)
        write_status(self._node.run.status, status)
        self._history.note(status.step, is_last=True)
        self.step = status.step

    def _compose(self, state: RunState, exit_code: int | None = None, reason: str = "") -> RunStatus:
        own = self._compose_own(state, exit_code, reason)
        of_all = self._of_all
        if own.is_leading or of_all is None:
            return own
        here = {rank.rank: rank for rank in own.ranks}
        ranks = tuple(here.get(rank.rank, _ended(rank, exit_code)) for rank in of_all.ranks)
        return replace(
            of_all,
            **{name: getattr(own, name) for name in _OF_THIS_NODE},
            reason_kind=own.reason_kind or of_all.reason_kind,
            state=of_all.state if exit_code is None else own.state,
            ranks=ranks,
        )

    def _compose_own(self, state: RunState, exit_code: int | None, reason: str) -> RunStatus:
        node, job, of_group = self._node, self._node.job, self.of_group()
        peers = node.peers
        slots = self._slots
        protection, verdict = self._protection(), node.verdict
        return RunStatus(
            run_id=node.config.run_id or node.run.path.name,
            state=state,
            generation=node.generation,
            world_size=job.settings.world_size,
            agent_pid=os.getpid(),
            started_at=self._started_at,
            updated_at=timestamp(),
            restarts_left=of_group.restarts_left,
            standbys=self._standbys.ready,
            standby_state=self._standbys.state if exit_code is None else "",
            protection=protection.text,
            protection_kind=protection.kind,
            reason_kind=(verdict.reason_kind if verdict else "") or protection.kind,
            exit_code=exit_code,
            reason=reason or (verdict.reason if verdict else of_group.waits_for),
            ranks=tuple(_rank(node, slot, exit_code is not None, self._busy_shares) for slot in slots),
            incidents=self._incidents.published(),
            checkpoint=self._checkpoint_writer.status,
            resume=self._incidents.resume,
            snapshot_step=of_group.snapshot_step,
            cost=_cost(node, slots),
            save_dir=node.config.save_dir,
            away=job.away,
            not_proved=self._incidents.not_proved.names,
            nodes=tuple(map(peers.shown, range(peers.size))) if peers.names else (),
            node=peers.node,
            is_leading=not peers.is_follower,
            leader=peers.leader,
            pages=self._pages(),
            lost_nodes=()
            if peers.is_follower
            else tuple(number for number in range(peers.size) if not peers.is_connected(number)),
            spares=tuple(launcher.address for launcher in peers.pool.waiting) if peers.pool is not None else (),
            quarantine=of_group.quarantine,
        )

    def _pages(self) -> tuple[str, ...]:
        """Of the nodes whose agents are there, as far as this one knows."""
        peers = self._node.peers
        pages = {
            number: where.page
            for number, where in peers.pools.items()
            if where.page and (peers.is_follower or peers.is_connected(number))
        }
        return tuple(pages.get(number, "") for number in range(peers.size)) if pages else ()

    def _protection(self) -> Reason:
        """Whether the whole job is protected; the agent of the node that leads knows it."""
        node = self._node
        if node.peers.is_follower:
            where = f"the whole job is in the status of {node.peers.leaders_name}, whose agent leads"
            return Reason(text=f"not known here: {where}")
        unseen = [slot.rank for slot in node.slots if not is_seen(node, slot)]
        if not node.slots:  # the ranks have not been started yet
            unseen = list(range(node.job.settings.world_size))
        unchecked = [slot.rank for slot in node.slots if not node.board.get(slot.rank, Field.REHEARSED)]
        return protection_of(node.job, unseen, unchecked, self._incidents.not_proved.unrecorded)


def _cost(node: Agent, slots: Sequence[Process | Row]) -> CostStatus | None:
    """What protection takes of a step; None while no rank here has measured it."""
    rows = [node.board_row(slot.rank)[Field.COST :] for slot in slots if slot.is_present or slot.is_finished]
    measured = [row for row in rows if row[0]]
    if not measured:
        return None
    step_s, *parts = (sum(row[at] for row in measured) / len(measured) / 1e9 for at in range(1 + len(PARTS)))
    return CostStatus(step_s, dict(zip(PARTS, parts, strict=True)))


def _rank(node: Agent, slot: Process | Row, has_ended: bool, busy_shares: BusyShares) -> RankStatus:
    row = node.board_row(slot.rank)
    phase = Phase(row[Field.PHASE])
    is_away = slot.rank in node.job.away
    if slot.is_finished:
        state = "finished"
    elif is_away:
        state = "away"
    elif slot.is_lost or has_ended:
        state = "lost"
    elif not slot.is_present:
        state = "starting"
    else:
        state = {Phase.REPLAYING: "replaying", Phase.REPAIRING: "repairing"}.get(phase, "running")
    step = row[Field.APPLIED]
    seen_s = (time.monotonic_ns() - row[Field.SEEN_NS]) / 1e9 if row[Field.SEEN_NS] else None
    return RankStatus(
        rank=slot.rank,
        local_rank=slot.local_rank,
        pid=None if is_away else slot.pid or None,
        state=state,
        step=step if step < FINISHED else None,
        phase=None if is_away else phase.name.lower(),
        last_seen_s=seen_s,
        protection=_protection_of_rank(node, slot),
        node=node.peers.node_of(slot.rank),
        busy=busy_shares.share(slot.rank),
    )


def _ended(rank: RankStatus, exit_code: int | None) -> RankStatus:
    """A rank of another node, as it was published last."""
    if exit_code is None or rank.state == "finished":
        return rank
    return replace(rank, state="lost" if exit_code else "finished")


def is_seen(node: Agent, slot: Process | Row) -> bool:
    """Whether a rank's hooks have been heard in its present process, and it has passed a step under them."""
    row = node.board_row(slot.rank)
    is_on_its_way = Phase(row[Field.PHASE]) in (Phase.REPLAYING, Phase.REPAIRING)
    return slot.is_protected and row[Field.APPLIED] > 0 and not is_on_its_way


def _protection_of_rank(node: Agent, slot: Process | Row) -> str:
    job = node.job
    own = job.alone.get(slot.rank)
    if own is not None and own.unprotected_reason:
        return "off"
    if (
        job.unprotected_reason
        or job.members[slot.rank].hindrance
        or job.settings.rungs.isdisjoint(("replace", "rerun", "resize"))
    ):
        return "off"
    return "on" if is_seen(node, slot) and node.board.get(slot.rank, Field.REHEARSED) else "not yet"


def protection_of(
    job: Job, unseen: Sequence[int], unchecked: Sequence[int] = (), unrecorded: Sequence[Reason] = ()
) -> Reason:
    """ "on", or why a lost rank cannot be replaced, or cannot yet, or not at any moment.

    unseen       ranks that have not passed a step under their hooks
    unchecked    ranks of which no record was read back yet
    unrecorded   what no replay could restore, a sentence each
    """
    if "replace" not in job.settings.rungs and is_elastic(job) and not job.unprotected_reason:
        return Reason("switched-off", "off: a lost rank leaves with its replica, and the others continue")
    if "replace" not in job.settings.rungs:
        return Reason("switched-off", "off: a lost rank restarts the whole group")
    if job.replicas.needs_snapshots and not job.unprotected_reason:
        why = f"no other rank holds a rank's own {in_short(job.replicas.all_names)}"
        if may_rewind(job):
            return Reason("state-of-one-rank", f"on, but all ranks go back to the newest snapshot: {why}")
        return Reason("state-of-one-rank", f"off: {why}; if one is lost, {cost_of_a_loss(job)}")
    if job.are_alone and not job.unprotected_reason:
        return _protection_of_alone(job)
    hindered = [member for member in job.members if member.hindrance]
    if hindered and not job.unprotected_reason:
        ranks = name_ranks(tuple(member.rank for member in hindered))
        why = f"{ranks} could not be replaced now: {job.hindrance}"
        return job.hindrance.within(f"off: {why}; if one is lost, {cost_of_a_loss(job)}")
    if not job.unprotected_reason and (waited_for := [rank for rank in unseen if rank not in job.away]):
        whose = "" if len(waited_for) == len(job.members) else f" of {name_ranks(tuple(waited_for))}"
        return Reason("no-step-yet", f"not yet: no optimizer step{whose} so far")
    if job.unprotected_reason:
        why_not = job.unprotected_reason
        return why_not.within(f"off: {why_not}; if one is lost, {cost_of_a_loss(job)}")
    if waited_for := [rank for rank in unchecked if rank not in job.away]:
        return Reason(
            "being-checked", f"being checked: the records of {name_ranks(tuple(waited_for))} are being read back"
        )
    if unrecorded:
        more = f" (and {len(unrecorded) - 1} more)" if len(unrecorded) > 1 else ""
        said = "on, but a rank that is lost before the first loss of its step is not replaced"
        return unrecorded[0].within(f"{said}: {unrecorded[0]}{more}")
    return Reason(text="on")


def _protection_of_alone(job: Job) -> Reason:
    """ "on", or why a lost rank of those that train each for itself begins anew."""
    for member in job.members:
        own = job.alone.get(member.rank)
        why_not = member.hindrance or (Reason() if own is None else own.unprotected_reason)
        if why_not:
            cost = cost_of_a_loss_alone(job, member.rank, None)
            return why_not.within(f"off: rank {member.rank} cannot be repaired ({why_not}); if it is lost, {cost}")
    return Reason(text="on")


def write_last_status(run: RunDirectory, exit_code: int, reason: str, is_stopped: bool) -> None:
    """End the status of a run that had no supervisor.

    exit_code, is_stopped   as for `state_at_end`
    reason                  why it has not come to its end, a sentence
    """
    status = read_status(run.status)
    state = state_at_end(exit_code, is_stopped)
    write_status(run.status, replace(status, state=state, exit_code=exit_code, reason=reason, updated_at=timestamp()))
