"""Who this process is among its group's ranks, and what groups ask and report of the training that they serve.

`Member` is enough to use groups alone; a rank's Member (rank/session.py) is one, too. Begin with `Member`.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from ttprun.device.device_errors import DeviceErrors, Diagnosis, UpdateTimes
from ttprun.introspect import host
from ttprun.introspect.costs import PARTS, Costs
from ttprun.protocol import from_rank
from ttprun.protocol.board import OPERATION_NAMES, Board, Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Options

if TYPE_CHECKING:
    from types import CodeType, FrameType

    import torch
    from torch._C._distributed_c10d import Work

    from ttprun.protocol.channel import Channel

_T = TypeVar("_T")
CONNECT = OPERATION_NAMES.index("connect")


@dataclass(kw_only=True)
class RankContext:
    """Who this rank is; never changed.

    ranks_here    ranks of this node; 0: all
    address       of this node for connections of the ranks; "": all ranks are on one node
    """

    rank: Final[int]
    local_rank: Final[int]
    world_size: Final[int]
    run_dir: Final[str]
    options: Final[Options]
    channel: Final[Channel]
    board: Final[Board]
    ranks_here: Final[int] = 0
    address: Final[str] = ""


class Group(Protocol):
    """A process group of the script: process_group.py.

    links      its connections: links.py
    messages   sender and receiver of those that this rank has sent or received in it
    """

    ranks: list[int]
    number: int
    links: Any
    messages: set[tuple[int, int]]
    session: Any

    @property
    def group_name(self) -> str: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def described(self) -> from_rank.Group: ...
    def is_protected(self) -> bool: ...
    def enter(self, entry: Any, inputs: Any) -> bool: ...
    def connect_if_new(self) -> None: ...
    def call(self, op: str, args: tuple[Any, ...]) -> Any: ...
    def bridge(self, entry: Any, inner: Any) -> None: ...
    def complete(self, entry: Any, inner: Any) -> None: ...


class Life:
    """How the script runs: live, unless a subclass says otherwise.

    is_live       no replay is under way
    is_alone      groups are made, and collectives answered, without the other ranks
    step          of a replay: the boundary that it has passed
    """

    is_live = True
    is_alone = False

    @property
    def step(self) -> int:
        """See above."""
        return 0

    def answer(self, entry: Any) -> bool:
        """Fill the outputs of a collective that is not issued; False: another thread's own, issue it after all."""
        return True


class Training:
    """The training that the groups serve; of one that knows nothing, unless a subclass does."""

    gates: frozenset[CodeType] = frozenset()  # where a thread of the script waits for a recovery, beside groups' own

    def cut(self) -> None:
        """The connections of all groups are cut: what the training waits for over its own ends, too."""

    def note_input(
        self, name: str, inputs: Sequence[torch.Tensor], op: str, is_one_of_many: bool = False, is_weights: bool = False
    ) -> bool:
        """An operation is about to be issued; returns whether its inputs equal a lost rank's to rounding alone.

        name     of the group and operation, or of the message; the same in all processes of this rank
        inputs   that this rank gives: dense, any dtype, shape and device
        is_one_of_many  a step may have hundreds: not all need be compared
        is_weights      they are weights, on which all else of the step depends: of those fewer need be compared

        May raise what ends a replacement that comes to something else.
        """
        return False

    def sends_otherwise(self, tensor: torch.Tensor, difference: str) -> None:
        """A replacement sends something else than the lost rank has sent: a sentence. May raise what ends it."""

    def has_a_look(self) -> bool:
        """Whether NaNs in the inputs are counted."""
        return False

    def keep_result(self, entry: Any) -> None:
        """A reduced shard has arrived, in memory that is not the script's."""

    def give_result(self, entry: Any) -> None:
        """Fill the output of an operation that all members had completed, and this process has not."""

    def leaves(self) -> None:
        """The script destroys its process group. May raise what ends it."""

    def made(self, what: str, cure: str, is_kept: Callable[[], bool], frame: FrameType | None) -> None:
        """The script makes something, perhaps inside its loop: see tensors/host.py."""

    def device_in_use(self) -> torch.device | None:
        """The device of the trained parameters; None if they are on none."""
        return None

    def wrapped_models(self) -> list[Any]:
        """All living DistributedDataParallel modules, in the order in which they were made."""
        return []


