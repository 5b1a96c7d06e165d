"""The agent's side of `--mindio`: the state machine's orders, in the words that a rank with callbacks understands.

What ranks declare (replicas) is kept here; who sends what to whom is decided by `ttprun.recovery.shards`. Begin with
`Frameworks.send_state`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal, assert_never

from ttprun import recovery
from ttprun.agent.lead.repairs import Repairs
from ttprun.agent.lead.rows import Lead, Row
from ttprun.mindio.schedulers import Scheduler
from ttprun.protocol import from_rank, mindio, to_rank
from ttprun.protocol.board import FINISHED, Field
from ttprun.protocol.mindio import RepairType
from ttprun.recovery.shards import LossKind, RepairRole, ReplicaGroup, plan_dump, plan_repair

logger = logging.getLogger("ttprun")

_CODES = {
    RepairRole.SEND: RepairType.RT_SEND,
    RepairRole.RECEIVE: RepairType.RT_RECV_REPAIR,
    RepairRole.RECEIVE_IN_PLACE: RepairType.RT_UCE_HIGHLEVEL,
    RepairRole.KEEP: RepairType.RT_UCE_LOWLEVEL,
    RepairRole.LOAD: RepairType.RT_LOAD_CKPT,
    RepairRole.LOAD_IN_PLACE: RepairType.RT_LOAD_REBUILD,
}
_LOSSES: dict[RepairType, LossKind] = {
    RepairType.RT_RECV_REPAIR: LossKind.PROCESS,
    RepairType.RT_UCE_HIGHLEVEL: LossKind.MEMORY,
    RepairType.RT_UCE_LOWLEVEL: LossKind.NOTHING,
}


class Frameworks(Repairs):
    """What is known of the ranks' frameworks.

    replicas   declared, by rank
    batches    data-parallel groups, by rank
    elastic    ranks that can train on in a smaller group
    losses     what ranks that are being repaired need, by rank
    scheduler  lives in one rank's process, if there is one
    """

    def __init__(self, node: Lead) -> None:
        self._node = node
        self.scheduler = Scheduler(node, self.why_not_repairable)
        self.replicas: dict[int, list[ReplicaGroup]] = {}
        self.batches: dict[int, tuple[int, ...]] = {}
        self.elastic: set[int] = set()
        self.losses: dict[int, LossKind] = {}
        self._loads = False
        self._saving: set[int] = set()
        self._save_step = 0
        self._renames = -1

    def take(self, slot: Row, message: mindio.Report | from_rank.OfAlignment) -> None:
        """A rank reports of its framework."""
        match message:
            case mindio.ReplicasDeclared(groups=groups):
                self.replicas[slot.rank] = [
                    ReplicaGroup(tuple(group.ranks), group.copies, group.shift) for group in groups
                ]
                self._declare(slot.rank)
            case mindio.DataParallelDeclared(ranks=ranks):
                self.batches[slot.rank] = tuple(ranks)
                self._declare(slot.rank)
            case mindio.ElasticDeclared():
                self.elastic.add(slot.rank)
                self._declare(slot.rank)
            case mindio.SchedulerRegistered():
                self.scheduler.register(slot)
            case mindio.SchedulerAsked():
                self.scheduler.notified(message)
            case mindio.Paused(number=number):
                self.scheduler.pause.take(slot, number)
            case mindio.Prepared(part=part, journal=journal):
                self.losses[slot.rank] = _LOSSES[part]
                slot.journal = journal
            case mindio.SavedByFramework(generation=generation):
                self._take_saved(slot, generation)
            case mindio.Renamed(generation=generation):
                if generation == self._node.job.generation:
                    self._end_dump(generation, place=f"step {self._save_step}, by the framework's save_ckpt handler")
            case from_rank.Unaligned() | from_rank.Aligned():
                pass  # a framework's own repair leaves no such difference
            case _:
                assert_never(message)

    @property
    def is_paused(self) -> bool:
        """All ranks wait, since the scheduler has asked for that."""
        return self.scheduler.is_paused

    def look(self) -> None:
        """End a pause that has lasted long enough."""
        self.scheduler.pause.look()

    def note_incident(self, incident: recovery.Incident) -> None:
        """Report to the scheduler how an incident stands."""
        self.scheduler.note_incident(incident)
        if (incident.rung, incident.outcome) == ("resize", "recovered"):
            self._report_size(incident)

    def _declare(self, rank: int) -> None:
        """Report to the state machine what is known of a rank, if it can train on in a smaller group."""
        if rank in self.elastic:
            replicas, batches = tuple(self.replicas.get(rank, ())), self.batches.get(rank, ())
            self._node.advance(
                recovery.ElasticDeclared(at_s=time.monotonic(), rank=rank, replicas=replicas, data_parallel=batches)
            )

    def _report_size(self, incident: recovery.Incident) -> None:
        """Report how many ranks train from now on."""
        job = self._node.job
        self._node.log("group_resized", away=job.away, ranks=job.survivors, boundary=incident.boundary)
        count = f"{len(job.survivors)} of {len(job.members)} ranks"
        away = f"; rank {_named(job.away)} {'is' if len(job.away) == 1 else 'are'} away" if job.away else ""
        logger.warning("training continues with %s from step %s on%s", count, incident.boundary, away)

    # Orders.

    def replay(self, action: to_rank.Replay) -> None:
        """Have a rank with a new process, or with memory that has failed, make itself ready for its repair."""
        slot = self._node.slots[action.rank]
        slot.send(mindio.Prepare(action.generation, action.boundary, self.repair_type(), self.reboot_type(slot.rank)))

    def repair_type(self) -> mindio.Strategy:
        """What the recovery that has just begun comes to, in MindIO's words."""
        job = self._node.job
        if job.phase is recovery.JobPhase.PERSISTING:
            return "dump"
        if job.incident is not None and job.incident.rung == "resize":
            return "unknow"
        return "recover" if any(not member.is_rerun for member in job.replacements) else "retry"

    def reboot_type(self, rank: int) -> Literal["arf", "hot switch"]:
        """Why a rank has a new process, in MindIO's words."""
        return "hot switch" if rank in self.scheduler.switched else "arf"

    def why_not_repairable(self, ranks: Sequence[int]) -> str:
        """Why these ranks' state could not be given to new processes; "" if it could."""
        lost = dict.fromkeys(ranks, LossKind.PROCESS)
        missing = plan_repair(self.replicas, lost, len(self._node.slots), self._node.job.away).missing
        return f"no other rank holds the state of rank {_named(missing)}" if missing else ""

    def groups_to_connect(self) -> list[str]:
        """Names of the groups that all their members have, in an order that is the same for all.

        One that a rank has made after its set-up is unknown to its replacement; whoever made it makes it again.
        """
        holders: dict[str, set[int]] = {}
        members: dict[str, set[int]] = {}
        for slot in self._node.slots:
            for name, group in slot.journal.items():
                holders.setdefault(name, set()).add(slot.rank)
                members.setdefault(name, set()).update(group.ranks)
        return sorted(name for name, ranks in members.items() if ranks == holders[name])

    def call_back(self, reason: str) -> str:
        """As the scheduler would have it."""
        return self.scheduler.call_back(reason)

    def expect(self, lost: Sequence[int]) -> None:
        """Their rows of the board said that they had finished."""
        board = self._node.board
        for slot in (self._node.slots[rank] for rank in lost):
            if board.get(slot.rank, Field.RECORDED) == FINISHED:
                board.set(slot.rank, Field.RECORDED, slot.lost_boundary)

    def size_for(self, rank: int) -> mindio.Size:
        """How many ranks the present recovery leads to, as its orders say it to a rank."""
        job = self._node.job
        if job.away:
            groups = list(recovery.groups_left(job, rank)[0])
            ranks = sorted((*job.survivors, *job.lost))
            return mindio.Size(list(job.away), ranks, groups, self.scheduler.params("downgrade"))
        return mindio.Size(params=self.scheduler.params("upgrade") if job.is_upgrading else "")

    def send_state(self, action: to_rank.SendState) -> None:
        """Have all ranks rebuild, and those that it concerns repair."""
        node = self._node
        world_size = len(node.slots)
        lost = {rank: self.losses[rank] for rank in action.to}
        plan = plan_repair(self.replicas, lost, world_size, node.job.away)
        self._loads = bool(plan.missing)
        if plan.missing:
            logger.warning("no copy of the state of rank %s remains: all load a checkpoint", _named(plan.missing))
        node.log(
            "repair_planned",
            generation=action.generation,
            boundary=action.boundary,
            parts={rank: [part.role.value for part in parts] for rank, parts in plan.parts.items()},
            missing=plan.missing,
        )
        for slot in node.slots:
            if slot.rank in node.job.away:
                continue
            slot.send(
                mindio.Repair(
                    generation=action.generation,
                    boundary=action.boundary,
                    size=self.size_for(slot.rank),
                    lost=list(action.to),
                    groups=self.groups_to_connect(),
                    repair_type=self.repair_type(),
                    parts=[
                        mindio.RepairPart(
                            type=list(part.kinds),
                            repair_type=_CODES[part.role],
                            src=list(part.sources),
                            dst=list(part.targets),
                            rank_list=list(part.ranks),
                        )
                        for part in plan.parts.get(slot.rank, ())
                    ],
                    limit_s=node.config.transfer_timeout_s,
                )
            )

    def resume(self, action: to_rank.Resume) -> None:
        """Have all ranks roll back, and train again; those that are away hold nobody up from now on."""
        self.scheduler.pause.end()
        loads, self._loads = self._loads, False
        node = self._node
        for slot in (node.slots[rank] for rank in node.job.away):
            slot.journal = {}
            node.board.announce(slot.rank, Field.RECORDED, FINISHED)
        for rank in action.ranks:
            node.slots[rank].send(
                mindio.Rollback(
                    generation=action.generation,
                    boundary=action.boundary,
                    size=self.size_for(rank),
                    groups=self.groups_to_connect(),
                    loaded=action.boundary if loads else 0,
                )
            )

    def persist(self, action: recovery.Persist) -> None:
        """Have the framework save a checkpoint: ranks that hold the whole state together write, one of them renames."""
        saves = plan_dump(self.replicas, action.ranks, len(self._node.slots))
        if isinstance(saves, str):
            self._end_dump(action.generation, why_not=saves)
            return
        self._saving, self._save_step, self._renames = set(saves), action.boundary, min(saves)
        for rank, groups in saves.items():
            saves_of_rank = [mindio.Saving(kind, list(together)) for kind, together in groups]
            self._node.slots[rank].send(mindio.Save(action.generation, action.boundary, saves_of_rank))

    def _take_saved(self, slot: Row, generation: int) -> None:
        """A rank has written its part: after the last one, a checkpoint is made of them."""
        if generation != self._node.job.generation:
            return
        self._saving.discard(slot.rank)
        if not self._saving:
            self._node.slots[self._renames].send(mindio.Rename(generation, self._save_step))

    def _end_dump(self, generation: int, place: str = "", why_not: str = "") -> None:
        fields: dict[str, Any] = {"boundary": self._save_step, "place": place, "reason": why_not}
        self._node.log("framework_saved" if place else "framework_save_failed", **fields)
        if place:
            logger.warning("the state was saved: %s", place)
        self._node.advance(
            recovery.StatePersisted(at_s=time.monotonic(), generation=generation, place=place, why_not=why_not)
        )


def _named(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
