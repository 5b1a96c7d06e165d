"""Run the user's script as Python itself does: in a standby that has become a rank, or again in the same process."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

from ttprun.rank import rewrite


def run(arguments: Sequence[str]) -> None:
    """Run it to its end; whatever ends it goes through.

    arguments   [script, ...] or ["-m", module, ...]
    """
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    script = rewrite.full_path(arguments[0])
    with open(script, "rb") as file:
        code = rewrite.compile_followed(file.read(), script)
    main_module: Any = types.ModuleType("__main__")
    main_module.__file__ = script
    main_module.__builtins__ = __builtins__
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)