class Recovering(Protocol):
    """The recovery thread: rank/replay/recovery.py."""

    def leave_to_thread(self, order: Any) -> None: ...
    def is_idle(self, limit_s: float) -> bool: ...
    def retire(self) -> None: ...
    def join(self, limit_s: float) -> None: ...
    def finish(self) -> None: ...


class Framed(Protocol):
    """The script's framework, which recovers by callbacks: rank/framework/framework.py."""

    def issue(self, entry: Any, is_skipped: bool = False) -> Work: ...
    def may_connect_again(self) -> bool: ...


class Expecting(Protocol):
    """The collectives that a replacement must issue: rank/checks/replay_guard.py."""

    def check(self, entry: Any) -> None: ...
    def note_proved(self) -> None: ...
    def take_carried(self, entry: Any) -> bool: ...
    def awaits(self, entry: Any) -> bool: ...


@dataclass(kw_only=True)
class Made:
    """The process groups that the script has made.

    living        by name, in the order in which the script has made them
    left          those that the script has destroyed since the newest boundary: a repair may begin before that
    by_ranks      groups made so far by name and ranks; the same in all these ranks
    count         groups made so far, of all names
    at_boundary   the same when the newest boundary was passed
    times_left    how often the script has destroyed its default process group
    """

    living: dict[str, Group] = field(default_factory=dict)
    left: list[Group] = field(default_factory=list)
    by_ranks: Counter[str] = field(default_factory=Counter)
    count: int = 0
    at_boundary: int = 0
    times_left: int = 0

    def forget(self, names: list[str]) -> None:
        """The script destroys these groups."""
        self.left += [group for name in names if (group := self.living.pop(name, None)) is not None]

    def pass_boundary(self) -> None:
        """A boundary is passed: no repair needs the groups that were destroyed before it."""
        self.at_boundary = self.count
        self.left.clear()


class Parts(dict[type[Any], Any]):
    """Objects by their class; what runs in each step asks `session.parts`, which costs no call of Python's."""

    if TYPE_CHECKING:

        def __getitem__(self, kind: type[_T]) -> _T: ...


