"""What the folders of a rank call in those above them: Session (session.py) has one attribute for each class here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ttprun.groups import host

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    import torch

    from ttprun.protocol.reason import Reason


class Training(host.Training):
    """What the libraries ask and report of the training; of a rank without hooks. With them: step/training.py."""

    def note(self, kind: int, name: str, values: Sequence[Any], what: str = "") -> bool:
        """See capture/host.py."""
        return False

    def report(self, equal: list[str], not_proved: list[str]) -> None:
        """See capture/host.py."""

    def refuse(self, why: Reason) -> None:
        """See capture/host.py."""

    def weights(self) -> Sequence[torch.Tensor]:
        """See capture/host.py."""
        return ()


class Mode(host.Life):
    """How the script runs: live, unless a subclass says otherwise. Replay and its kind: replay/replay_run.py.

    boundary      of a replay, that it must reach
    newest_step   of a replay: of the lost rank's steps the newest that an answer may be of
    difference    why the first step of a replay was not where it begins
    """

    boundary = 0
    difference = ""

    @property
    def newest_step(self) -> int:
        """See above."""
        return 0

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """The record of the lost rank's iterator over the loader of this name; None if it had none."""
        return None

    def note_not_proved(self, text: str) -> None:
        """The script has found something that may be other than it was for the lost rank."""

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


class Comparing(Protocol):
    """The comparison with the evidence of a lost rank: checks/proof.py."""

    def compare(self, place: Any, noted: Any, tensors: Any, what: str) -> bool: ...
    def end_step(self) -> None: ...
    def end(self, why_not: str = "") -> None: ...
