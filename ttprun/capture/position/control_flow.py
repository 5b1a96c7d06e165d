"""Instructions of a function: where in the source one comes from, and which are in loops."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

_CACHE = dis.opmap["CACHE"]
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ENDS = ("RETURN_", "RAISE_", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")  # the next instruction does not follow these


def instruction_at(code: CodeType, offset: int) -> int:
    """The start of the instruction of a frame's `f_lasti`, which for some calls is the end of their cache."""
    instructions = code.co_code
    while offset > 0 and instructions[offset] == _CACHE:
        offset -= 2
    return offset


def position_of(frame: FrameType) -> tuple[str, int, int | None]:
    """The name of a frame's instruction, and line and column in the source that it comes from.

    The column, in bytes, is None where Python has kept none (-X no_debug_ranges).
    """
    code = frame.f_code
    at = instruction_at(code, frame.f_lasti)
    line, _, column, _ = next(itertools.islice(code.co_positions(), at // 2, None), (None,) * 4)
    return dis.opname[code.co_code[at]], line or frame.f_lineno, column


@dataclass(frozen=True)
class Flow:
    """The instructions of a code, and the offsets of those that may follow each one, by its offset."""

    steps: list[dis.Instruction]
    following: dict[int, set[int]]


def flow_of(code: CodeType) -> Flow:
    """The paths through a code. An exception may lead from each instruction to its handler."""
    steps = list(dis.get_instructions(code))
    following: dict[int, set[int]] = {step.offset: set() for step in steps}
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if after is not None and not step.opname.startswith(_ENDS):
            following[step.offset].add(after.offset)
        if step.opcode in _JUMPS:
            following[step.offset].add(step.argval)
    bytecode: Any = dis.Bytecode(code)
    for handled in bytecode.exception_entries:
        for offset in following.keys() & range(handled.start, handled.end):
            following[offset].add(handled.target)
    return Flow(steps, following)


def leading_of(following: Mapping[int, Iterable[int]]) -> dict[int, set[int]]:
    """The offsets of the instructions that may come before each one."""
    leading: dict[int, set[int]] = {offset: set() for offset in following}
    for offset, others in following.items():
        for other in others:
            leading[other].add(offset)
    return leading


@functools.cache
def looping(code: CodeType) -> frozenset[int]:
    """The instructions inside a `while` or `for` loop; awaiting is not a loop.

    A jump backward alone is not a loop: from Python 3.12 on a `with` whose error was suppressed continues by one.
    """
    flow = flow_of(code)
    following = flow.following
    awaiting = {step.offset for step in flow.steps if step.opname == "SEND"}
    for step in flow.steps:
        if step.opcode in _JUMPS and step.argval in awaiting:
            following[step.offset].discard(step.argval)
    leading = leading_of(following)
    return frozenset(
        offset
        for at, others in following.items()
        for back in others
        if back <= at
        for offset in _reached(following, back) & _reached(leading, at)
    )


def is_within_another(code: CodeType, key: str) -> bool:
    """Whether the followed loop of this key lies in another loop of the same code."""
    return any(step.argval == key and step.offset in looping(code) for step in dis.get_instructions(code))


def _reached(following: Mapping[int, Iterable[int]], start: int) -> set[int]:
    reached, pending = {start}, [start]
    while pending:
        new = set(following[pending.pop()]) - reached
        reached |= new
        pending += new
    return reached
