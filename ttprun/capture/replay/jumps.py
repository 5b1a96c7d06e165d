"""How a replay comes to the lost rank's place, and what it finds there.

Up to the place where a replay begins, loops jump to the lost rank's positions, and iterators are made at theirs
(`Jumps`). Where the script stands then is compared with a record: code, loops, batches and optimizers. `Findings` holds
what is equal to the lost rank's, what is not proved, and what is refused for that. Begin with `Jumps.enter`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from ttprun.capture.data import loaders
from ttprun.capture.position import loops
from ttprun.capture.records.packing import BoundaryRecord, LoopRecord, Record
from ttprun.capture.values import Restore
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.ownership import location_key, place, user_frames
from ttprun.protocol.reason import Reason

_MOST_SKIPS = 100_000  # of one loop: a `while` loop around it may count by itself
_EARLY = object()  # a loop inside one that has not come to the lost rank's position: it runs as in a run


class _Skip:
    """Token of a loop that had ended in the lost rank, and would only train again."""


class Jumps:
    """Loops and iterators of a replay, up to the place where it begins.

    before      the record of that place
    jump        makes a loop that begins in the middle
    refuse      reports why the replay has failed; does not return
    entered     how often the script has begun each other loop
    loops_used  the recorded loops that it has jumped into, by id
    """

    def __init__(self, before: Record, jump: Callable[..., Any], refuse: Callable[[Reason], None]) -> None:
        self._before = before
        self._jump = jump
        self._refuse = refuse
        self.entered: Counter[str] = Counter()
        self.loops_used: set[int] = set()
        self._iterators_used: set[int] = set()
        self._made_earlier: Counter[tuple[str, str]] = Counter()
        self._skipped: Counter[str] = Counter()  # by loop, how often it was skipped

    @cached_property
    def sites(self) -> frozenset[str]:
        """The loops that it jumps into or skips: all others it runs as a run does."""
        return frozenset([*self._before.fields.has_steps, *(loop.site for loop in self._before.fields.active())])

    def enter(self, site: loops.Site, frame: FrameType) -> Any:
        """A loop begins: the token for `loop`, as loops.take_over asks for it."""
        if site.key not in self.sites:
            # Those of a long set-up, mostly: as in a run, they are not followed for ever.
            self.entered[site.key] += 1
            return random_state.capture() if self.entered[site.key] <= loops.TRIALS else None
        recorded = self._loop_to_jump(site, frame)
        if recorded is None:
            return self._skip(site) if site.key in self._before.fields.has_steps else random_state.capture()
        if recorded is _EARLY:
            return random_state.capture()
        if recorded.began_with is not None:
            random_state.restore(recorded.began_with)
        return recorded

    def _skip(self, site: loops.Site) -> type[_Skip]:
        """Skip a training loop that the lost rank had finished; refuses if the script never gets past it."""
        self._skipped[site.key] += 1
        if self._skipped[site.key] > _MOST_SKIPS:
            self._refuse(
                Reason(
                    "other-place",
                    f"the replay does not get past the loop at {site.key}, which the lost rank had finished: a "
                    "`while` loop around it depends on its steps; write that one as a `for` loop",
                )
            )
        return _Skip

    def _loop_to_jump(self, site: loops.Site, frame: FrameType) -> Any:
        frames = user_frames(frame)
        depth = len(frames) - 1
        recorded_place = self._before.fields.place
        here = place(frames)
        candidates: list[LoopRecord] = []
        if (
            depth < len(recorded_place)
            and here[:depth] == recorded_place[:depth]
            and here[depth][:2] == recorded_place[depth][:2]
        ):
            candidates += self._before.fields.loops[depth]
        candidates += self._before.fields.generator_loops
        for at, candidate in enumerate(candidates):
            if candidate.site == site.key and id(candidate) not in self.loops_used:
                if _are_early(candidates[:at], frames[-1]):
                    return _EARLY
                if candidate.earlier > self._skipped[site.key]:
                    return None  # of a training before the lost rank's
                self.loops_used.add(id(candidate))
                return candidate
        return None

    def loop(self, site: loops.Site, token: Any, iterable: Iterable[Any]) -> Any:
        """The loop itself: skipped, begun in its middle, or as in a run.

        token      what `enter` has returned for it; None: it runs as if it were not followed
        iterable   the value of the `for`'s EXPR
        returns    what the `for` runs over
        """
        if token is _Skip:
            return loops.Loop(site, None, ())
        if isinstance(token, LoopRecord):
            if token.site in self._before.fields.has_steps:
                site.note_step()
            site.is_outer = token.item_rng is not None
            return self._jump(site, token, iterable)
        return iterable if token is None else loops.Loop(site, token, iterable)

    def iterator_to_make(self, name: list[Any]) -> dict[str, Any] | None:
        """The record of the lost rank's iterator over the loader of this name, None if it had none."""
        unused = [(i, it) for i, it in enumerate(self._before.fields.loaders) if i not in self._iterators_used]
        same_name = [(i, it) for i, it in unused if it["name"] == name]
        # A loader that each epoch makes anew has another number here. One that was made here is not this one, but made
        # beside it (training and validation in one call), and is iterated over later.
        made_here = loaders.made().get(name[0], 0)
        same_place = [(i, it) for i, it in unused if it["name"][0] == name[0] and it["name"][1] > made_here]
        chosen = same_name[-1:] or (same_place if len(same_place) == 1 else [])
        for index, iterator in chosen:
            if self._is_of_set_up(iterator):
                return None
            self._iterators_used.add(index)
            record: dict[str, Any] = iterator
            return record
        return None

    def _is_of_set_up(self, recorded: dict[str, Any]) -> bool:
        """Whether an iterator that is made now is one that had ended before the lost rank's first step."""
        here = location_key()
        key = (str(recorded["name"]), here)
        if here == recorded.get("place") or self._made_earlier[key] >= recorded.get("earlier", []).count(here):
            return False
        self._made_earlier[key] += 1
        return True


def _are_early(recorded: list[LoopRecord], frame: FrameType) -> bool:
    """Whether one of these loops has still to take items, before the one in which the lost rank has first stepped."""
    active = {loop.site.key: loop.position for loop in loops.of_frame(frame)}
    return any(loop.lead > 1 and active.get(loop.site, loop.position) < loop.position for loop in recorded)


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
