"""What capturing needs of whoever uses it; in a rank that is its Host (rank/session.py).

This file does not import torch: what watches the script's draws and files is there before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ttprun.introspect import host
from ttprun.introspect.costs import Costs
from ttprun.protocol.board import Board, Phase
from ttprun.protocol.reason import Reason

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")


class Life(Protocol):
    """How the script runs: live, or a replay.

    is_live       no replay is under way
    is_alone      nothing is communicated, and nothing is written
    newest_step   of a replay: of the lost rank's steps the newest that an answer may be of
    """

    @property
    def is_live(self) -> bool: ...
    @property
    def is_alone(self) -> bool: ...
    @property
    def newest_step(self) -> int: ...
    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None: ...
    def note_not_proved(self, text: str) -> None: ...


class Training(Protocol):
    """What is trained, and the comparison with a lost process."""

    def note(self, kind: int, name: str, values: Sequence[Any], what: str = "") -> bool:
        """The script is about to use these values; a replacement compares them with the lost process's.

        kind      evidence.BATCH, LOSS or INPUT
        name      of the loader or group
        values    of which the dense tensors are noted
        what      which one it is, for a person
        returns   whether it is equal to rounding alone
        """

    def report(self, equal: list[str], not_proved: list[str]) -> None:
        """Report what was found equal (a noun with its number), and what is not proved (a sentence each)."""

    def refuse(self, why: Reason) -> None:
        """The script gets something else than the lost process did (a sentence): it must not go on with that."""

    def weights(self) -> Sequence[torch.Tensor]:
        """The parameters of all optimizers, at the newest boundary."""


class Optimizers(Protocol):
    """The script's optimizers, all in the order in which it has made them; a module may be one."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """All living ones."""

    def number_of(self, optimizer: Any) -> int | None:
        """Its place among these; None if it is not among them."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Their parameters now; one in two optimizers comes twice."""

    def stepped_tensors(self) -> list[torch.Tensor]:
        """What they update now: all parameters, then all state, which an optimizer has from its first step on."""

    def counts_now(self) -> list[list[int]]:
        """Of each: numbers of its parameters and of its state tensors."""


class Host(Protocol):
    """The process in which something is captured.

    rank         by which its files and lines are distinguished
    applied      number of the newest boundary
    generation   how often the job has been recovered
    costs        what we take of a step
    is_over      the script has ended with an exception
    address      of this node; "": all ranks are on one node
    row          this rank's fields on the board
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def run_dir(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def board(self) -> Board: ...
    @property
    def row(self) -> Any: ...
    @property
    def applied(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def mode(self) -> Life: ...
    @property
    def costs(self) -> Costs: ...
    @property
    def training(self) -> Training: ...
    def __getitem__(self, kind: type[_T]) -> _T: ...
    def touch(self, phase: Phase) -> None: ...
    def give_up_protection(self, reason: Reason) -> None: ...


def current() -> Host | None:
    """This process's host; None if it has none."""
    carrier: Host | None = host.current()
    return carrier
