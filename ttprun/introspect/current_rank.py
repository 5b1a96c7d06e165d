"""This process as a rank: who it is, where it stands, how its script runs, and whom it tells of what happens in it.

`current()` is this process's `Rank`. Variables of that class are called `session`, as a rank is a number. It imports
none of the libraries and folders that it serves: `session[Journal]` is this rank's journal, by its class. No torch
here: what watches the script's draws and files is there before it. Begin with `Rank`.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ttprun.device.device_errors import DeviceErrors, Diagnosis, UpdateTimes
from ttprun.introspect.costs import PARTS, Costs
from ttprun.protocol import from_rank
from ttprun.protocol.board import OPERATION_NAMES, Board, Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Options

if TYPE_CHECKING:
    from types import FrameType

    import torch

    from ttprun.protocol.channel import Channel

_T = TypeVar("_T")
CONNECT = OPERATION_NAMES.index("connect")
BATCH, LOSS, INPUT = range(3)  # kinds of what `Observers.note` is given
_MOST_HINDRANCES = 20


class Mode:
    """How the script runs: live, unless a subclass says otherwise. A replay: rank/replay/replay_run.py.

    is_live       no replay is under way
    is_alone      groups are made, and collectives answered, without the other ranks
    step          of a replay: the boundary that it has passed
    boundary      of a replay, that it must reach
    newest_step   of a replay: of the lost rank's steps the newest that an answer may be of
    difference    why the first step of a replay was not where it begins
    """

    is_live = True
    is_alone = False
    boundary = 0
    difference = ""

    @property
    def step(self) -> int:
        """See above."""
        return 0

    @property
    def newest_step(self) -> int:
        """See above."""
        return 0

    def answer(self, entry: Any) -> bool:
        """Fill the outputs of a collective that is not issued; False: another thread's own, issue it after all."""
        return True

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """The record of the lost rank's iterator over the loader of this name; None if it had none."""
        return None

    def note_not_proved(self, text: str) -> None:
        """The script has found something that may be other than it was for the lost rank."""

    def leaves_step_out(self, frame: FrameType) -> bool | None:
        """Whether a GradScaler has left out the lost rank's step at this place; None: it finds out."""
        return False

    def before_step(self, frame: FrameType, returned: Any = None, optimizer: Any = None) -> Any:
        """An optimizer is about to change weights (None: one that is not known).

        returned   its closure's result; returns the lost rank's
        """
        return returned

    def begin_step(self, optimizer: Any) -> bool:
        """The optimizer's state becomes the lost rank's before its step; returns whether this process is live now."""
        return False

    def after_step(self) -> None:
        """The optimizer has stepped: at its boundary a replay ends, and the rank goes live."""

    def refuse(self, reason: Reason, is_contradiction: bool = True) -> None:
        """Report that a replay has failed: then this does not return. `is_contradiction`: see `MismatchFound`."""

    def end_by_error(self, what: str) -> None:
        """An error of the script (`what`) is about to end it. Does not return if another replay may get further."""

    def refuse_end(self) -> None:
        """The script has ended: refuse a replay, which has not reached its boundary."""


class _Joining(Mode):
    is_alone = True


LIVE = Mode()
JOINING = _Joining()  # --mindio: a replacement that has not reached its train function


def _nobody(*_: Any, **__: Any) -> Any:
    """Nobody is told, and nothing is known: None, which is false."""


@dataclass(kw_only=True)
class Observers:
    """What the libraries tell those that use them, and ask of the training. Each may raise what ends a replacement.

    note        the script is about to use these values, and a replacement compares them with the lost rank's: see
                `note` in rank/proof.py; returns whether they are equal to rounding alone
    report      what was found equal (a noun with its number each), and what is not proved (a sentence each)
    refuse      why the script must not go on: it gets something else than the lost rank did
    sends_otherwise  (tensor, difference): a replacement sends something else than the lost rank has sent (a sentence)
    made        (what, cure, is_kept, frame): the script makes something (a sentence), perhaps inside its loop, which a
                replay would not make; what the user can do; whether it still exists; the frame that makes it
    cut         the connections of all groups are cut: what the training waits for over its own ends, too
    leaves      the script destroys its process group
    keep_result  (session, sequence, number, output): a reduced shard has arrived, in memory that is not the script's;
                returns whether `give_result` can give it from now on
    give_result  (boundary, sequence, number, output): fill a tensor with the output of such an operation, this
                process's or that of the rank in whose place it is
    weights     the parameters of all optimizers, at the newest boundary
    device_in_use   the device of the trained parameters; None if they are on none
    wrapped_models  all living DistributedDataParallel modules, in the order in which they were made
    """

    note: Callable[..., bool] = _nobody
    report: Callable[[list[str], list[str]], None] = _nobody
    refuse: Callable[[Reason], None] = _nobody
    sends_otherwise: Callable[[torch.Tensor, str], None] = _nobody
    made: Callable[[str, str, Callable[[], bool], FrameType | None], None] = _nobody
    cut: Callable[[], None] = _nobody
    leaves: Callable[[], None] = _nobody
    keep_result: Callable[[Rank, str, int, torch.Tensor], bool] = _nobody
    give_result: Callable[[int, str, int, torch.Tensor], None] = _nobody
    weights: Callable[[], Sequence[torch.Tensor]] = tuple
    device_in_use: Callable[[], torch.device | None] = _nobody
    wrapped_models: Callable[[], list[Any]] = list


