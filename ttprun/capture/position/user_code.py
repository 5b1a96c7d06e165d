"""The user's code: compiled so that its `for` loops can be followed, as pytest rewrites asserts, imported, and run.

`_Finder` loads modules whose loops are followed (see ownership.py) before Python's own import does; `script_hook` loads
the script itself when `python script.py` checks whether the script is a folder or a zip file with a `__main__` in it,
the only hook that Python calls before it runs a script. Nothing is written to `__pycache__`.

A module sees the environment at the time of its import. The standby imports the same modules in the same order, so it
must know between which imports the script has changed a variable: the finder of the user's modules is called at each
import, and notes that here.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.machinery
import importlib.util
import itertools
import os
import random
import runpy
import sys
import types
import warnings
import zipimport
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from ttprun.capture.position import loops
from ttprun.frameworks import DRAWING
from ttprun.introspect import ownership, signal_handlers
from ttprun.introspect.ownership import is_installed

# Run by each Python by itself.
_AT_START = frozenset({"__main__", "sitecustomize", "usercustomize"})
_environment: Any = os.environ
_seen: dict[bytes, bytes] = {}
_changes: dict[str, dict[str, str | None]] = {}
_random: Any = None
_drawing_later: set[str] = set()  # modules that draw at import, imported after something else had drawn, or a seed


def note_start() -> None:
    """Begin with the environment of the rank's start."""
    global _seen, _random
    _seen = dict(_environment._data)
    _changes.clear()
    _drawing_later.clear()
    _random = random.getstate()


def note_environment(importing: str) -> None:
    """Before a module is searched for: note what has changed in the environment since the previous one."""
    global _seen
    if importing in DRAWING and random.getstate() != _random:
        _drawing_later.add(importing)
    now = _environment._data
    if now == _seen:
        return
    changed = {key for key in now.keys() | _seen.keys() if now.get(key) != _seen.get(key)}
    of_module = _changes.setdefault(importing, {})
    for key in changed:
        value = now.get(key)
        of_module[os.fsdecode(key)] = None if value is None else os.fsdecode(value)
    _seen = dict(now)


def modules() -> list[tuple[str, str, dict[str, str | None]]]:
    """(name, file, changes of the environment before it) of all modules but torch's and ours, in their order.

    The file is "" for what a standby must not import: the user's own, what has no name of its own, and what draws
    other random numbers than it would at the start of a rank.
    """
    rows = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "ttprun"):
            file = "" if name in _drawing_later else _file_of(name, module)
            rows.append((name, file, _changes.get(name, {})))
    names = set(sys.modules)
    lost = [change for name, change in _changes.items() if name not in names]  # of imports that have failed
    return [("", "", change) for change in lost] + rows


def _file_of(name: str, module: Any) -> str:
    """The origin of an installed module; "" for any other."""
    spec = vars(module).get("__spec__") if isinstance(module, ModuleType) else None  # do not load a lazy one
    if type(spec) is not ModuleSpec or spec.name != name or name in _AT_START:
        return ""
    origin = spec.origin
    if origin in ("built-in", "frozen"):
        return str(origin)
    if isinstance(origin, str):
        return origin if is_installed(origin) else ""
    places = list(spec.submodule_search_locations or ())
    return os.pathsep.join(places) if places and all(map(is_installed, places)) else ""


ENTER = "__ttprun_enter__"
LOOP = "__ttprun_loop__"
OWED = "__ttprun_owed__"
PASSES = "__ttprun_passes__"
# What the compiled code uses.
BUILTINS = {ENTER: loops.enter, LOOP: loops.loop, OWED: loops.owed, PASSES: loops.Passes}

_BODIES = ("body", "orelse", "finalbody")


def _follow(statements: list[ast.stmt], filename: str, is_generator: bool = False) -> None:
    """Wrap what each `for` statement runs over, and note passes of `while`; comprehensions, `async for` are left alone.

    is_generator   the statements are a generator's
    """
    for statement in statements:
        is_of_generator = is_generator
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_of_generator = isinstance(statement, ast.FunctionDef) and _yields(statement)
        parts = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
        for part, name in itertools.product(parts, _BODIES):
            _follow(getattr(part, name, None) or [], filename, is_of_generator)
        if isinstance(statement, ast.For):
            _wrap(statement, filename, is_generator)
        elif isinstance(statement, ast.While):
            _note_passes(statement, filename)


