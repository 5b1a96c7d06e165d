"""Compile the user's modules so that their `for` loops can be followed, as pytest compiles asserts anew.

`finder` takes the user's modules (see `frames.is_user_file`) before Python's own import does; `script_finder` takes the
script itself when `python script.py` looks whether the script is a folder or a zip file with a `__main__` in it, which
is the one place where Python lets us in before it runs a script. Nothing is written to `__pycache__`.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from ttprun.rank import loops
from ttprun.rank.frames import is_user_file

ENTER = "__ttprun_enter__"
LOOP = "__ttprun_loop__"


class _ForLoops(ast.NodeTransformer):
    """Wraps each `for` statement; comprehensions and `async for` are left alone."""

    def __init__(self, filename: str) -> None:
        self.filename = filename
        self._is_in_class_body = False

    def visit_For(self, node: ast.For) -> ast.For | list[ast.stmt]:
        self.generic_visit(node)
        if self._is_in_class_body:  # the loop's variable would become an attribute
            return node
        number = loops.new_site(self.filename, node.lineno, node.col_offset, node.end_lineno or node.lineno)
        variable = f"{loops.VARIABLE_PREFIX}{number}__"
        entered = ast.Call(ast.Name(ENTER, ast.Load()), [ast.Constant(number)], [])
        begun = ast.Call(ast.Name(LOOP, ast.Load()), [ast.Constant(number), entered, node.iter], [])
        begin = ast.Assign([ast.Name(variable, ast.Store())], begun)
        node.iter = ast.copy_location(ast.Name(variable, ast.Load()), node.iter)
        end = ast.Assign([ast.Name(variable, ast.Store())], ast.Constant(None))
        for statement in (begin, end):
            ast.copy_location(statement, node)
        return [begin, node, end]

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._visit_scope(node, is_class_body=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_scope(node, is_class_body=False)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_scope(node, is_class_body=False)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        is_name = isinstance(node.func, ast.Name) or getattr(node.func, "attr", "") == "reduce"
        name = ast.unparse(node.func) if is_name else ""
        if name in _GATHER:
            where = (self.filename, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
            gathering[where] = name
        return node

    def _visit_scope(self, node: ast.AST, is_class_body: bool) -> ast.AST:
        outside, self._is_in_class_body = self._is_in_class_body, is_class_body
        self.generic_visit(node)
        self._is_in_class_body = outside
        return node


def compile_followed(source: bytes, filename: str, is_script: bool = False) -> CodeType:
    """Compile a user's module with its loops followed. Raises SyntaxError as compile() does."""
    followed_files.add(filename)
    tree = ast.parse(source, filename)
    tree = _ForLoops(filename).visit(tree)
    if is_script:
        # A script has no spec (multiprocessing's spawn looks there to find the main module again) and no package.
        reset = ast.parse("__spec__ = __package__ = None").body[0]
        tree.body.insert(_first_statement(tree), ast.copy_location(reset, tree.body[0]) if tree.body else reset)
    return compile(ast.fix_missing_locations(tree), filename, "exec", dont_inherit=True)


def _first_statement(tree: ast.Module) -> int:
    """Behind the docstring and the `from __future__` imports."""
    at = 0
    for node in tree.body:
        is_docstring = at == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        at += 1
    return at


# Names of the user's modules, the script's among them, in the order in which they were loaded.
loaded: list[str] = ["__main__"]
# Files whose loops are followed; a user's frame of any other file cannot be replayed.
followed_files: set[str] = set()
# Their calls of functions that take all items of what they are given: (file, first line, last line, first column, last
# column) and the function's name.
gathering: dict[tuple[str, int | None, int | None, int | None, int | None], str] = {}
_GATHER = frozenset({
    "all", "any", "dict", "frozenset", "functools.reduce", "list", "max", "min", "reduce", "set", "sorted", "sum",
    "tuple",
})  # fmt: skip


class FollowedLoader(importlib.machinery.SourceFileLoader):
    """Loads a user's module with its loops followed, without bytecode files."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        if fullname not in loaded:
            loaded.append(fullname)
        source = self.get_data(path)
        return compile_followed(source, path, is_script=fullname == "__main__")


class _Finder:
    """On sys.meta_path: asks Python's own finder, and changes the loader of what is the user's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or isinstance(spec.loader, FollowedLoader):
            return spec
        if type(spec.loader) is not importlib.machinery.SourceFileLoader or not spec.origin:
            return None
        if not is_user_file(spec.origin):
            return None
        spec.loader = FollowedLoader(fullname, spec.origin)
        spec.cached = None
        return spec


class _ScriptFinder:
    """Finds `__main__` in the script itself, and puts sys.path[0] right, which Python has set to the script's path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != "__main__":
            return None
        sys.path[:] = [directory_of(self._path) if entry == self._path else entry for entry in sys.path]
        sys.path_importer_cache.pop(self._path, None)
        return importlib.util.spec_from_file_location(
            "__main__", self._path, loader=FollowedLoader("__main__", self._path)
        )


def script_of(arguments: Sequence[str]) -> str:
    """The script in `python [options] script ...`; "" if a module or a command is run."""
    takes_value = {"-W", "-X", "--check-hash-based-pycs"}
    skip = False
    for argument in arguments[1:]:
        if skip:
            skip = False
        elif argument in ("-m", "-c", "-"):
            return ""
        elif argument in takes_value:
            skip = True
        elif not argument.startswith("-"):
            return argument
    return ""


def full_path(script: str) -> str:
    """A script's path as Python itself makes it absolute; "" stays ""."""
    return os.path.join(os.getcwd(), script) if script else ""


def directory_of(script: str) -> str:
    """What Python puts first into sys.path for a script: the folder of the file itself, behind all links."""
    return os.path.dirname(os.path.realpath(script))


def script_hook(path: str) -> Any:
    """For sys.path_hooks: claims the script that this interpreter is about to run, and nothing else."""
    if path != full_path(script_of(sys.orig_argv)) or not os.path.isfile(path) or not is_user_file(path):
        raise ImportError(path)
    with open(path, "rb") as file:
        if file.read(4) == b"PK\x03\x04":
            raise ImportError(path)
    return _ScriptFinder(path)


def install() -> None:
    """Follow loops in everything of the user's that is imported from now on."""
    setattr(builtins, ENTER, loops.enter)
    setattr(builtins, LOOP, loops.loop)
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
    sys.path_hooks.insert(0, script_hook)
