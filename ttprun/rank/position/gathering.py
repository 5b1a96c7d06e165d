"""Loops around an optimizer step that gather something where nobody can see it.

A comprehension under way, and a call such as sum(...) or list(map(...)), hold what they have so far in no variable: it
is in no record, and a replacement's result would be short of it. Of calls only the commonest are known, by their names;
a generator expression tells of any other that asks it for its items. What an instruction belongs to is asked of the
source, since the compiler puts comprehensions into the code around them (from Python 3.12 on), and handlers behind it.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from ttprun.rank.position import ast_transform
from ttprun.rank.position.control_flow import instruction_at

_WITH_LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ASKED_BY_LOOPS = frozenset({"FOR_ITER", "SEND"})
_GATHER = frozenset({
    "all", "any", "dict", "frozenset", "functools.reduce", "list", "max", "min", "reduce", "set", "sorted", "sum",
    "tuple",
})  # fmt: skip
# First line, first column, last line, last column. Python may keep no columns of its instructions: -X no_debug_ranges.
Span = tuple[int, int, int, int]
_UNKNOWN = -1


@dataclass(frozen=True)
class _Loops:
    """The parts of a module's source that are evaluated in loops whose position nobody knows.

    parts   what a comprehension evaluates for each item; of a generator expression, what its inner loops do
    apart   what in them is a function or generator of its own, and runs whenever that is asked
    """

    parts: list[Span]
    apart: list[Span]

    def hold(self, at: Span) -> bool:
        """Whether what stands there is evaluated in these loops, or may be, if only its line is known."""
        is_apart = _has_columns(at) and any(_is_within(at, one) for one in self.apart)
        return not is_apart and any(_is_within(at, part) for part in self.parts)


@dataclass(frozen=True)
class _Source:
    """What gathers something in a module: calls of functions that take all items of what they are given, and loops."""

    calls: dict[Span, str]
    loops: list[_Loops]

    def call_at(self, at: Span) -> str:
        """The name of the function that is called there, or may be, if only its line is known; "" if there is none."""
        if _has_columns(at):
            return self.calls.get(at, "")
        return next((name for span, name in self.calls.items() if _is_within(at, span)), "")


def look(frame: FrameType, outer: FrameType | None) -> str:
    """What gathers something in a frame of the user's that stands at its present instruction; "" if nothing does.

    outer   the user's frame that is next outwards
    """
    code = frame.f_code
    source = _read(ast_transform.followed.get(code.co_filename, b""))
    at = _span_of(code, frame.f_lasti)
    if any(loops.hold(at) for loops in source.loops):
        return "a comprehension"
    if code.co_name == "<genexpr>" and outer is frame.f_back and outer is not None and not _stands_in_loop(outer):
        return "a generator expression that a call takes all items of"
    name = source.call_at(at)
    return name and f"a call of {name}"


def _stands_in_loop(frame: FrameType) -> bool:
    """Whether it asks another generator by a loop or `yield from` of its own, which keeps nothing."""
    code = frame.f_code
    return dis.opname[code.co_code[instruction_at(code, frame.f_lasti)]] in _ASKED_BY_LOOPS


def _span_of(code: CodeType, instruction: int) -> Span:
    """Where an instruction stands in the source; nowhere if it belongs to nothing there."""
    told = next(itertools.islice(code.co_positions(), instruction // 2, None))
    line, last_line, column, last_column = (_UNKNOWN if place is None else place for place in told)
    return line, column, last_line, last_column


@functools.cache
def _read(source: bytes) -> _Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has said it when the module was compiled
        nodes = list(ast.walk(ast.parse(source)))
    calls = {
        _span(node): name
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name | ast.Attribute)
        and (name := ast.unparse(node.func)) in _GATHER
    }
    return _Source(calls, [_loops_of(node) for node in nodes if isinstance(node, _WITH_LOOPS)])


def _loops_of(node: Any) -> _Loops:
    """The hidden loops of a comprehension, or of a generator expression, whose outermost iterator is a variable."""
    parts = _inside(node, node.generators[isinstance(node, ast.GeneratorExp) :])
    return _Loops([*map(_span, parts)], [*map(_span, _functions_in(parts))])


def _inside(node: Any, loops: list[ast.comprehension]) -> list[ast.expr]:
    """What is evaluated within these loops of a node, its innermost ones: not what the first of them runs over."""
    if not loops:
        return []
    items = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    of_rounds = [part for loop in loops for part in (loop.target, *loop.ifs)]
    return [*items, *of_rounds, *(loop.iter for loop in loops[1:])]


def _functions_in(parts: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """What of the parts is evaluated by a function or generator of its own."""
    for node in itertools.chain.from_iterable(map(ast.walk, parts)):
        if isinstance(node, ast.Lambda):
            yield node.body
        elif isinstance(node, ast.GeneratorExp):
            yield from _inside(node, node.generators)


def _span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _has_columns(at: Span) -> bool:
    return at[1] != _UNKNOWN


def _is_within(inner: Span, outer: Span) -> bool:
    """Whether it is; of what has no columns, whether its line is."""
    if not _has_columns(inner):
        return outer[0] <= inner[0] <= outer[2]
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]
