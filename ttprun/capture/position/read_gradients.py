"""Whether a script reads gradients between an optimizer's step and the next backward, as for a log of their norm.

Gradients are not recorded for their own sake (gradients.py), so this is looked up in the code, once: from the step on,
on every way to a call of `backward` or `zero_grad`. Functions and methods of the script's own that are named on the way
are looked into, those that they call are not. Begin with `are_read_after`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from ttprun.capture.position.control_flow import flow_of, instruction_at
from ttprun.introspect.frames import user_frames, variables_of
from ttprun.introspect.looks import bases_of, dictionary_of_class
from ttprun.introspect.whose import is_script_code

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
        return frozenset({value}) | _names_of(_method_of(type(variables.get("self")), value))
    if operation in _BY_NAME:
        return _names_of(variables.get(value))
    return frozenset()


def _method_of(kind: type, name: str) -> Any:
    return next((own[name] for base in bases_of(kind) if name in (own := dictionary_of_class(base))), None)


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
