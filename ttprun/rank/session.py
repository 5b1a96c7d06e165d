"""What a rank knows about itself: one `Session` per process, None in a process that is not a rank.

It imports none of the folders that it serves: `session[Journal]` is this rank's journal, by its class. What the
libraries need of it stands in their own host.py; what a folder of the rank calls in one above it, in context.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from ttprun.groups.host import Member
from ttprun.introspect import host
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field
from ttprun.protocol.reason import Reason
from ttprun.rank.context import LIVE, Comparing, Mode, Training

_MOST_HINDRANCES = 20


@dataclass(kw_only=True)
class Session(Member):
    """A rank's state as seen by its hooks.

    training      what its groups, its records and its tensors ask and report of the training
    hindrance     why no replay would reach the newest boundary, none if one would
    is_over       this run of the script has ended with an exception
    proof         set while a replacement is in the step in which its rank was lost
    recorded      by local rank, the newest boundary whose record is complete
    rows_here     rows of the board of this node's ranks
    """

    has_stepped: bool = False  # in this process
    hindrance: Reason = Reason()
    settle_at: int = 0  # boundary up to which a held rank may still step
    is_over: bool = False
    is_over_budget: bool = False  # it was said that protection takes more than its budget
    mode: Mode = LIVE
    training: Training = field(default_factory=Training)
    proof: Comparing | None = None
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hindrances_reported = 0
        first = self.rank - self.local_rank if self.ranks_here else 0
        self.rows_here = range(first, first + (self.ranks_here or self.board.n_ranks))
        self.recorded = self.board.column(Field.RECORDED)[first : self.rows_here.stop]
        self._reported_not_proved: list[Reason] = []
        self._reported_unrecorded: list[Reason] = []

    def is_recorded(self) -> bool:
        """Whether records are useful: other ranks can be repaired from them, or this one can resume from a snapshot."""
        if self.unprotected:
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

    def end_run(self) -> None:
        """This run of the script has ended with an exception."""
        self.is_over = True

    def report_not_proved(self, names: list[Reason]) -> None:
        """Report what may change and is in no record: after the first step, and when the list changes."""
        if names is not self._reported_not_proved and names != self._reported_not_proved:
            self.channel.send(from_rank.NotProved(tuple(names)))
        self._reported_not_proved = names

    def report_unrecorded(self, sentences: list[Reason]) -> None:
        """Report what the rehearsal has found that cannot be restored, if that has changed."""
        if sentences != self._reported_unrecorded:
            self._reported_unrecorded = sentences
            self.channel.send(from_rank.NotRecorded(tuple(sentences)))

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


def current() -> Session | None:
    """This process's session; None in a process that is not a rank, and in a rank's forked children."""
    session: Session | None = host.current()
    return session
