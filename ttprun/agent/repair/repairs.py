"""How lost ranks get their state back: what the machine's orders come to in the ranks, in one of two ways.

By default a replacement runs the script in replay (`replays.py`); with `--mindio` the ranks answer by callbacks of
their framework (`frameworks.py`). A node has one of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ttprun import recovery
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.protocol import from_rank, mindio, to_rank


class Repairs(ABC):
    """Carries out the orders that the two ways carry out differently, and takes what only one's ranks report."""

    # Whoever has nothing to do then leaves these as they are.

    @property
    def is_paused(self) -> bool:
        """All ranks wait on purpose: nobody is expected to get on."""
        return False

    def begin_group(self) -> None:  # noqa: B027
        """All ranks are new."""

    def look(self) -> None:  # noqa: B027
        """Time has passed."""

    def note_incident(self, incident: recovery.Incident) -> None:  # noqa: B027
        """How an incident stands."""

    def repair_type(self) -> mindio.Strategy | None:
        """What the recovery that has just begun comes to, as a framework's handlers are given it; None without one."""
        return None

    def expect(self, lost: Sequence[int]) -> None:  # noqa: B027
        """Lost ranks are to be repaired: they are waited for again, if they were away."""

    def call_back(self, reason: str) -> str:
        """Have the ranks that are away train again; returns why they cannot, "" if they are on their way.

        reason   who has asked
        """
        return "no rank is away"

    # Orders.

    @abstractmethod
    def replay(self, action: to_rank.Replay) -> None:
        """Have a replacement set itself up as far as the boundary."""

    @abstractmethod
    def send_state(self, action: to_rank.SendState) -> None:
        """Have ranks pass state over to the replacements."""

    def load_mirror(self, action: to_rank.LoadMirror) -> None:
        """Have a replacement load what its rank had mirrored."""
        raise NotImplementedError("a framework keeps no mirrors")

    @abstractmethod
    def resume(self, action: to_rank.Resume) -> None:
        """Have all ranks connect, and go on."""

    @abstractmethod
    def persist(self, action: recovery.Persist) -> None:
        """Have the survivors, who are all quiesced, write a checkpoint; the answer is StatePersisted."""

    # Reports.

    def take(self, slot: RankSlot, message: mindio.Report | from_rank.OfAlignment) -> None:  # noqa: B027
        """A rank reports what only one of the two ways of repair is concerned with."""