def _yields(function: ast.FunctionDef) -> bool:
    """Whether it is a generator."""
    pending: list[ast.AST] = [*function.body]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)
    return False


def _wrap(node: ast.For, filename: str, is_generator: bool) -> None:
    key = loops.new_site(filename, _place_of(node, node.iter))
    entered = ast.Call(ast.Name(ENTER, ast.Load()), [ast.Constant(key)], [])
    begun: ast.expr = ast.Call(ast.Name(LOOP, ast.Load()), [ast.Constant(key), entered, node.iter], [])
    if is_generator:
        begun = ast.YieldFrom(ast.Call(ast.Name(OWED, ast.Load()), [begun], []))
    node.iter = ast.fix_missing_locations(ast.copy_location(begun, node.iter))


def _note_passes(node: ast.While, filename: str) -> None:
    key = loops.new_site(filename, _place_of(node, node.test)._replace(is_while=True))
    noting = ast.parse(f"if {key!r} in {PASSES}.noted: {PASSES}.begin({key!r})")
    node.body.insert(0, ast.increment_lineno(noting, node.test.lineno - 1).body[0])


def _place_of(node: ast.For | ast.While, over: ast.expr) -> loops.Extent:
    first, last = node.body[0], node.body[-1]
    begin = min([first, *getattr(first, "decorator_list", ())], key=lambda part: (part.lineno, part.col_offset))
    return loops.Extent(
        start=(node.lineno, node.col_offset),
        over=(over.lineno, over.col_offset),
        body=(begin.lineno, begin.col_offset),
        body_end=(last.end_lineno or last.lineno, last.end_col_offset or 0),
    )


def compile_followed(source: bytes, filename: str, is_script: bool = False) -> CodeType:
    """Compile a user's module with its loops followed.

    source      as in the file
    filename    that the code and the loops' keys show
    is_script   the module is the script itself, which is always compiled anew

    Raises SyntaxError as compile() does.
    """
    followed[filename] = source
    prepared = _prepared.get(filename)
    if prepared is not None and prepared[0] == source and not is_script:
        return prepared[1]
    return _compile(source, filename, is_script)


def prepare(filenames: Sequence[str]) -> None:
    """Compile modules of the user's beforehand; one that cannot be read or compiled is left to the script."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks have warned
        for filename in filenames:
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                source = Path(filename).read_bytes()
                _prepared[filename] = (source, _compile(source, filename, is_script=False))


def _compile(source: bytes, filename: str, is_script: bool) -> CodeType:
    tree = ast.parse(source, filename)
    _follow(tree.body, filename)
    if is_script:
        # A script has no spec (multiprocessing's spawn looks there to find the main module again) and no package.
        reset = ast.parse("__spec__ = __package__ = None").body[0]
        tree.body.insert(_first_statement(tree), ast.copy_location(reset, tree.body[0]) if tree.body else reset)
    return compile(tree, filename, "exec", dont_inherit=True)


def _first_statement(tree: ast.Module) -> int:
    """The index after the docstring and the `from __future__` imports."""
    at = 0
    for node in tree.body:
        is_docstring = at == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_docstring and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        at += 1
    return at


# Names of the user's modules, including the script, in the order in which they were loaded.
loaded: list[str] = ["__main__"]
# Names of modules that are followed by name, in that order: a process imports them once, also if the script runs again.
loaded_by_name: list[str] = []
# Files whose loops are followed -> their source; a user's frame of any other file cannot be replayed.
followed: dict[str, bytes] = {}
# Files compiled beforehand -> (source, code).
_prepared: dict[str, tuple[bytes, CodeType]] = {}


class FollowedLoader(importlib.machinery.SourceFileLoader):
    """Loads a user's module with its loops followed, without bytecode files.

    names   of the modules that loaders of this class have loaded
    """

    names = loaded

    @signal_handlers.gate
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        if fullname not in self.names:
            self.names.append(fullname)
        return compile_followed(self.get_data(path), path, is_script=fullname == "__main__")


class NamedLoader(FollowedLoader):
    """Loads a module that is followed by its name."""

    names = loaded_by_name

    @signal_handlers.gate
    def get_code(self, fullname: str) -> CodeType:
        ownership.note_followed(fullname, self.get_filename(fullname))
        return super().get_code(fullname)


class FollowedZip(zipimport.zipimporter):
    """Loads a user's module from a zip file with its loops followed."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        if not path.endswith(".py"):
            return super().get_code(fullname)
        if fullname not in loaded:
            loaded.append(fullname)
        return compile_followed(self.get_data(path), path)


