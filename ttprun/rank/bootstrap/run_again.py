"""Statements of known modules that run at import, and must run again in each rank that is made of a copy.

Such a statement asks which rank this is, or draws a random number, and binds one name. After the import the name is
deleted: a module that asks for it at its own import fails in a standby, and is left to the replay. Once the copy has
become a rank, the statement runs again where it stands, in its module. A version of the package that has another line
there is not known: its module is left to the replay. Begin with `RunAgain.after_import`.
"""

from __future__ import annotations

import ast
import linecache
import random
import sys
from collections.abc import Sequence
from typing import Any

from ttprun.frameworks import KEEPS_OF_THE_ENVIRONMENT, RUN_AGAIN


class RunAgain:
    """The statements of the modules that this process has imported for its copies."""

    def __init__(self) -> None:
        self._given: frozenset[str] = frozenset()
        self._found: list[tuple[str, str]] = []

    def allow(self, given: Sequence[str]) -> None:
        """Variables that differ between ranks, and that none of them has changed by itself: statements may ask."""
        self._given = frozenset(given)

    def may_read(self, name: str, variable: str) -> bool:
        """Whether a module, whose code is running, may read a variable that differs between ranks."""
        keeps = KEEPS_OF_THE_ENVIRONMENT.get(name)
        if keeps is not None:
            return not variable.startswith(keeps)
        return variable in self._given and name in RUN_AGAIN and _line_of(name) == RUN_AGAIN[name]

    def after_import(self, name: str, random_before: Any) -> None:
        """A module has been imported: undo its statement, if it has the one that is known.

        random_before   of Python's generator; restored if the statement alone has drawn since
        """
        statement, module = RUN_AGAIN.get(name), sys.modules.get(name)
        if statement is None or module is None or not _stands_in(module, statement):
            return
        after = random.getstate()
        if after != random_before:
            random.setstate(random_before)
            exec(statement, vars(module))
            if random.getstate() != after:
                random.setstate(after)
                return  # something else in it has drawn, too: it is refused
            random.setstate(random_before)
        exec(f"del {ast.unparse(_target_of(statement))}", vars(module))
        self._found.append((name, statement))

    def run(self) -> None:
        """This process has become a rank."""
        for name, statement in self._found:
            exec(statement, vars(sys.modules[name]))


def _line_of(name: str) -> str:
    """The line at which the code of a module stands that is being imported."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == name:
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return ""


def _stands_in(module: Any, statement: str) -> bool:
    """Whether a module's code has a line with this statement alone, outside of functions."""
    return f"{statement}\n" in linecache.getlines(module.__file__ or "")


def _target_of(statement: str) -> ast.expr:
    """What a statement binds."""
    assignment = ast.parse(statement).body[0]
    assert isinstance(assignment, ast.Assign)
    return assignment.targets[0]
