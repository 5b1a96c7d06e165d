"""Loops around an optimizer step whose results so far are in no variable.

A running comprehension, and a call such as sum(...) or list(map(...)), keep their results so far outside of variables:
they are in no record, and would be missing from a replacement's result. Only the most common calls are known, by name;
other calls are recognized if they consume a generator expression. The place of an instruction is looked up in the
source, since the compiler inlines comprehensions (from Python 3.12 on), and moves handlers to the end.
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

from ttprun.capture.position import ast_transform
from ttprun.capture.position.control_flow import instruction_at

_WITH_LOOPS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ASKED_BY_LOOPS = frozenset({"FOR_ITER", "SEND"})
_GATHER = frozenset({
    "all", "any", "dict", "frozenset", "functools.reduce", "list", "max", "min", "reduce", "set", "sorted", "sum",
    "tuple",
})  # fmt: skip
# First line, first column, last line, last column. With -X no_debug_ranges Python keeps no columns.
Span = tuple[int, int, int, int]
_UNKNOWN = -1


@dataclass(frozen=True)
class _Loops:
    """The parts of a module's source that are evaluated in loops whose position is unknown.

    parts   what a comprehension evaluates for each item; of a generator expression, its inner loops
    excluded  functions and generators inside these parts, which may run at any time
    """

    parts: list[Span]
    excluded: list[Span]

    def hold(self, at: Span) -> bool:
        """Whether the code at a place is evaluated in these loops, or may be, if only its line is known."""
        is_excluded = _has_columns(at) and any(_is_within(at, part) for part in self.excluded)
        return not is_excluded and any(_is_within(at, part) for part in self.parts)


@dataclass(frozen=True)
class _Source:
    """What collects results in a module: calls of functions that consume an iterable, and loops."""

    calls: dict[Span, str]
    loops: list[_Loops]

    def call_at(self, at: Span) -> str:
        """The name of the function that is called there, or may be, if only its line is known; "" if none is."""
        if _has_columns(at):
            return self.calls.get(at, "")
        return next((name for span, name in self.calls.items() if _is_within(at, span)), "")


def look(frame: FrameType, outer: FrameType | None) -> str:
    """What collects results at the current instruction of a frame of the user's; "" if nothing does.

    outer   the next outer frame of the user's
    """
    code = frame.f_code
    source = _read(ast_transform.followed.get(code.co_filename, b""))
    at = _span_of(code, frame.f_lasti)
    if any(loops.hold(at) for loops in source.loops):
        return "a comprehension"
    if code.co_name == "<genexpr>" and outer is frame.f_back and outer is not None and not _stands_in_loop(outer):
        return "a generator expression that a call consumes"
    name = source.call_at(at)
    return name and f"a call of {name}"


def _stands_in_loop(frame: FrameType) -> bool:
    """Whether it consumes another generator by a loop or `yield from`, which keeps nothing."""
    code = frame.f_code
    return dis.opname[code.co_code[instruction_at(code, frame.f_lasti)]] in _ASKED_BY_LOOPS


def _span_of(code: CodeType, instruction: int) -> Span:
    """The place of an instruction in the source; _UNKNOWN if it has none."""
    span = next(itertools.islice(code.co_positions(), instruction // 2, None))
    line, last_line, column, last_column = (_UNKNOWN if place is None else place for place in span)
    return line, column, last_line, last_column


@functools.cache
def _read(source: bytes) -> _Source:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python has warned when the module was compiled
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
    """What is evaluated within these innermost loops of a node, without the iterable of the first of them."""
    if not loops:
        return []
    items = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
    of_rounds = [part for loop in loops for part in (loop.target, *loop.ifs)]
    return [*items, *of_rounds, *(loop.iter for loop in loops[1:])]


def _functions_in(parts: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The parts that are evaluated by a function or generator of their own."""
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
    """Whether `inner` is within `outer`; without columns, whether its line is."""
    if not _has_columns(inner):
        return outer[0] <= inner[0] <= outer[2]
    return outer[:2] <= inner[:2] and inner[2:] <= outer[2:]