@dataclass(kw_only=True)
class ScriptGroups:
    """The process groups that the script has made.

    living        by name, in the order in which the script has made them
    left          those that the script has destroyed since the newest boundary: a repair may begin before that
    by_ranks      groups made so far by name and ranks; the same in all these ranks
    count         groups made so far, of all names
    at_boundary   the same when the newest boundary was passed
    times_left    how often the script has destroyed its default process group
    """

    living: dict[str, Any] = field(default_factory=dict)
    left: list[Any] = field(default_factory=list)
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
class Rank:
    """What this process knows of itself as a rank; whoever changes that calls a method.

    ranks_here    ranks of this node; 0: all
    address       of this node for connections of the ranks; "": all ranks are on one node
    parts         objects by their class
    generation    number of the communicator set; changed by the recovery thread alone
    applied       completed optimizer steps (the newest boundary of this rank)
    mode          how the script runs: live, or a replay
    made          its process groups
    observers     who is told of what its libraries find
    unprotected   why this rank cannot be repaired or help to repair, none if it can
    hindrance     why no replay would reach the newest boundary, none if one would
    trains_alone  it takes its steps without a process group, in a world of several ranks
    settle_at     boundary up to which a held rank may still step
    is_over       this run of the script has ended with an exception
    recovery      the recovery thread: rank/replay/order_thread.py
    expected      the collectives that a replacement must issue: `Expected` in rank/proof.py
    keeper        of its steps, to be taken again: `Keeper` in rank/replay/kept_steps.py
    proof         the comparison with the lost rank's step, while a replacement is in that: `Proof` in rank/proof.py
    framework     the script's, if it recovers by callbacks (--mindio): mindio/framework.py
    updates       when this run of the script last stepped an optimizer
    costs         what we take of a step
    row           this rank's fields on the board
    lock          the lock of `changed`; taking it directly is quicker
    away          ranks without which the others keep training (--mindio)
    rows_here     rows of the board of this node's ranks
    recorded      by local rank, the newest boundary whose record is complete
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
    parts: Parts = field(default_factory=Parts)
    generation: int = 0
    applied: int = 0
    has_stepped: bool = False  # in this process
    unprotected: Reason = Reason()
    hindrance: Reason = Reason()
    is_applying: bool = False  # Optimizer.step is running
    has_collective_steps: bool = False  # it communicates there: a boundary lies before the step, not after it
    trains_alone: bool = False
    is_holding: bool = False  # the recovery thread has stopped the main thread before its commit
    settle_at: int = 0
    is_over: bool = False
    is_over_budget: bool = False  # it was said that protection takes more than its budget
    made: ScriptGroups = field(default_factory=ScriptGroups)
    mode: Mode = LIVE
    observers: Observers = field(default_factory=Observers)
    recovery: Any = None
    expected: Any = None
    proof: Any = None
    framework: Any = None
    keeper: Any = None
    updates: UpdateTimes = field(default_factory=UpdateTimes)
    away: frozenset[int] = frozenset()
    lock: Any = field(default_factory=threading.RLock)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self.row = self.board.row(self.rank)
        self.costs = Costs(self.row[Field.COST : Field.COST + 1 + len(PARTS)])
        self._is_joined, self._hindrances_reported = False, 0
        first = self.rank - self.local_rank if self.ranks_here else 0
        self.rows_here = range(first, first + (self.ranks_here or self.board.n_ranks))
        self.recorded = self.board.column(Field.RECORDED)[first : self.rows_here.stop]
        self._not_proved: list[list[Reason]] = [[], []]  # as they were reported; then those that cannot be restored

    def __getitem__(self, kind: type[_T]) -> _T:
        """The part of this class. Raises KeyError."""
        return self.parts[kind]

    def get(self, kind: type[_T]) -> _T | None:
        """The part of this class; None if there is none."""
        return self.parts.get(kind)

    def is_repairable(self) -> bool:
        """Whether this rank and the others can be repaired from each other."""
        return self.world_size > 1 and not self.unprotected.text  # asked often: no call

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
        phase = Phase.COLLECTIVE if operation != CONNECT else Phase.CONNECTING  # as `touch`, without a call
        row[Field.PHASE] = phase if self.mode.is_live else Phase.REPLAYING
        row[Field.SEEN_NS] = time.monotonic_ns()

    def diagnose(self, error: BaseException) -> Diagnosis:
        """What an exception says about the device, or about a connection."""
        return DeviceErrors(self.options.device_errors).diagnose(error, self.updates)

    def report_broken(self, generation: int, error: str, after_s: float, device_fault: str = "") -> None:
        """Report that the connections of a generation are broken, though no fault has been reported.

        error, after_s   of the backend: its first sentence is reported; seconds since then
        device_fault     the name of the device's fault; "" if none
        """
        if self.is_repairable():
            line = re.sub(r"\[/[^]]*\.(cc|cpp|h):\d+\] ", "", error.partition("\n")[0])
            self.channel.send(from_rank.Broken(generation, line.partition(". This is")[0], after_s, device_fault))

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

    def is_recorded(self) -> bool:
        """Whether records are useful: other ranks can be repaired from them, or this one can resume from a snapshot."""
        if self.unprotected.text:
            return False
        return bool(self.made.living) if self.world_size > 1 and not self.trains_alone else self.options.keeps_state

    def hold(self, generation: int) -> None:
        """A recovery begins: the main thread passes no commit, and waits for nothing of an older generation."""
        with self.changed:
            self.is_holding, self.settle_at = True, 0
            self.begin_generation(generation)

    def settle(self, boundary: int) -> None:
        """Held as it is, it may step up to this boundary: another survivor already has."""
        with self.changed:
            self.settle_at = boundary
            self.changed.notify_all()

    def go_on(self) -> None:
        """The recovery holds it no more."""
        with self.changed:
            self.is_holding, self.settle_at = False, 0
            self.changed.notify_all()

    def stand_in(self, mode: Mode) -> None:
        """This process repeats a lost one's way, by a replay or by a framework's, until it goes live."""
        self.mode = mode

    def go_live(self) -> None:
        """The script runs as it is from here on."""
        self.mode = LIVE

    def keep_by(self, keeper: Any) -> None:
        """Its steps are kept, or compared, by this from now on; None: not any more."""
        self.keeper = keeper

    def end_run(self) -> None:
        """This run of the script has ended with an exception."""
        self.is_over = True

    def report_not_proved(self, reasons: list[Reason], is_unrecorded: bool = False) -> None:
        """Report what may change and is in no record, after the first step and when the list changes.

        is_unrecorded   the rehearsal has found that it cannot be restored
        """
        before, self._not_proved[is_unrecorded] = self._not_proved[is_unrecorded], reasons
        if reasons is not before and reasons != before:
            self.channel.send(from_rank.NotProved(tuple(reasons), is_unrecorded))

    def note_hindrance(self, boundary: int, reason: Reason) -> None:
        """Report why no replay would reach this boundary (none: one would), if that has changed.

        After _MOST_HINDRANCES changes nothing is reported any more: a replay must find out.
        """
        if reason != self.hindrance and self._hindrances_reported < _MOST_HINDRANCES:
            self._hindrances_reported += 1
            if self._hindrances_reported == _MOST_HINDRANCES:
                reason = Reason()
            self.hindrance = reason
            self.channel.send(from_rank.RankHindered(reason, boundary))

    def note_failure(self, what: str, is_script: bool) -> None:
        """An error of ours: protection ends.

        is_script   the script was interrupted by it: if this is a replay, this raises what ends it
        """
        reason = Reason("ttprun-error", what)
        if is_script:
            self.mode.refuse(reason)
        self.give_up_protection(reason)

    def stop_comparing(self) -> None:
        """Nothing more of the step can be compared with what the lost rank has left of it."""
        if self.proof is not None:
            self.proof.end("the rest of the step in which the rank was lost")


_of_process: Rank | None = None


def current() -> Rank | None:
    """This process's; None in a process that is no rank, and in the forked children of one that is."""
    return _of_process


def begin(session: Rank | None) -> None:
    """This process is this rank; None: it is none any more."""
    global _of_process
    _of_process = session


def end() -> None:
    """This process is no rank any more."""
    begin(None)


def leave_in_children() -> None:
    """Forked children are no ranks."""
    os.register_at_fork(after_in_child=end)
