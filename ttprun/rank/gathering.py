"""Loops around an optimizer step that gather something where nobody can see it.

A comprehension under way, and a call such as sum(...) or list(map(...)), hold what they have so far in no variable: it
is in no record, and a replacement's result would be short of it. Of calls only the commonest are known, by their names;
a generator expression tells of any other that asks it for its items.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import warnings
from types import CodeType, FrameType

from ttprun.rank import rewrite
from ttprun.rank.control_flow import instruction_at
from ttprun.rank.values.suspended import bodies

_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})  # in frames of their own, before Python 3.12
_COMPREHENSION = "a comprehension"
_GENERATOR = "<genexpr>"
_ASKED_BY_LOOPS = frozenset({"FOR_ITER", "SEND"})
_GATHER = frozenset({
    "all", "any", "dict", "frozenset", "functools.reduce", "list", "max", "min", "reduce", "set", "sorted", "sum",
    "tuple",
})  # fmt: skip
# First line, last line, first column, last column.
Position = tuple[int | None, int | None, int | None, int | None]
Gathering = tuple[str, int]  # what its instruction alone tells; how many loops are under way there


def look(frame: FrameType, outer: FrameType | None) -> Gathering:
    """What can be told once and for all of a frame of the user's that stands at its present instruction.

    outer   the user's frame that is next outwards
    """
    code = frame.f_code
    is_generator = code.co_name == _GENERATOR
    active = sum(frame.f_lasti in body for body in bodies(code)) - is_generator  # its outermost iterator is a variable
    if code.co_name in _COMPREHENSIONS:
        return _COMPREHENSION, active
    if is_generator and outer is frame.f_back and outer is not None and not _stands_in_loop(outer):
        return "a generator expression that a call takes all items of", active
    return _call_at(code, frame.f_lasti), active


def told(gathering: Gathering, followed: int) -> str:
    """What gathers something in a frame; "" if nothing does.

    followed   how many `for` loops of the frame are under way and followed
    """
    kind, active = gathering
    return _COMPREHENSION if active > followed else kind


def _stands_in_loop(frame: FrameType) -> bool:
    """Whether it asks another generator by a loop or `yield from` of its own, which keeps nothing."""
    code = frame.f_code
    return dis.opname[code.co_code[instruction_at(code, frame.f_lasti)]] in _ASKED_BY_LOOPS


def _call_at(code: CodeType, instruction: int) -> str:
    """Which call of what gathers items an instruction is; "" if it is none."""
    where = next(itertools.islice(code.co_positions(), instruction // 2, None))
    name = _calls_in(rewrite.followed.get(code.co_filename, b"")).get(where)
    return "" if name is None else f"a call of {name}"


@functools.cache
def _calls_in(source: bytes) -> dict[Position, str]:
    """The calls in a module of functions that take all items of what they are given: where, and the function's name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has said it when the module was compiled
        tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset): name
        for call in calls
        if isinstance(call.func, ast.Name | ast.Attribute) and (name := ast.unparse(call.func)) in _GATHER
    }
