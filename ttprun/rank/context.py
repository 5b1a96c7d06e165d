"""What every folder of a rank may know: who this rank is, and what the folders below call in those above them.

`Session` (session.py) has one attribute for each Protocol. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from ttprun.protocol import from_rank
from ttprun.protocol.board import Board
from ttprun.protocol.to_rank import Options

if TYPE_CHECKING:
    from types import FrameType

    from torch._C._distributed_c10d import Work

    from ttprun.protocol.channel import Channel


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
    """A process group of the script: comm/process_group.py.

    links      its connections: comm/links.py
    messages   sender and receiver of those that this rank has sent or received in it
    """

    ranks: list[int]
    number: int
    links: Any
    messages: set[tuple[int, int]]

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


class Exporting(Protocol):
    """The records that outlive this process: records/recorder.py."""

    evidence: Any

    def export(self, boundary: int) -> dict[str, Any]: ...


class Mode:
    """How the script runs: live, unless a subclass says otherwise. Replay and its kind: replay/replay.py.

    is_live       no replay is under way
    is_alone      groups are made, and collectives answered, without the other ranks
    boundary      of a replay, that it must reach
    newest_step   of a replay: of the lost rank's steps the newest that an answer may be of
    difference    why the first step of a replay was not where it begins
    """

    is_live = True
    is_alone = False
    boundary = 0
    newest_step = 0
    difference = ""

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """The record of the lost rank's iterator over the loader of this name; None if it had none."""
        return None

    def note_not_proved(self, text: str) -> None:
        """The script has found something that may be other than it was for the lost rank."""

    def answer(self, entry: Any) -> None:
        """Fill the outputs of a collective that is not issued."""

    def leaves_step_out(self, frame: FrameType) -> bool:
        """Whether a GradScaler has left out the lost rank's step at this place."""
        return False

    def before_step(self, frame: FrameType, returned: Any = None, optimizer: Any = None) -> Any:
        """An optimizer is about to change weights (None: one that is not known).

        returned   its closure's result; returns the lost rank's
        """
        return returned

    def begin_step(self, optimizer: Any) -> bool:
        """The optimizer's state becomes what the lost rank's step began with.

        returns   whether this process is live from here on, and takes the step with the other ranks
        """
        return False

    def after_step(self) -> None:
        """The optimizer has stepped: at its boundary a replay ends, and the rank goes live."""

    def refuse(self, reason: str, is_contradiction: bool = True) -> None:
        """Report that a replay has failed: then this does not return. `is_contradiction`: see from_rank.Mismatch."""

    def end_by_error(self, what: str) -> None:
        """An error of the script (`what`) is about to end it. Does not return if another replay may get further."""

    def refuse_end(self) -> None:
        """The script has ended: refuse a replay, which has not reached its boundary."""


class _Joining(Mode):
    is_alone = True


LIVE = Mode()
JOINING = _Joining()  # --mindio: a replacement that has not reached its train function


class Recovering(Protocol):
    """The recovery thread: replay/recovery.py."""

    def leave_to_thread(self, order: Any) -> None: ...
    def is_idle(self, limit_s: float) -> bool: ...
    def retire(self) -> None: ...
    def join(self, limit_s: float) -> None: ...
    def finish(self) -> None: ...


class Framed(Protocol):
    """The script's framework, which recovers by callbacks: framework/framework.py."""

    def issue(self, entry: Any, is_skipped: bool = False) -> Work: ...
    def may_connect_again(self) -> bool: ...


class Comparing(Protocol):
    """The comparison with the evidence of a lost rank: checks/proof.py."""

    def compare(self, place: Any, noted: Any, tensors: Any, what: str) -> bool: ...
    def end_step(self) -> None: ...
    def end(self, why_not: str = "") -> None: ...


class Expecting(Protocol):
    """The collectives that a replacement must issue: checks/replay_guard.py."""

    def check(self, entry: Any) -> None: ...
    def note_proved(self) -> None: ...
