"""What a replay finds: what is equal to the lost rank's, what is not proved, and what is refused for that."""

from __future__ import annotations

from collections.abc import Callable

from ttprun.capture.host import Host
from ttprun.capture.records.boundary_record import Record
from ttprun.capture.values import Restore
from ttprun.introspect import random_state

_MOST_DOUBTS = 5  # that are named


class Findings:
    """Of one replay.

    equal        what was equal to the lost rank's
    not_proved   what may be other than it was for the lost rank
    """

    def __init__(
        self, host: Host, refuse: Callable[..., None], is_decisive: Callable[[], bool], is_strict: bool
    ) -> None:
        """The methods are those of the replay; is_strict: what is not the lost rank's is refused in any case."""
        self._host = host
        self._refuse = refuse
        self._is_decisive = is_decisive
        self._is_strict = is_strict
        self.equal: list[str] = []
        self.not_proved: list[str] = []

    def report(self) -> None:
        """The boundary is reached."""
        self._host.training.report(self.equal, self.not_proved)

    def note_equal(self, record: Record) -> None:
        """The target's place is equal, with its loops and batches: note that for the report."""
        loops_ = sum(map(len, record.fields.loops))
        batches = [it for it in record.fields.loaders if it["batch"]]
        counted = [(loops_, "loop", "loops"), (len(batches), "batch of a DataLoader", "batches of DataLoaders")]
        parts = [f"{count} {plural if count != 1 else singular}" for count, singular, plural in counted if count]
        self.equal.append(f"{', '.join(['place in the script', *parts])} at boundary {record.fields.boundary}")

    def compare_random_states(self, record: Record) -> None:
        """Compare the random states after a step that began with the lost rank's.

        They differ if that step depends on something that is not recorded, or if the weights, which are not the lost
        rank's yet, decide how many numbers are drawn. The evidence of the next step separates these two cases, if
        there is any.
        """
        here = random_state.capture()
        names = sorted(here.keys() & record.fields.rng.keys())
        differing = [name for name in names if here[name] != record.fields.rng[name]]
        at = f"at boundary {record.fields.boundary}"
        if not differing:
            self.equal.append(f"random states ({', '.join(names)}) on arriving {at}")
            return
        difference = f"the replay has other random states ({', '.join(differing)}) than the lost rank {at}"
        if not self._is_decisive():
            self._refuse(
                f"the script cannot be replayed: {difference}: its draws depend on something that is not recorded, or "
                "on the weights; and the lost rank has left no evidence of the next step"
            )
        self.not_proved.append(f"{difference}; they were set to the lost rank's")

    def weigh(self, restore: Restore, is_joining: bool) -> None:
        """Variables are not the lost rank's: refuse them, or leave it to the evidence of the next step.

        restore      has compared them
        is_joining   see to_rank.Replay
        """
        doubts, unrecorded = restore.doubts, restore.unrecorded
        self.not_proved += [name for name in restore.named if name not in self.not_proved]
        if not (doubts or unrecorded):
            return
        shown = "; ".join([*doubts, *unrecorded][:_MOST_DOUBTS])
        if self._is_strict:
            self._refuse(f"the script cannot be replayed: {shown}")
        if is_joining and not self._is_decisive():
            self._refuse(
                f"{shown}; and the lost rank had left no loss of its step that would show whether this matters",
                is_contradiction=False,
            )
        more = [f"and {len(doubts) - _MOST_DOUBTS} more variables"] if len(doubts) > _MOST_DOUBTS else []
        self.not_proved += doubts[:_MOST_DOUBTS] + more