@dataclass(kw_only=True)
class Member(RankContext):
    """This process as a member of process groups. Whoever changes what it knows calls a method.

    parts         objects by their class: a journal, results, an exchange at least
    generation    number of the communicator set; changed by the recovery thread alone
    applied       completed optimizer steps (the newest boundary of this rank)
    mode          how the script runs: live, or a replay
    made          its process groups
    unprotected   why this rank cannot be repaired or help to repair, none if it can
    trains_alone  it takes its steps without a process group, in a world of several ranks
    framework     set if the script's framework recovers by callbacks of its own (--mindio)
    updates       when this run of the script last stepped an optimizer
    costs         what we take of a step
    row           this rank's fields on the board
    lock          the lock of `changed`; taking it directly is quicker
    away          ranks without which the others keep training (--mindio)
    """

    parts: Parts = field(default_factory=Parts)
    generation: int = 0
    applied: int = 0
    unprotected: Reason = Reason()
    is_applying: bool = False  # Optimizer.step is running
    has_collective_steps: bool = False  # it communicates there: a boundary lies before the step, not after it
    trains_alone: bool = False
    is_holding: bool = False  # the recovery thread has stopped the main thread before its commit
    made: Made = field(default_factory=Made)
    mode: Life = field(default_factory=Life)
    training: Training = field(default_factory=Training)
    recovery: Recovering | None = None
    expected: Expecting | None = None
    framework: Framed | None = None
    updates: UpdateTimes = field(default_factory=UpdateTimes)
    away: frozenset[int] = frozenset()
    lock: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.row = self.board.row(self.rank)
        self.costs = Costs(self.row[Field.COST : Field.COST + 1 + len(PARTS)])
        self._is_joined = False

    def __getitem__(self, kind: type[_T]) -> _T:
        """The part of this class. Raises KeyError."""
        return self.parts[kind]

    def get(self, kind: type[_T]) -> _T | None:
        """The part of this class; None if there is none."""
        return self.parts.get(kind)

    def stop_comparing(self) -> None:
        """Nothing more of the step can be compared with what the lost rank has left of it."""

    def is_repairable(self) -> bool:
        """Whether this rank and the others can be repaired from each other."""
        return self.world_size > 1 and not self.unprotected

    def is_alone(self) -> bool:
        """Whether a fault of this rank concerns no other: it is the only rank, or has no process group with others."""
        return self.world_size == 1 or self.trains_alone

    def part(self) -> None:
        """Report, once, that this rank takes its steps without a process group."""
        if not self.trains_alone:
            self.trains_alone, self._is_joined = True, False
            self.channel.send(from_rank.RankTrainsAlone())

    def join(self) -> None:
        """Report, before it communicates, that this rank has a process group with others."""
        if self.world_size > 1 and not self._is_joined and not self.mode.is_alone:
            self.trains_alone, self._is_joined = False, True
            self.channel.send(from_rank.RankJoined())

    def take_part(self) -> None:
        """What a replay has made of groups is this rank's: it trains with others in them, or alone."""
        if self.made.living:
            self.join()
        else:
            self.trains_alone = self.world_size > 1

    def begin_generation(self, generation: int) -> None:
        """The main thread waits for nothing of an older communicator set any more."""
        with self.changed:
            self.generation = generation
            self.changed.notify_all()

    def begin_update(self) -> None:
        """Weights are about to change: a recovery waits for the end. The caller holds `lock`."""
        self.is_applying = True

    def pass_boundary(self) -> None:
        """The step has run to its end, or begins, if it is a collective one."""
        with self.lock:
            self.applied += 1
            self.made.pass_boundary()
            self.is_applying = False
            self.row[Field.APPLIED] = self.applied
            self.row[Field.MEETINGS] = 0
            if self.is_holding:  # a recovery waits for the end of the step
                self.changed.notify_all()

    def stand_at(self, boundary: int) -> None:
        """This member is at a boundary that it has not reached step by step."""
        with self.changed:
            self.applied, self.is_applying = boundary, False
            self.row[Field.APPLIED] = boundary
            self.board.announce(self.rank, Field.RECORDED, boundary)
            self.row[Field.MEETINGS] = 0
            self.changed.notify_all()

    def share_row(self) -> None:
        """What this rank has just written to the board is waited for by ranks of other nodes, too."""
        if self.address:
            self.channel.send(from_rank.RowChanged())

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

    def give_up_protection(self, reason: Reason) -> None:
        """Report, once, that a fault of this rank cannot be repaired from now on; training continues.

        Raises RecursionError if the stack is too deep for that: whoever catches it further up reports again.
        """
        if not self.unprotected:
            self.unprotected = reason
            try:
                self.channel.send(from_rank.RankUnprotected(reason))
            except RecursionError:
                self.unprotected = Reason()
                raise
            self.note_unprotected(reason)

    def note_unprotected(self, reason: Reason) -> None:
        """Neither this rank nor another one is repaired from now on, for the first reason that is known."""
        self.unprotected = self.unprotected or reason
        self.stop_comparing()
        with self.changed:
            self.changed.notify_all()


def current() -> Member | None:
    """This process's member; None if it has none."""
    member: Member | None = host.current()
    return member


def _in_short(error: str) -> str:
    """The first sentence of a backend's error, without the place in its source."""
    line = error.splitlines()[0] if error else ""
    return re.sub(r"\[/[^]]*\.(cc|cpp|h):\d+\] ", "", line).partition(". This is")[0]
