"""Run the user's script as Python itself does: in a standby that has become a rank, or again in the same process."""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Sequence
from typing import Any

from ttprun.capture.position import ast_transform
from ttprun.introspect import signal_handlers


@signal_handlers.leads_through
def run(arguments: Sequence[str], is_followed: bool = True) -> None:
    """Run it to its end; its exceptions pass through.

    arguments     [script, ...] or ["-m", module, ...]
    is_followed   its loops are followed, as in all modules imported since `ast_transform.install`
    """
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    script = ast_transform.full_path(arguments[0])
    with open(script, "rb") as file:
        source = file.read()
    code = (
        ast_transform.compile_followed(source, script)
        if is_followed
        else compile(source, script, "exec", dont_inherit=True)
    )
    main_module: Any = types.ModuleType("__main__")
    main_module.__file__ = script
    main_module.__builtins__ = __builtins__
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)
