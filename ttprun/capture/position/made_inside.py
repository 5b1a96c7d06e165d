"""What the script makes inside its training loop and keeps: process groups, optimizers, parameters added to these.

A replay jumps to the newest iteration, so what an earlier one has made is missing in it. That is known as soon as the
loop goes on, and reported then. The newest pass of a `while` loop is made again from the script's state at its start,
which is noted for loops that make something in each pass (the trials of a sweep). Begin with `note`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from ttprun.capture.position import call_site, loops
from ttprun.capture.records.packing import PassRecord
from ttprun.introspect.ownership import user_frames


class _Made:
    """One of these.

    why       a replay lacks it; complete sentence
    is_kept   whether it still exists
    passes    (loop, items that it had yielded) for each followed loop around its making
    after     the boundary that it was made after
    visited   the script's place at that boundary
    number    followed loops that had begun by then
    whiles    (key, start of the pass) for each `while` loop around its making, outermost first
    """

    __slots__ = ("after", "is_kept", "number", "passes", "visited", "whiles", "why")

    def __init__(self, why: str, is_kept: Callable[[], bool], frame: FrameType | None) -> None:
        self.why = why
        self.is_kept = is_kept
        whereabouts = call_site.look(frame)
        self.passes = [(loop.site, loop.position) for loop in whereabouts.around]
        loops.passes.update({key: loops.passes.get(key, "") for key in _keys(whereabouts)})
        _makers.update(_keys(whereabouts))
        self.whiles = [(key, loops.passes[key]) for key in whereabouts.whiles]
        self.after, self.visited = _newest
        self.number = loops.Begun.count

    def is_skipped(self, boundary: int, whereabouts: call_site.Whereabouts) -> bool:
        """Whether a replay up to a boundary at this place runs past its making."""
        whiles = [(key, start) for key, start in self.whiles if key in whereabouts.whiles]
        if any(loops.passes.get(key) is not start for key, start in whiles):
            return True
        trained = [(site, position) for site, position in self.passes if site.has_steps]
        if trained:
            now = {loop.site: loop.position for loop in whereabouts.around}
            return any(now.get(site) != position for site, position in trained)
        if whiles and not isinstance(whiles[-1][1], str):
            return False
        outermost = next(iter(whereabouts.around), None)
        if outermost is not None and outermost.earlier and outermost.number >= self.number:
            return False  # a library's loop has called the training again, and this belongs to its set-up
        # In a `while` loop: the same place was passed before and after it.
        return 0 < self.after < boundary - 1 and self.visited == whereabouts.place


_SHARE = 4
_looks = 0
_makers: set[str] = set()  # keys of the loops in whose newest pass something was made
_made: list[_Made] = []
_newest: tuple[int, list[list[str | int]]] = (0, [])  # boundary, and the script's place there


def note(what: str, cure: str, is_kept: Callable[[], bool], frame: FrameType | None) -> None:
    """The script makes something, which a replay would not make if it skips the iteration.

    what      with its verb: "a process group was made"
    cure      what the user can do
    is_kept   called later: whether it still exists
    frame     that makes it, of the calling thread
    """
    users = user_frames(frame)
    made = _Made(what, is_kept, frame)
    if not (made.after or made.passes or any(start for _, start in made.whiles)):
        return  # before the training
    where = f" ({users[-1].f_code.co_filename}:{users[-1].f_lineno})" if users else ""
    cure = next((start for _, start in made.whiles if start and isinstance(start, str)), cure)
    made.why = f"{what} inside the training loop{where}, in an iteration that a replay skips: {cure}"
    _made.append(made)


def why_skipped(boundary: int, whereabouts: call_site.Whereabouts) -> str:
    """Called at each boundary: what of it a replay up to here would lack; "" if nothing."""
    global _newest
    _newest = (boundary, whereabouts.place)
    if not _made:
        return ""
    _made[:] = [made for made in _made if made.is_kept()]
    return next((made.why for made in _made if made.is_skipped(boundary, whereabouts)), "")


def has_to_note(key: str) -> bool:
    """A loop whose passes are noted begins another one: whether that is noted, as the one before has made something.

    That takes a look at all variables, so it is done once in _SHARE boundaries at most.
    """
    global _looks
    del loops.passes[key]
    is_due = key in _makers and _looks * _SHARE < _newest[0]
    _looks += is_due
    _makers.discard(key)
    return is_due


def starts(whereabouts: call_site.Whereabouts) -> list[PassRecord]:
    """Where a replay to this place begins the passes of the loops around it."""
    around = [loops.passes.get(key, "") for key in _keys(whereabouts) if key in _makers]
    return [start for start in around if not isinstance(start, str)]


def _keys(whereabouts: call_site.Whereabouts) -> list[str]:
    return [*whereabouts.whiles, *(loop.site.key for loop in whereabouts.around)]


def forget() -> None:
    """The run of the script is over."""
    global _looks, _newest
    _made.clear()
    loops.passes.clear()
    _makers.clear()
    _looks, _newest = 0, (0, [])
