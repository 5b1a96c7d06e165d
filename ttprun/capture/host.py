"""The process in which something is captured (introspect/current_rank.py), and the script's optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from ttprun.introspect.current_rank import Rank as Host
from ttprun.introspect.current_rank import current

if TYPE_CHECKING:
    import torch

__all__ = ["Host", "Optimizers", "current"]


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
