"""Loops around an optimizer step that gather something where nobody can see it.

A comprehension under way, and a call such as sum(...) or list(map(...)), hold what they have so far in no variable: it
is in no record, and a replacement's result would be short of it. Of calls only the commonest are known, by their names;
a generator expression tells of any other that asks it for its items.
"""

from __future__ import annotations

import dis
from types import CodeType, FrameType

from ttprun.rank import rewrite
from ttprun.rank.values.suspended import bodies

_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})  # in frames of their own, before Python 3.12
_GENERATOR = "<genexpr>"
_ASKED_BY_LOOPS = frozenset({"FOR_ITER", "SEND"})
# By the code's id, since a code takes long to hash; it is held here, so that its id stays its own.
_known: dict[int, tuple[CodeType, list[range], dict[int, str]]] = {}


def loop_around(frames: list[FrameType], followed: list[int]) -> str:
    """The innermost such loop that is under way in the user's frames (outermost first), with its place; "" if none.

    followed   how many `for` loops of each frame are under way and followed
    """
    found = ""
    outer: FrameType | None = None
    for frame, count in zip(frames, followed, strict=True):
        kind = _kind_of(frame, outer, count)
        if kind:
            found = f"{kind} ({frame.f_code.co_filename}:{frame.f_lineno})"
        outer = frame
    return found


def _kind_of(frame: FrameType, outer: FrameType | None, followed: int) -> str:
    code = frame.f_code
    known = _known.get(id(code))
    if known is None:
        known = _known[id(code)] = (code, bodies(code), _calls(code))
    _, for_loops, calls = known
    is_generator = code.co_name == _GENERATOR
    active = sum(frame.f_lasti in body for body in for_loops) - is_generator  # its outermost iterator is a variable
    if code.co_name in _COMPREHENSIONS or active > followed:
        return "a comprehension"
    if is_generator and outer is frame.f_back and outer is not None and not _stands_in_loop(outer):
        return "a generator expression that a call takes all items of"
    return calls.get(frame.f_lasti, "")


def _stands_in_loop(frame: FrameType) -> bool:
    """Whether it asks another generator by a loop or `yield from` of its own, which keeps nothing."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _ASKED_BY_LOOPS


def _calls(code: CodeType) -> dict[int, str]:
    """The instructions that call what gathers items, and which call it is."""
    found = {}
    for number, where in enumerate(code.co_positions()):
        name = rewrite.gathering.get((code.co_filename, *where))
        if name is not None:
            found[2 * number] = f"a call of {name}"
    return found
