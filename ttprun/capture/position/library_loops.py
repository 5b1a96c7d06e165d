"""Loops in code that is not the user's: around an optimizer step (a framework's training loop), or in a suspended
generator that the script takes batches from.

Such a loop is not followed, so its position and variables are unknown. Foreign code that only forwards a step (a
wrapped optimizer, a context manager) need not be followed.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from types import FrameType

import torch

from ttprun import frameworks
from ttprun.capture.position import control_flow, disk_cache
from ttprun.introspect import ownership
from ttprun.introspect.frames import variables_of
from ttprun.introspect.ownership import is_script_code
from ttprun.introspect.safe_reads import is_a

# Their loops are not training loops: they run threads, event loops and hooks.
_HARMLESS = tuple(
    path.rstrip(os.sep) + os.sep
    for path in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    )
)
# These read the command line, and call the script's main function from a loop of theirs.
_CALLERS = frozenset({"absl", "click", "fire", "hydra", "typer"})
_TRIED = frozenset(name.partition(".")[0] for name in frameworks.FOLLOW)
_SITE = f"{os.sep}site-packages{os.sep}"


def why_not(frame: FrameType | None) -> str:
    """Why a step that is taken below a frame cannot be replayed: foreign code. "" if there is none."""
    loop, modules = loop_around(frame)
    if loop:
        return f"the optimizer step is taken in a loop of {loop}, {_what_follows(modules)}"
    modules = keeper_of_a_loss(frame)
    if modules:
        return (
            f"the optimizer step is taken in a function of {next(iter(modules))} that holds the step's loss, which a "
            f"replacement would return otherwise, and {_what_follows(modules)}"
        )
    return ""


def _what_follows(modules: dict[str, str]) -> str:
    """What becomes of modules that are not followed yet, or what the user can do."""
    is_new = ownership.is_remembering() and not any(map(ownership.is_seen_before, modules.values()))
    if is_new and all(disk_cache.note(filename) for filename in modules.values()):
        return f"which is met for the first time: {disk_cache.NEXT_RUN}"
    return (
        "which is not the script's own code and is not followed; if it is a framework's training, try this line in the "
        f"configuration: follow: [{', '.join(modules)}]"
    )


def what_follows_of(frame: FrameType | None) -> str:
    """What becomes of a generator of foreign code that is suspended in a loop: "whose loop ..."; "" if it has none.

    frame   the generator's; None: it has ended
    """
    if frame is None or not _is_foreign(frame) or not _is_in_loop(frame):
        return ""
    return _what_follows_of(str(frame.f_globals.get("__name__")), frame.f_code.co_filename)


@functools.cache  # asked at each step
def _what_follows_of(module: str, filename: str) -> str:
    return f"whose loop {_what_follows({module: filename}).removeprefix('which ')}"


def _is_in_loop(frame: FrameType) -> bool:
    return control_flow.instruction_at(frame.f_code, frame.f_lasti) in control_flow.looping(frame.f_code)


def loop_around(frame: FrameType | None) -> tuple[str, dict[str, str]]:
    """The outermost active loop in foreign code.

    returns   its function and file, "" if there is none; and the modules to follow with their files, outermost first:
              those of frames on the stack that are in a package with such a loop
    """
    description, packages, modules = "", set(), []
    while frame is not None:
        code = frame.f_code
        if _is_foreign(frame):
            module = str(frame.f_globals.get("__name__"))
            modules.append((module, code.co_filename))
            if _is_in_loop(frame):
                description = f"{code.co_qualname} ({code.co_filename})"
                packages.add(_package_of(module))
        frame = frame.f_back
    return description, {name: filename for name, filename in reversed(modules) if _package_of(name) in packages}


def is_called_in_a_loop(frame: FrameType, outer: FrameType) -> bool:
    """Whether one of the frames between two frames of the user's is in a loop: it may call the inner one again.

    frame, outer   next to each other among the user's, the inner one first
    """
    between = frame.f_back
    while between is not None and between is not outer:
        if _is_in_loop(between):
            return True
        between = between.f_back
    return False


def keeper_of_a_loss(frame: FrameType | None) -> dict[str, str]:
    """The module of foreign code on the stack that holds a loss of this step, and may return it, with its file.

    Nothing records its variables: in a replacement they would hold what the replay has computed. Packages of which some
    modules are followed are known to return none.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if _is_foreign(frame) and _package_of(module) not in _TRIED and _holds_loss(frame):
            return {module: frame.f_code.co_filename}
        frame = frame.f_back
    return {}


def _holds_loss(frame: FrameType) -> bool:
    tensors = (value for value in variables_of(frame).values() if is_a(value, torch.Tensor))
    return any(value.grad_fn is not None and value.numel() == 1 for value in tensors)


def _package_of(module: str) -> str:
    return module.partition(".")[0]


def _is_foreign(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    package = _package_of(str(frame.f_globals.get("__name__")))
    if is_script_code(filename) or filename.startswith("<frozen") or package in _CALLERS:
        return False
    path = os.path.abspath(filename)
    return not path.startswith(_HARMLESS) or (_SITE in path and not path.startswith(_HARMLESS[2:]))
