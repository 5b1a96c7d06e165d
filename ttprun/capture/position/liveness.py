"""Which variables of a function are dead at an instruction: on every path from there set before they are read.

What such a variable alone holds (the batch of the step before, a loss) is no state, and is not recorded. What others
may hold too (a meter that is also a hook of the model) is recorded if that can be done, but never a reason to refuse.
This is the analysis of live variables that every compiler has, over the function's instructions. A variable in a cell
is alive, as another function may read it; in a function that may read its variables by name, all are.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import numpy
import torch

from ttprun.capture.position import control_flow
from ttprun.introspect.frames import SCALARS

# What may read variables otherwise than by an instruction; the last two, if they are called without an argument.
_BY_NAME = frozenset({"locals", "eval", "exec", "currentframe", "_getframe"})
_OF_THE_CALLER = frozenset({"vars", "dir"})

_OWN_MEMORY = (torch.Tensor, numpy.ndarray)

# (id of the code, offset) -> names, and the code, which is held so that its id is not reused.
_known: dict[tuple[int, int], tuple[frozenset[str], CodeType]] = {}


def state_in(scope: dict[str, Any], dead: Sequence[str]) -> dict[str, Any]:
    """A function's variables without what is dead and held by nothing else; changes `scope`, a copy of its own."""
    for name in dead:
        if name not in scope:
            continue
        value = scope[name]
        # Held by the function, `scope` and `value`, and as an argument.
        if type(value) in SCALARS or (type(value) in _OWN_MEMORY and sys.getrefcount(value) <= 4):
            del scope[name]
    return scope


def dead_in(frame: FrameType) -> frozenset[str]:
    """The names of a running function's variables that are dead when it goes on; of a module or class body, none."""
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    entry = _known.get(key)
    if entry is None:
        at = control_flow.instruction_at(code, frame.f_lasti)
        entry = _known[key] = (_dead_after(code, at), code)
    return entry[0]


def _dead_after(code: CodeType, offset: int) -> frozenset[str]:
    flow = control_flow.flow_of(code)
    if not code.co_flags & inspect.CO_OPTIMIZED or _reads_by_name(flow.steps):
        return frozenset()
    own = set(code.co_varnames) - set(code.co_cellvars)
    uses = {step.offset: _uses(step) for step in flow.steps}
    live: dict[int, set[str]] = {at: set() for at in uses}
    leading = control_flow.leading_of(flow.following)
    pending = set(uses)
    while pending:
        at = pending.pop()
        read, written = uses[at]
        after = set[str]().union(*(live[then] for then in flow.following[at]))
        now = read | (after - written)
        if now != live[at]:
            live[at] = now
            pending |= leading[at]
    after = set[str]().union(*(live[then] for then in flow.following[offset]))
    return frozenset(own - after)


def _reads_by_name(steps: Sequence[dis.Instruction]) -> bool:
    for step, after in itertools.pairwise(steps):
        is_call_without_arguments = after.opname in ("PRECALL", "CALL") and after.arg == 0
        if step.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")) and (
            (step.argval in _BY_NAME and not (step.argval == "eval" and "GLOBAL" not in step.opname))
            or (step.argval in _OF_THE_CALLER and is_call_without_arguments)
        ):
            return True
    return False


def _uses(step: dis.Instruction) -> tuple[set[str], set[str]]:
    """The variables that an instruction reads, and those that it sets without reading them."""
    if "_FAST" not in step.opname:
        return set(), set()
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    kinds = [word for word in step.opname.split("_") if word in ("LOAD", "STORE", "DELETE")]
    if step.opname.startswith("STORE_FAST_LOAD_FAST"):
        return {names[1]} - {names[0]}, {names[0]}
    is_write = kinds[0] == "STORE"
    return (set(), set(names)) if is_write else (set(names), set())
