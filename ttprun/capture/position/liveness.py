"""Liveness: which variables of a function are read after an instruction, and whether gradients are.

A variable is dead at an instruction if it is set on every path from there before it is read. What such a variable alone
holds (the batch of the step before, a loss) is no state, and is not recorded. What others may hold too (a meter that is
also a hook of the model) is recorded if that can be done, but never a reason to refuse. This is the analysis of live
variables that every compiler has, over the function's instructions. A variable in a cell is alive, as another function
may read it; in a function that may read its variables by name, all are.

Gradients are not recorded for their own sake (gradients.py), so whether a script reads them after its step, as for a
log of their norm, is looked up in the code, once (`are_read_after`): from the step on, on every way to a call of
`backward` or `zero_grad`. Functions and methods of the script's own that are named on the way are looked into, those
that they call are not.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import numpy
import torch

from ttprun.capture.position import control_flow
from ttprun.capture.position.control_flow import flow_of, instruction_at
from ttprun.introspect.ownership import SCALARS, is_script_code, user_frames, variables_of
from ttprun.introspect.safe_reads import bases_of, dictionary_of_class

# What may read variables otherwise than by an instruction; the last two, if they are called without an argument.
_READS_BY_NAME = frozenset({"locals", "eval", "exec", "currentframe", "_getframe"})
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
    return frozenset(own - set[str]().union(*(live[then] for then in flow.following[offset])))


def _reads_by_name(steps: Sequence[dis.Instruction]) -> bool:
    for step, after in itertools.pairwise(steps):
        is_call_without_arguments = after.opname in ("PRECALL", "CALL") and after.arg == 0
        if step.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")) and (
            (step.argval in _READS_BY_NAME and not (step.argval == "eval" and "GLOBAL" not in step.opname))
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
    return (set(), set(names)) if kinds[0] == "STORE" else (set(names), set())


_READING = frozenset({"grad", "clip_grad_norm_", "get_total_norm"})
_ENDING = frozenset({"backward", "manual_backward", "zero_grad"})  # what comes after these reads other gradients
_BY_NAME = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_FAST")
_OF_OBJECT = ("LOAD_ATTR", "LOAD_METHOD")


def are_read_after(frame: FrameType | None) -> bool:
    """Whether the user's code may read gradients behind where it is now; `frame` is in the step or above it."""
    return any(map(_reads, reversed(user_frames(frame))))


def _reads(frame: FrameType) -> bool:
    """One function, from where it stands to where the next backward begins, or to its end."""
    flow = flow_of(frame.f_code)
    steps = {step.offset: step for step in flow.steps}
    variables = frame.f_globals | variables_of(frame)
    pending = list(flow.following.get(instruction_at(frame.f_code, frame.f_lasti), ()))
    seen: set[int] = set()
    while pending:
        at = pending.pop()
        if at in seen:
            continue
        seen.add(at)
        step = steps[at]
        names = _names_at(variables, step.opname, step.argval)
        if names & _ENDING:
            continue
        if names & _READING:
            return True
        pending += flow.following[at]
    return False


def _names_at(variables: Mapping[str, Any], operation: str, value: Any) -> frozenset[str]:
    """What an instruction names: an attribute; and all that a function names that it makes, or takes to call it.

    variables   the variables of its function
    """
    if isinstance(value, CodeType):
        return _names_in(value)
    if operation in _OF_OBJECT:
        return frozenset({value}) | _names_of(
            next(
                (own[value] for own in map(dictionary_of_class, bases_of(type(variables.get("self")))) if value in own),
                None,
            )
        )
    if operation in _BY_NAME:
        return _names_of(variables.get(value))
    return frozenset()


def _names_of(function: Any) -> frozenset[str]:
    if type(function) is MethodType:
        function = function.__func__
    if type(function) is not FunctionType or not is_script_code(function.__code__.co_filename):
        return frozenset()
    return _names_in(function.__code__)


def _names_in(code: CodeType) -> frozenset[str]:
    return frozenset(_all_names(code))


def _all_names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    inner: Iterable[Any] = code.co_consts
    for constant in inner:
        if isinstance(constant, CodeType):
            yield from _all_names(constant)
