"""What this process knows of itself as a rank: one `Session`, made by the shim's hooks, None in any other process."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ttprun.device.errors import DeviceErrors, Diagnosis
from ttprun.device.updates import UpdateTimes
from ttprun.protocol import from_rank
from ttprun.protocol.board import OPERATION_NAMES, Board, Field, Phase
from ttprun.protocol.to_rank import Options

CONNECT = OPERATION_NAMES.index("connect")
_MOST_HINDRANCES = 20

if TYPE_CHECKING:
    from ttprun.protocol.channel import Channel
    from ttprun.rank.checks.proof import Proof
    from ttprun.rank.checks.replay_guard import Expected
    from ttprun.rank.checks.verification import Verifier
    from ttprun.rank.comm.connection import Exchange
    from ttprun.rank.comm.journal import Journal
    from ttprun.rank.comm.process_group import ManagedGroup
    from ttprun.rank.comm.results import Results
    from ttprun.rank.framework.framework import Framework
    from ttprun.rank.records.recorder import Recorder
    from ttprun.rank.replay.recovery import Recovery
    from ttprun.rank.replay.replay import Replay
    from ttprun.rank.weights.holdings import Holdings
    from ttprun.rank.weights.own_state import OwnState
    from ttprun.rank.weights.post_step_weights import KeptWeights
    from ttprun.rank.weights.snapshots import Snapshots


@dataclass
class Session:
    """A rank's state as seen by its hooks.

    generation    number of the communicator set; changed by the recovery thread alone
    applied       optimizer steps that have run to their end (the boundary this rank has passed)
    replay        set while a replacement runs the script up to its boundary, else None
    groups        living process groups by name, in the order in which the script has made them
    groups_made   how many groups of a name and of the same ranks the script has made so far; the same in all of these
    groups_count  how many groups the script has made so far, of all names
    times_left    how often the script has been done with its process group
    hindrance     why no replay would come to the newest boundary, "" if one would
    unprotected   why this rank cannot be repaired or help to repair, "" if it can
    trains_alone  it takes its steps without a process group, in a world of several ranks
    is_over       this run of the script has ended with an exception
    proof         set while a replacement is in the step in which its rank was lost
    framework     set if the script's framework recovers by callbacks of its own (--mindio)
    updates       when this run of the script has last stepped an optimizer
    row           this rank's fields on the board
    recorded      of each local rank, the newest boundary whose record is complete
    lock          that of `changed`, quicker to take by itself
    away          ranks without which the others train on (--mindio)
    """

    rank: int
    local_rank: int
    world_size: int
    run_dir: str
    options: Options
    channel: Channel
    board: Board
    recorder: Recorder
    journal: Journal
    results: Results
    exchange: Exchange
    verifier: Verifier
    snapshots: Snapshots
    kept_weights: KeptWeights
    own_state: OwnState
    holdings: Holdings
    generation: int = 0
    applied: int = 0
    has_stepped: bool = False  # in this process
    unprotected: str = ""
    hindrance: str = ""
    is_holding: bool = False  # the recovery thread has stopped the main thread in front of its commit
    settle_at: int = 0  # boundary up to which a holding rank may still step: another survivor already has
    is_applying: bool = False  # Optimizer.step is running
    trains_alone: bool = False
    groups: dict[str, ManagedGroup] = field(default_factory=dict)
    groups_made: Counter[str] = field(default_factory=Counter)
    groups_count: int = 0
    times_left: int = 0
    is_over: bool = False
    replay: Replay | None = None
    recovery: Recovery | None = None
    expected: Expected | None = None
    proof: Proof | None = None
    framework: Framework | None = None
    updates: UpdateTimes = field(default_factory=UpdateTimes)
    away: frozenset[int] = frozenset()
    lock: Any = field(default_factory=threading.RLock)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self._hindrances_told = 0
        self._is_joined = False
        self.recorded = self.board.column(Field.RECORDED)
        self.row = self.board.row(self.local_rank)
        self._told_not_proved: list[str] = []

    def is_repairable(self) -> bool:
        """Whether another rank could be repaired from what this one keeps."""
        return self.world_size > 1 and not self.unprotected

    def is_recorded(self) -> bool:
        """Whether records are of use: other ranks can be repaired from them, or this one can go on from a snapshot."""
        if self.unprotected:
            return False
        return bool(self.groups) if self.world_size > 1 and not self.trains_alone else self.options.keeps_state

    def is_alone(self) -> bool:
        """Whether a fault of this rank is no affair of others: there are none, or it has no process group with them."""
        return self.world_size == 1 or self.trains_alone

    def part(self) -> None:
        """Report, once, that this rank takes its steps without a process group, as long as it has none."""
        if not self.trains_alone:
            self.trains_alone, self._is_joined = True, False
            self.channel.send(from_rank.TrainsAlone())

    def join(self) -> None:
        """Report, before any other rank can meet it there, that this rank has a process group with others."""
        if self.world_size > 1 and not self._is_joined and not self.meets_nobody():
            self.trains_alone, self._is_joined = False, True
            self.channel.send(from_rank.Joined())

    def is_replaying_alone(self) -> bool:
        """Collectives are answered by the replay: the other ranks have been here before, and do not come again."""
        return self.replay is not None and self.replay.is_alone

    def meets_nobody(self) -> bool:
        """Groups are made without the other ranks."""
        return self.is_replaying_alone() or (self.framework is not None and self.framework.is_joining)

    def tell_not_proved(self, names: list[str]) -> None:
        """Name what can change and is in no record: after the first step, and when there is something new."""
        if names is not self._told_not_proved and names != self._told_not_proved:
            self.channel.send(from_rank.NotProved(tuple(names)))
        self._told_not_proved = names

    def touch(self, phase: Phase) -> None:
        """Note on the board what the main thread does now."""
        row = self.row
        row[Field.PHASE] = phase if self.replay is None else Phase.REPLAYING
        row[Field.SEEN_NS] = time.monotonic_ns()

    def meet(self, operation: int, size: int) -> None:
        """The main thread comes to a collective, or to the making of a group.

        operation   its place in board.OPERATION_NAMES
        size        ranks that take part; only where all do can it be told who has not come
        """
        row = self.row
        row[Field.COLLECTIVES] += 1
        row[Field.OPERATION] = operation
        if size == self.world_size - len(self.away):
            row[Field.MEETINGS] += 1
        self.touch(Phase.COLLECTIVE if operation != CONNECT else Phase.CONNECTING)

    def diagnose(self, error: BaseException) -> Diagnosis:
        """What an exception says of the device, or of a connection."""
        return DeviceErrors(self.options.device_errors).diagnose(error, self.updates)

    def tell_broken(self, generation: int, reason: str, after_s: float, device_fault: str = "") -> None:
        """Say that the connections of a generation are broken, though no fault has been heard of.

        after_s        seconds since they broke
        device_fault   what the device says of it; "" if they are none of a device's
        """
        if self.is_repairable():
            self.channel.send(from_rank.Broken(generation, _in_short(reason), after_s, device_fault))

    def note_hindrance(self, boundary: int, reason: str) -> None:
        """Say why no replay would come to this boundary, or that one would, if that is news.

        Of what comes and goes all the time nothing is said in the end: then a replay must find out.
        """
        if reason != self.hindrance and self._hindrances_told < _MOST_HINDRANCES:
            self._hindrances_told += 1
            if self._hindrances_told == _MOST_HINDRANCES:
                reason = ""
            self.hindrance = reason
            self.channel.send(from_rank.Hindered(boundary, reason))

    def give_up_protection(self, reason: str) -> None:
        """Say once that a fault of this rank cannot be repaired from now on; training itself is not touched."""
        if not self.unprotected:
            self.unprotected = reason
            self.channel.send(from_rank.Unprotected(reason))
            with self.changed:
                self.changed.notify_all()


_session: Session | None = None


def current() -> Session | None:
    """This process's session, None in a process that is no rank (also in a rank's forked children)."""
    return _session


def begin(session: Session) -> None:
    """Make `session` this process's own."""
    global _session
    _session = session


def leave_in_children() -> None:
    """Forked children have no session."""
    os.register_at_fork(after_in_child=end)


def end() -> None:
    """This process has no session any more."""
    global _session
    _session = None


def _in_short(error: str) -> str:
    """A backend's error without the place in its source, and without its advice: the first line's first sentence."""
    line = error.splitlines()[0] if error else ""
    return re.sub(r"\[/[^]]*\.(cc|cpp|h):\d+\] ", "", line).partition(". This is")[0]
