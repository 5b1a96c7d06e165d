"""The agent's side of `--mindio`: the state machine's orders, in the words that a rank with callbacks understands.

What ranks declare (replicas) is kept here; who sends what to whom is decided by `ttprun.recovery.shards`. Begin with
`Frameworks.send_state`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ttprun import recovery
from ttprun.agent.schedulers import Scheduler
from ttprun.rank.framework.codes import RepairType
from ttprun.recovery.shards import Loss, Part, ReplicaGroup, Role, plan_dump, plan_repair

if TYPE_CHECKING:
    from ttprun.agent.seat import Seat
    from ttprun.agent.supervisor import Supervisor
    from ttprun.channel import Message

logger = logging.getLogger("ttprun")

_CODES = {
    Role.SEND: RepairType.RT_SEND,
    Role.RECEIVE: RepairType.RT_RECV_REPAIR,
    Role.RECEIVE_IN_PLACE: RepairType.RT_UCE_HIGHLEVEL,
    Role.KEEP: RepairType.RT_UCE_LOWLEVEL,
    Role.LOAD: RepairType.RT_LOAD_CKPT,
    Role.LOAD_IN_PLACE: RepairType.RT_LOAD_REBUILD,
}
_LOSSES = {
    RepairType.RT_RECV_REPAIR.value: Loss.PROCESS,
    RepairType.RT_UCE_HIGHLEVEL.value: Loss.MEMORY,
    RepairType.RT_UCE_LOWLEVEL.value: Loss.NOTHING,
}


class Frameworks:
    """What a supervisor knows of its ranks' frameworks.

    replicas   declared, by rank
    losses     what ranks that are being repaired need, by rank
    scheduler  lives in one rank's process, if there is one
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.scheduler = Scheduler(supervisor)
        self.begin_group()

    def begin_group(self) -> None:
        """All ranks are new."""
        self.scheduler.begin_group()
        self.replicas: dict[int, list[ReplicaGroup]] = {}
        self.losses: dict[int, Loss] = {}
        self._loads = False
        self._saving: set[int] = set()
        self._save_step = 0
        self._renames = -1

    def take(self, seat: Seat, message: Message) -> None:
        """A rank tells of its framework."""
        match message["op"]:
            case "replicas":
                self.replicas[seat.rank] = [
                    ReplicaGroup(tuple(group["ranks"]), group["copies"], group["shift"]) for group in message["groups"]
                ]
            case "scheduler":
                self.scheduler.register(seat)
            case "paused":
                self.scheduler.pause.take(seat, message)
            case "notified":
                self.scheduler.notified(message)
            case "replayed":
                self.losses[seat.rank] = _LOSSES[message["part"]]
                seat.journal = message["journal"]

    # Orders.

    def repair_type(self) -> str:
        """What the recovery that has just begun comes to, in MindIO's words."""
        job = self._supervisor.job
        if job.phase is recovery.Phase.PERSISTING:
            return "dump"
        return "recover" if any(not member.is_rerun for member in job.replacements) else "retry"

    def reboot_type(self, rank: int) -> str:
        """Why a rank has a new process, in MindIO's words."""
        return "hot switch" if rank in self.scheduler.switched else "arf"

    def why_not_repairable(self, ranks: Sequence[int]) -> str:
        """Why these ranks' state could not be given to new processes; "" if it could."""
        lost = dict.fromkeys(ranks, Loss.PROCESS)
        missing = plan_repair(self.replicas, lost, len(self._supervisor.seats)).missing
        return f"no other rank holds the state of rank {_named(missing)}" if missing else ""

    def groups_to_connect(self) -> list[str]:
        """Names of the groups that all their members have, in an order that is the same for all.

        One that a rank has made after its set-up is unknown to its replacement; whoever made it makes it again.
        """
        held: dict[str, set[int]] = {}
        members: dict[str, set[int]] = {}
        for seat in self._supervisor.seats:
            for name, group in seat.journal.items():
                held.setdefault(name, set()).add(seat.rank)
                members.setdefault(name, set()).update(group["ranks"])
        return sorted(name for name, ranks in members.items() if ranks == held[name])

    def send_state(self, action: recovery.SendState) -> None:
        """Tell all ranks to rebuild, and those that it concerns to repair."""
        supervisor = self._supervisor
        world_size = len(supervisor.seats)
        lost = {rank: self.losses[rank] for rank in action.to}
        plan = plan_repair(self.replicas, lost, world_size)
        self._loads = bool(plan.missing)
        if plan.missing:
            logger.warning("no copy of the state of rank %s is left: all load a checkpoint", _named(plan.missing))
        supervisor.log(
            "repair_planned",
            generation=action.generation,
            boundary=action.boundary,
            parts={rank: [part.role.value for part in parts] for rank, parts in plan.parts.items()},
            missing=plan.missing,
        )
        for seat in supervisor.seats:
            seat.tell(
                {
                    "op": "repair",
                    "generation": action.generation,
                    "boundary": action.boundary,
                    "lost": list(action.to),
                    "fault_ranks": list(action.to),
                    "groups": self.groups_to_connect(),
                    "repair_type": self.repair_type(),
                    "parts": [_told(part) for part in plan.parts.get(seat.rank, ())],
                    "limit_s": supervisor.config.transfer_timeout_s,
                }
            )

    def resume(self, action: recovery.Resume) -> None:
        """Tell all ranks to roll back, and to train again."""
        self.scheduler.pause.end()
        loads, self._loads = self._loads, False
        for rank in action.ranks:
            self._supervisor.seats[rank].tell(
                {
                    "op": "resume",
                    "generation": action.generation,
                    "boundary": action.boundary,
                    "groups": self.groups_to_connect(),
                    "fault_ranks": [],
                    "loaded": action.boundary if loads else 0,
                }
            )

    def persist(self, action: recovery.Persist) -> None:
        """Have the framework save a checkpoint: ranks that hold the whole state together write, one of them renames."""
        saves = plan_dump(self.replicas, action.ranks, len(self._supervisor.seats))
        if isinstance(saves, str):
            self._end_dump(action.generation, why_not=saves)
            return
        self._saving, self._save_step, self._renames = set(saves), action.boundary, min(saves)
        for rank, groups in saves.items():
            info = [{"type": kind, "ranks": list(ranks)} for kind, ranks in groups]
            order = {"op": "dump", "generation": action.generation, "step": action.boundary, "save_info": info}
            self._supervisor.seats[rank].tell(order)

    def take_dumped(self, seat: Seat, message: Message) -> None:
        """A rank has written its part, or the last one has made a checkpoint of them."""
        generation = message["generation"]
        if generation != self._supervisor.job.generation:
            return
        if message["op"] == "renamed":
            self._end_dump(generation, place=f"step {self._save_step}, by the framework's save_ckpt handler")
            return
        self._saving.discard(seat.rank)
        if not self._saving:
            order = {"op": "rename", "generation": generation, "step": self._save_step}
            self._supervisor.seats[self._renames].tell(order)

    def _end_dump(self, generation: int, place: str = "", why_not: str = "") -> None:
        fields: dict[str, Any] = {"boundary": self._save_step, "place": place, "reason": why_not}
        self._supervisor.log("framework_saved" if place else "framework_save_failed", **fields)
        if place:
            logger.warning("the state was saved: %s", place)
        self._supervisor.advance(
            recovery.StatePersisted(at_s=time.monotonic(), generation=generation, place=place, why_not=why_not)
        )


def _told(part: Part) -> dict[str, Any]:
    """MindIO's repair_info."""
    return {
        "type": list(part.kinds),
        "repair_type": _CODES[part.role].value,
        "src": list(part.sources),
        "dst": list(part.targets),
        "rank_list": list(part.ranks),
    }


def _named(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
