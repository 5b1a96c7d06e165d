"""What a replay finds: what is equal to the lost rank's, what is not proved, and what is refused for that.

And where the script stands, compared with a record: code, loops, batches and optimizers.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from ttprun.capture.data import loaders
from ttprun.capture.position import loops
from ttprun.capture.records.boundary_record import BoundaryRecord, Record
from ttprun.capture.values import Restore
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.frames import place, user_frames
from ttprun.protocol.reason import Reason

if TYPE_CHECKING:
    import torch


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


def difference_of_place(record: BoundaryRecord, frame: FrameType, is_before_target: bool = False) -> Reason:
    """How the positions of the code and its loops differ from a record's, "" if they are the same.

    is_before_target   do not compare items of iterators that are about to be restored, such as a counting generator
    """
    frames = user_frames(frame)
    here = place(frames)
    if here != record.place:
        return Reason("other-place", f"it is at {_shown(here)}, the lost rank was at {_shown(record.place)}")
    for user_frame, recorded in zip(frames, record.loops, strict=True):
        active = loops.of_frame(user_frame)
        positions = [[loop.site.key, loop.position, loop.current] for loop in active]
        expected = [[loop.site, loop.position, loop.current] for loop in recorded]
        if is_before_target and len(active) == len(recorded):
            for at, loop in enumerate(recorded):
                if loop.over is not None:
                    expected[at][2] = positions[at][2]
        if positions != expected:
            return Reason("other-place", f"its loops are at {positions}, the lost rank's at {expected}")
    return Reason()


def difference_of_stepping(record: BoundaryRecord, number: int | None) -> Reason:
    """Another optimizer than in a record is about to step at the same place: e.g. several do in a hook of the backward.

    number   of the one that is about to step; None: it is not known
    """
    if None in (number, record.stepping) or number == record.stepping:
        return Reason()
    return Reason("other-place", f"optimizer {number} steps there, in the lost rank it was optimizer {record.stepping}")


def _shown(where: list[list[Any]]) -> str:
    return " > ".join(f"{function}:{line}" for _, function, line in where) or "(no user code)"


def difference_of_batches(record: BoundaryRecord, before: BoundaryRecord | None, is_target: bool) -> Reason:
    """How what the DataLoaders have yielded differs from a record, "" if it does not.

    before      where the replay began; None: from the top
    is_target   compare the batches, too, of loaders that were used since
    """
    mine, lost = _by_name(loaders.records()), _by_name(record.loaders)
    if len(mine) > len(lost):
        gc.collect()  # one that the script has dropped may be part of a cycle, which the lost rank had collected
        mine = _by_name(loaders.records())
    yielded, expected = ([[it["name"], it["yielded"]] for it in records] for records in (mine, lost))
    if [count for _, count in yielded] != [count for _, count in expected]:
        return Reason("other-batch", f"its DataLoaders have yielded {yielded}, the lost rank's {expected}")
    used = {tuple(it["name"]): it["yielded"] for it in before.loaders} if before else {}
    if is_target and any(
        here["batch"] != there["batch"] and there["yielded"] != used.get(tuple(there["name"]))
        for here, there in zip(mine, lost, strict=True)
    ):
        return Reason("other-batch", "a DataLoader has yielded another batch than in the lost rank")
    return Reason()


def difference_of_optimizers(record: BoundaryRecord, optimizers: Optimizers) -> Reason:
    """How the script's optimizers differ from a record's in their parameters, "" if they do not."""
    counts = [parameters for parameters, _ in optimizers.counts_now()]
    before = [parameters for parameters, _ in record.stepped]
    if len(counts) != len(before):
        return Reason(
            "made-inside-the-loop", f"the script has made {len(counts)} optimizers in the replay, {len(before)} before"
        )
    for index, (here, lost) in enumerate(zip(counts, before, strict=True)):
        if here != lost:
            return Reason(
                "made-inside-the-loop",
                f"optimizer {index} has {lost} parameters in the lost rank and {here} in the replay, which skips "
                "earlier steps: add parameters (add_param_group) before the first step",
            )
    return Reason()


def _by_name(iterators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted, independent of the order in which they were made."""
    return sorted(iterators, key=lambda it: (it["name"], it["yielded"]))


_MOST_DOUBTS = 5  # that are named


class Findings:
    """Of one replay.

    equal        what was equal to the lost rank's
    not_proved   what may be other than it was for the lost rank
    """

    def __init__(
        self, host: Rank, refuse: Callable[..., None], is_decisive: Callable[[], bool], is_strict: bool
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
        self._host.observers.report(self.equal, self.not_proved)

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
                Reason(
                    "other-random-states",
                    f"the script cannot be replayed: {difference}: its draws depend on something that is not "
                    "recorded, or on the weights; and the lost rank has left no evidence of the next step",
                )
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
        first, shown = (doubts or unrecorded)[0], "; ".join(map(str, [*doubts, *unrecorded][:_MOST_DOUBTS]))
        if self._is_strict:
            self._refuse(first.within(f"the script cannot be replayed: {shown}"))
        if is_joining and not self._is_decisive():
            self._refuse(
                first.within(
                    f"{shown}; and the lost rank had left no loss of its step that would show whether this matters"
                ),
                is_contradiction=False,
            )
        more = [f"and {len(doubts) - _MOST_DOUBTS} more variables"] if len(doubts) > _MOST_DOUBTS else []
        self.not_proved += [*map(str, doubts[:_MOST_DOUBTS]), *more]
