"""What capturing installs in a process, beside its rows of the table of patches, and what it forgets after a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ttprun.capture import framework_patches, recording, values
from ttprun.capture.data import loaders
from ttprun.capture.effects import origins, output, trackers
from ttprun.capture.position import loops, made_inside, torch_compile
from ttprun.introspect import fail_open


def install(steps_now: Callable[[], recording.Steps] = lambda: recording.Steps((), {}, [], None)) -> str:
    """Install what needs torch; returns which times are not repeated for a replacement, "" if all are.

    steps_now   the script's optimizers, asked where a trial of a sweep begins
    """
    note_pass = partial(recording.note_pass, steps_now)
    loops.Hooks.note_pass = fail_open.hook("the start of a loop's pass", note_pass)
    loops.Hooks.is_compiling = torch.compiler.is_dynamo_compiling
    torch_compile.leave_us_alone()
    output.note_lines()
    trackers.follow()
    framework_patches.follow()
    return origins.why_not()


def forget() -> None:
    """The run of the script is over."""
    loaders.forget()
    values.forget()
    made_inside.forget()
    loops.give_back()
