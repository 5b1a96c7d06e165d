"""What a rank knows about itself: one `Session` per process, None in a process that is not a rank.

It imports none of the folders that it serves: `session[Journal]` is this rank's journal, by its class. What a folder
calls in one above it is an attribute, described in context.py.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ttprun.device.errors import DeviceErrors, Diagnosis
from ttprun.device.updates import UpdateTimes
from ttprun.protocol import from_rank
from ttprun.protocol.board import OPERATION_NAMES, Field, Phase
from ttprun.rank.context import LIVE, Comparing, Expecting, Framed, Group, Mode, RankContext, Recovering

_T = TypeVar("_T")
CONNECT = OPERATION_NAMES.index("connect")
_MOST_HINDRANCES = 20


@dataclass(kw_only=True)
class Session(RankContext):
    """A rank's state as seen by its hooks.

    parts         objects of the folders above, by their class
    generation    number of the communicator set; changed by the recovery thread alone
    applied       completed optimizer steps (the newest boundary of this rank)
    mode          how the script runs: live, or a replay
    groups        living process groups by name, in the order in which the script has made them
    groups_left   those that the script has destroyed since the newest boundary: a repair may begin before that
    groups_made   groups made so far by name and ranks; the same in all these ranks
    groups_count  groups made so far, of all names
    groups_at_boundary  the same when the newest boundary was passed
    times_left    how often the script has destroyed its default process group
    hindrance     why no replay would reach the newest boundary, "" if one would
    unprotected   why this rank cannot be repaired or help to repair, "" if it can
    trains_alone  it takes its steps without a process group, in a world of several ranks
    is_over       this run of the script has ended with an exception
    proof         set while a replacement is in the step in which its rank was lost
    framework     set if the script's framework recovers by callbacks of its own (--mindio)
    updates       when this run of the script last stepped an optimizer
    row           this rank's fields on the board
    recorded      by local rank, the newest boundary whose record is complete
    rows_here     rows of the board of this node's ranks
    lock          the lock of `changed`; taking it directly is quicker
    away          ranks without which the others keep training (--mindio)
    """

    parts: dict[type[Any], Any] = field(default_factory=dict)
    generation: int = 0
    applied: int = 0
    has_stepped: bool = False  # in this process
    unprotected: str = ""
    hindrance: str = ""
    is_holding: bool = False  # the recovery thread has stopped the main thread before its commit
    settle_at: int = 0  # boundary up to which a held rank may still step: another survivor already has
    is_applying: bool = False  # Optimizer.step is running
    has_collective_steps: bool = False  # it communicates there: a boundary lies before the step, not after it
    trains_alone: bool = False
    groups: dict[str, Group] = field(default_factory=dict)
    groups_left: list[Group] = field(default_factory=list)
    groups_made: Counter[str] = field(default_factory=Counter)
    groups_count: int = 0
    groups_at_boundary: int = 0
    times_left: int = 0
    is_over: bool = False
    mode: Mode = LIVE
    recovery: Recovering | None = None
    expected: Expecting | None = None
    proof: Comparing | None = None
    framework: Framed | None = None
    updates: UpdateTimes = field(default_factory=UpdateTimes)
    away: frozenset[int] = frozenset()
    lock: Any = field(default_factory=threading.RLock)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self._hindrances_reported = 0
        self._is_joined = False
        first = self.rank - self.local_rank if self.ranks_here else 0
        self.rows_here = range(first, first + (self.ranks_here or self.board.n_ranks))
        self.recorded = self.board.column(Field.RECORDED)[first : self.rows_here.stop]
        self.row = self.board.row(self.rank)
        self._reported_not_proved: list[str] = []
        self._reported_unrecorded: list[str] = []

    def __getitem__(self, kind: type[_T]) -> _T:
        """The part of this class. Raises KeyError."""
        return self.parts[kind]  # type: ignore[no-any-return]

    def get(self, kind: type[_T]) -> _T | None:
        """The part of this class; None if there is none."""
        return self.parts.get(kind)

    def is_repairable(self) -> bool:
        """Whether this rank and the others can be repaired from each other."""
        return self.world_size > 1 and not self.unprotected

    def is_recorded(self) -> bool:
        """Whether records are useful: other ranks can be repaired from them, or this one can resume from a snapshot."""
        if self.unprotected:
            return False
        return bool(self.groups) if self.world_size > 1 and not self.trains_alone else self.options.keeps_state

    def is_alone(self) -> bool:
        """Whether a fault of this rank concerns no other: it is the only rank, or has no process group with others."""
        return self.world_size == 1 or self.trains_alone

    def part(self) -> None:
        """Report, once, that this rank takes its steps without a process group."""
        if not self.trains_alone:
            self.trains_alone, self._is_joined = True, False
            self.channel.send(from_rank.TrainsAlone())

    def join(self) -> None:
        """Report, before it communicates, that this rank has a process group with others."""
        if self.world_size > 1 and not self._is_joined and not self.mode.is_alone:
            self.trains_alone, self._is_joined = False, True
            self.channel.send(from_rank.Joined())

    def share_row(self) -> None:
        """What this rank has just written to the board is waited for by ranks of other nodes, too."""
        if self.address:
            self.channel.send(from_rank.RowChanged())

    def forget_groups(self, names: list[str]) -> None:
        """The script destroys these groups."""
        self.groups_left += [group for name in names if (group := self.groups.pop(name, None)) is not None]

    def pass_groups(self) -> None:
        """A boundary is passed: no repair needs the groups that were destroyed before it."""
        self.groups_at_boundary = self.groups_count
        self.groups_left.clear()

    def report_not_proved(self, names: list[str]) -> None:
        """Report what may change and is in no record: after the first step, and when the list changes."""
        if names is not self._reported_not_proved and names != self._reported_not_proved:
            self.channel.send(from_rank.NotProved(tuple(names)))
        self._reported_not_proved = names

    def report_unrecorded(self, sentences: list[str]) -> None:
        """Report what the rehearsal has found that cannot be restored, if that has changed."""
        if sentences != self._reported_unrecorded:
            self._reported_unrecorded = sentences
            self.channel.send(from_rank.NotRecorded(tuple(sentences)))

    def touch(self, phase: Phase) -> None:
        """Write to the board what the main thread does now."""
        row = self.row
        row[Field.PHASE] = phase if self.mode.is_live else Phase.REPLAYING
        row[Field.SEEN_NS] = time.monotonic_ns()

    def meet(self, operation: int, size: int) -> None:
        """The main thread reaches a collective, or makes a group.

        operation   its index in board.OPERATION_NAMES
        size        ranks that take part; a missing rank can be named only if all do
        """
        row = self.row
        row[Field.COLLECTIVES] += 1
        row[Field.OPERATION] = operation
        if size == self.world_size - len(self.away):
            row[Field.MEETINGS] += 1
        self.touch(Phase.COLLECTIVE if operation != CONNECT else Phase.CONNECTING)

    def diagnose(self, error: BaseException) -> Diagnosis:
        """What an exception says about the device, or about a connection."""
        return DeviceErrors(self.options.device_errors).diagnose(error, self.updates)

    def report_broken(self, generation: int, reason: str, after_s: float, device_fault: str = "") -> None:
        """Report that the connections of a generation are broken, though no fault has been reported.

        after_s        seconds since they broke
        device_fault   the name of the device's fault; "" if none
        """
        if self.is_repairable():
            self.channel.send(from_rank.Broken(generation, _in_short(reason), after_s, device_fault))

    def note_collective_step(self) -> None:
        """An optimizer communicates inside step(): from its next step on, boundaries lie before the steps."""
        if not self.has_collective_steps and not self.is_alone():  # who is alone ends each step without others
            self.has_collective_steps = True
            self.channel.send(from_rank.CollectiveStep())

    def note_hindrance(self, boundary: int, reason: str) -> None:
        """Report why no replay would reach this boundary ("": one would), if that has changed.

        After _MOST_HINDRANCES changes nothing is reported any more: a replay must find out.
        """
        if reason != self.hindrance and self._hindrances_reported < _MOST_HINDRANCES:
            self._hindrances_reported += 1
            if self._hindrances_reported == _MOST_HINDRANCES:
                reason = ""
            self.hindrance = reason
            self.channel.send(from_rank.Hindered(boundary, reason))

    def stop_comparing(self) -> None:
        """Nothing more of the step can be compared with what the lost rank has left of it."""
        if self.proof is not None:
            self.proof.end("the rest of the step in which the rank was lost")

    def give_up_protection(self, reason: str) -> None:
        """Report, once, that a fault of this rank cannot be repaired from now on; training continues.

        Raises RecursionError if the stack is too deep for that: whoever catches it further up reports again.
        """
        if not self.unprotected:
            self.unprotected = reason
            try:
                self.channel.send(from_rank.Unprotected(reason))
            except RecursionError:
                self.unprotected = ""
                raise
            self.stop_comparing()
            with self.changed:
                self.changed.notify_all()


_session: Session | None = None


def current() -> Session | None:
    """This process's session; None in a process that is not a rank, and in a rank's forked children."""
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
    """The first sentence of a backend's error, without the place in its source."""
    line = error.splitlines()[0] if error else ""
    return re.sub(r"\[/[^]]*\.(cc|cpp|h):\d+\] ", "", line).partition(". This is")[0]