class _Finder:
    """On sys.meta_path: asks Python's own finder, and replaces the loader of modules that are followed."""

    @signal_handlers.gate
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        note_environment(fullname)
        is_named = ownership.is_named(fullname)
        later = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        finders = [finder for finder in later if is_named or finder not in _OF_PYTHON]
        if not is_named:  # the others are those of editable installations, say
            finders.insert(0, importlib.machinery.PathFinder)
        spec = next(filter(None, (_ask(finder, fullname, path, target) for finder in finders)), None)
        if spec is None or not spec.origin:
            return None
        if isinstance(spec.loader, FollowedLoader | FollowedZip):
            return spec
        if fullname in ownership.LIBRARIES:
            ownership.note_library(fullname, spec.origin)
        loader: Any = spec.loader
        is_source, is_of_user = type(loader) is importlib.machinery.SourceFileLoader, ownership.is_of_user(spec.origin)
        if is_source and is_of_user:
            spec.loader = FollowedLoader(fullname, spec.origin)
        elif is_source and (is_named or ownership.is_seen_before(spec.origin)):
            spec.loader = NamedLoader(fullname, spec.origin)
        elif type(loader) is zipimport.zipimporter and is_of_user:
            loader = FollowedZip(os.path.join(loader.archive, loader.prefix))
            spec.loader = loader
        else:
            return None
        spec.cached = None
        return spec


_OF_PYTHON: tuple[Any, ...] = (
    importlib.machinery.BuiltinImporter,
    importlib.machinery.FrozenImporter,
    importlib.machinery.PathFinder,
)


def _ask(finder: Any, *asked: Any) -> importlib.machinery.ModuleSpec | None:
    find = getattr(finder, "find_spec", None)
    spec: importlib.machinery.ModuleSpec | None = None if find is None else find(*asked)
    return spec


class _ScriptFinder:
    """Finds `__main__` in the script itself, and corrects sys.path[0], which Python has set to the script's path."""

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
    """What Python puts first into sys.path for a script: the folder of the file, with symbolic links resolved."""
    return os.path.dirname(os.path.realpath(script))


def script_hook(path: str) -> Any:
    """For sys.path_hooks: claims the script that this interpreter is about to run, and nothing else.

    Raises ImportError for all other paths, as such a hook must.
    """
    if path != full_path(script_of(sys.orig_argv)) or not os.path.isfile(path) or not ownership.is_script_code(path):
        raise ImportError(path)
    with open(path, "rb") as file:
        if file.read(4) == b"PK\x03\x04":
            raise ImportError(path)
    return _ScriptFinder(path)


def install(modules: Sequence[str] = (), files: Sequence[str] | None = None) -> None:
    """Follow loops in the user's modules that are imported from now on.

    modules   names of further modules to follow
    files     of such modules; see disk_cache.py
    """
    note_start()
    ownership.follow(modules)
    ownership.follow_files(files)
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in ownership.LIBRARIES & sys.modules.keys():
        if origin := vars(sys.modules[name]).get("__file__"):
            ownership.note_library(name, origin)
    vars(builtins).update(BUILTINS)
    finder: Any = _Finder()
    sys.meta_path.insert(0, finder)
    sys.path_hooks.insert(0, script_hook)


@signal_handlers.leads_through
def run(arguments: Sequence[str], is_followed: bool = True) -> None:
    """Run it to its end; its exceptions pass through.

    arguments     [script, ...] or ["-m", module, ...]
    is_followed   its loops are followed, as in all modules imported since `install`
    """
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    script = full_path(arguments[0])
    with open(script, "rb") as file:
        source = file.read()
    code = compile_followed(source, script) if is_followed else compile(source, script, "exec", dont_inherit=True)
    main_module: Any = types.ModuleType("__main__")
    main_module.__file__ = script
    main_module.__builtins__ = __builtins__
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)
