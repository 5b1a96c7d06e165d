"""What capturing installs in a process, beside its rows of the table of patches, and what it forgets after a run.

torch.compile must not trace our functions: a compiled function calls our process groups, hooks and wrappers, and Dynamo
cannot trace a process group. Functions that are called inside the user's own code, in `loops` and here, must be traced,
or the graph would break; they do nothing then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ttprun.capture import framework_patches, recording, values
from ttprun.capture.data import loaders
from ttprun.capture.effects import origins, output
from ttprun.capture.position import loops, made_inside
from ttprun.introspect import fail_open
from ttprun.introspect.patching import after_import

_RULES = "torch._dynamo.trace_rules"


def leave_us_alone() -> None:
    """Exclude our modules from Dynamo's tracing, now or when it is imported."""
    if _RULES in sys.modules:
        _add_rules()
    else:
        after_import(_RULES, _add_rules)


def _add_rules() -> None:
    # By files: `rules.add` compiles one pattern of all untraced modules each time, which takes a second in all.
    skipped: Any = getattr(sys.modules[_RULES], "FORCE_SKIP_FILES", set())  # other versions may have none
    traced = (loops.__name__, __name__)
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("ttprun.") and name not in traced]
    skipped.update(module.__file__ for module in ours if module.__file__ is not None)


def unless_traced(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, not called while torch.compile traces."""

    def call(*args: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            hook(*args)

    return call


def install(steps_now: Callable[[], recording.Steps] = lambda: recording.Steps((), {}, [], None)) -> str:
    """Install what needs torch; returns which times are not repeated for a replacement, "" if all are.

    steps_now   the script's optimizers, asked where a trial of a sweep begins
    """
    note_pass = partial(recording.note_pass, steps_now)
    loops.Hooks.note_pass = fail_open.hook("the start of a loop's pass", note_pass)
    loops.Hooks.is_compiling = torch.compiler.is_dynamo_compiling
    leave_us_alone()
    output.note_lines()
    framework_patches.follow_tensorboard()
    framework_patches.follow()
    return origins.why_not()


def forget() -> None:
    """The run of the script is over."""
    loaders.forget()
    values.forget()
    made_inside.forget()
    loops.give_back()
