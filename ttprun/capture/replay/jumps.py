"""Up to the place where a replay begins, loops jump to the lost rank's positions, and iterators are made at theirs.

Begin with `Jumps.enter`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cached_property
from types import FrameType
from typing import Any

from ttprun.capture.data import loaders
from ttprun.capture.position import loops
from ttprun.capture.records.boundary_record import LoopRecord, Record
from ttprun.introspect import random_state
from ttprun.introspect.frames import location_key, place, user_frames
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
        """The loops that it jumps into or skips."""
        return sites_of(self._before)

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


def sites_of(record: Record) -> frozenset[str]:
    """The loops that a replay up to this record jumps into or skips: all others it runs as a run does."""
    return frozenset([*record.fields.has_steps, *(loop.site for loop in record.fields.active())])


def _are_early(recorded: list[LoopRecord], frame: FrameType) -> bool:
    """Whether one of these loops has still to take items, before the one in which the lost rank has first stepped."""
    active = {loop.site.key: loop.position for loop in loops.of_frame(frame)}
    return any(loop.lead > 1 and active.get(loop.site, loop.position) < loop.position for loop in recorded)
