"""Keep torch.compile from tracing our functions.

A compiled function calls our process groups, hooks and wrappers, and Dynamo cannot trace a process group. Functions
that are called inside the user's own code, in `loops` and here, must be traced, or the graph would break; they do
nothing then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ttprun.capture.position import loops
from ttprun.introspect.after_import import after_import

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
