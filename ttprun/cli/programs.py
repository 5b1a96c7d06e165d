"""Programs that are installed: their package is the user's own code, though it lies where installed packages do.

`-m package.train` names the package. So does a console script, as `--no-python COMMAND` runs it: its few lines import
the function that they call. Such a command is a Python script with a `#!` line, and is run as one. Begin with `find`.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import sys
from argparse import Namespace
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ttprun import frameworks
from ttprun.introspect.ownership import is_installed

# What pip and others write where the interpreter's path is too long for a `#!` line.
_BY_SHELL = re.compile(rb"#!/bin/sh\n'''exec' \"?([^\" \n]+)\"? \"\$0\" \"\$@\"\n")
_HEAD_BYTES = 4096
_EXECS = re.compile(rb"\nexec python[\d.]* (?:-u )?([^-\n][^\n]*)\Z")  # a shell script's last line
# Modules that a console script imports beside the program's own.
_OF_SCRIPTS = ("re", "sys", "os")
_NOBODYS = {"torch", "ttprun", *(name.partition(".")[0] for name in frameworks.FOLLOW)}


@dataclass(frozen=True)
class Program:
    """What a launch runs.

    script    path of the console script that `--no-python` names, "" if it is not one
    own       where the installed program's own code lies: folders, or one file; nothing if it is not installed
    why_not   why a command cannot be run as a Python script, "" if it can, or none is named
    words     of its arguments that are not the script's: those of `python -u train.py`
    """

    script: str = ""
    own: tuple[str, ...] = ()
    why_not: str = ""
    words: int = 0


def find(torchrun: Namespace) -> Program:
    """What the options of a launch run. Touches nothing, and imports nothing of the program's."""
    if torchrun.run_path:
        return Program()
    if torchrun.module and not torchrun.no_python:
        return Program(own=code_of(torchrun.training_script))
    if not torchrun.no_python or torchrun.module:
        return Program()
    path = shutil.which(torchrun.training_script)
    if path is None:
        return Program()
    if os.path.basename(path).startswith("python"):
        return _of_python(path, torchrun.training_script_args)
    why_not = why_no_script_of_ours(path)
    return Program(why_not=why_not) if why_not else Program(path, code_of(module_of(path)))


def _of_python(path: str, arguments: list[str]) -> Program:
    """What `--no-python python ARGUMENTS` runs: the script that they name, as without `--no-python`."""
    if not _is_this_python(path):
        return Program(why_not=f"it is another Python ({path}); install ttprun there")
    at = int(arguments[:1] == ["-u"])
    if arguments[at:] and not arguments[at].startswith("-"):
        return Program(arguments[at], words=at + 1)
    return Program(why_not="it is Python itself: leave out --no-python and python")


def for_another_interpreter(path: str) -> str:
    """The interpreter that a script names if Python cannot read it; "" if Python can, or if it names none."""
    source = Path(path).read_bytes()
    head = (source.splitlines() or [b""])[0]
    if b"python" in head or not (head.startswith(b"#!") or path.endswith(".sh")):
        return ""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return os.fsdecode(head[2:]).strip() if head.startswith(b"#!") else "a shell"
    return ""


def why_no_script_of_ours(path: str) -> str:
    """Why an executable file is not a script for this very Python, started without options; "" if it is."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    match = _BY_SHELL.match(head)
    words = [match[1]] if match else head.splitlines()[0][2:].split() if head.startswith(b"#!") else []
    if not words:
        return "it is not a Python script: its file does not begin with #! and an interpreter"
    interpreter, *options = (os.fsdecode(word) for word in words)
    if os.path.basename(interpreter) == "env" and len(options) == 1:
        interpreter, options = shutil.which(options[0]) or options[0], []
    if not os.path.basename(interpreter).startswith("python"):
        why = f"it is not a Python script, but one for {interpreter}"
        if ends := _EXECS.search(head.rstrip()):
            command = os.fsdecode(ends[1])
            why += f"; start 'ttprun {command}' instead, with what it sets before, and ranks are replaced"
        return why
    if options:
        return f"its Python is started with {' '.join(options)}"
    if not _is_this_python(interpreter):
        return f"it is a script for another Python ({interpreter}); install ttprun there"
    return ""


def _is_this_python(interpreter: str) -> bool:
    """Whether it is this one, by whatever of its names in the same folder: a virtual environment is its folder."""
    same_folder = os.path.realpath(os.path.dirname(interpreter)) == os.path.realpath(os.path.dirname(sys.executable))
    return same_folder and os.path.realpath(interpreter) == os.path.realpath(sys.executable)


def module_of(script: str) -> str:
    """The module whose function a console script calls; "" if it is a script with code of its own."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (SyntaxError, ValueError):
        return ""
    if any(isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef) for node in ast.walk(tree)):
        return ""
    named = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return next((name for name in named if name not in _OF_SCRIPTS), "")


def code_of(module: str) -> tuple[str, ...]:
    """Where the package of a module lies, if that is not below the working folder; it is not imported."""
    top = module.partition(".")[0]
    if not top or top in _NOBODYS or top in sys.stdlib_module_names:
        return ()
    try:
        spec: ModuleSpec | None = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ()
    if spec is None:
        return ()
    places = list(spec.submodule_search_locations or ([spec.origin] if spec.origin else ()))
    here = os.path.abspath(os.getcwd()) + os.sep
    full = [os.path.abspath(place) for place in places]
    return tuple(place for place in full if is_installed(place) or not place.startswith(here))
