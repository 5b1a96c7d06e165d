"""A user's module compiled with its loops followed behaves as it would without."""

from __future__ import annotations

import builtins
import contextlib
import io
import linecache
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rank.scripts import Outcome, run_plain, run_under_shim
from ttprun.capture.position import user_code
from ttprun.introspect import ownership


@pytest.fixture
def builtin_hooks() -> Iterator[None]:
    vars(builtins).update(user_code.BUILTINS)
    yield
    for name in user_code.BUILTINS:
        delattr(builtins, name)


pytestmark = pytest.mark.usefixtures("builtin_hooks")


def outcome(code: types.CodeType) -> tuple[str, str, dict[str, Any]]:
    """What a module prints, with what it ends, and the plain values among its globals."""
    scope: dict[str, Any] = {"__name__": "module"}
    printed = io.StringIO()
    ended = ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, scope)
        except BaseException as error:
            lines = [
                frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "module.py"
            ]
            ended = f"{type(error).__name__}: {error} at {lines}"
    plain = {
        name: value
        for name, value in scope.items()
        if not name.startswith("__ttp")
        and isinstance(value, int | str | list | tuple | dict | float)
        and name != "__builtins__"
    }
    return printed.getvalue(), ended, plain


MODULES = {
    "for": "r = []\nfor x in range(3):\n    r.append(x)\n",
    "else": "r = []\nfor x in range(3):\n    r.append(x)\nelse:\n    r.append('else')\n",
    "else after break": "r = []\nfor x in range(3):\n    break\nelse:\n    r.append('else')\n",
    "continue": "r = []\nfor x in range(5):\n    if x % 2:\n        continue\n    r.append(x)\n",
    "nested": "r = []\nfor x in range(3):\n    for y in range(x):\n        if y == 1:\n            break\n        r.append((x, y))\n",
    "return inside": "def f():\n    for x in range(5):\n        if x == 3:\n            return x\nr = f()\n",
    "return in finally": "def f():\n    for x in range(3):\n        try:\n            return x\n        finally:\n            print('f')\nr = f()\n",
    "exception inside": "for x in range(3):\n    if x == 1:\n        raise ValueError('here')\n",
    "exception in the expression": "for x in range(3):\n    pass\n\nfor x in [1 / 0\n          ]:\n    pass\n",
    "exception of an iterator": "def g():\n    yield 1\n    raise KeyError('g')\nfor x in g():\n    pass\n",
    "exception caught": "r = []\nfor x in range(3):\n    try:\n        r.append(1 // x)\n    except ZeroDivisionError:\n        r.append('zero')\n",
    "not iterable": "for x in 5:\n    pass\n",
    "unpacking": "r = []\nfor i, (a, *b) in enumerate([(1, 2, 3), (4, 5)]):\n    r.append((i, a, b))\n",
    "wrong unpacking": "for a, b in [(1, 2, 3)]:\n    pass\n",
    "into an attribute": "class C:\n    pass\nc = C()\nfor c.x in range(3):\n    pass\nr = c.x\n",
    "into an item": "d = {}\nfor d['k'] in range(3):\n    pass\n",
    "variable after the loop": "for x in range(3):\n    pass\nr = x\n",
    "variable of an empty loop": "for x in []:\n    pass\nr = x\n",
    "list that grows": "r = [1]\nfor x in r:\n    if len(r) < 5:\n        r.append(x * 2)\n",
    "dict that grows": "d = {1: 1}\nfor k in d:\n    d[k + 1] = 1\n",
    "iterator used inside": "it = iter(range(6))\nr = []\nfor x in it:\n    r.append((x, next(it)))\n",
    "generator used again after break": "g = (x for x in range(5))\nfor x in g:\n    break\nr = list(g)\n",
    "closure": "def f():\n    fs = []\n    for x in range(3):\n        fs.append(lambda: x)\n    return [g() for g in fs]\nr = f()\n",
    "nonlocal": "def f():\n    n = 0\n    def g():\n        nonlocal n\n        for n in range(4):\n            pass\n    g()\n    return n\nr = f()\n",
    "global": "n = 0\ndef g():\n    global n\n    for n in range(4):\n        pass\ng()\n",
    "generator": "def g():\n    for x in range(3):\n        got = yield x\n        print(got)\nit = g()\nr = [next(it), it.send('a'), it.send('b')]\n",
    "generator that is closed": "def g():\n    for x in range(3):\n        try:\n            yield x\n        finally:\n            print('closed', x)\nit = g()\nnext(it)\nit.close()\n",
    "yield from": "def g():\n    for x in range(3):\n        yield from range(x)\nr = list(g())\n",
    "comprehension": "r = [y for x in range(3) for y in range(x)] + [x for x in {1: 2}]\n",
    "class body": "class C:\n    r = []\n    for x in range(3):\n        r.append(x)\n    def f(self):\n        s = 0\n        for i in range(4):\n            s += i\n        return s\nr = (C.r, C.x, C().f(), sorted(k for k in vars(C) if 'ttp' in k))\n",
    "class body under a condition": "class C:\n    if True:\n        for x in range(3):\n            pass\nr = sorted(k for k in vars(C) if 'ttp' in k)\n",
    "enum body": "import enum\nclass E(enum.Enum):\n    A = 1\n    for _n in ():\n        pass\nr = [e.name for e in E]\n",
    "private names": "class C:\n    def f(self):\n        for __x in range(3):\n            pass\n        return __x\nr = C().f()\n",
    "docstring": '"""What it is."""\nr = __doc__\nfor x in ():\n    pass\n',
    "future": "'''doc'''\nfrom __future__ import annotations\nfor x in ():\n    pass\ndef f(a: not_defined): pass\nr = f.__annotations__\n",
    "no future": "def f(a: int): pass\nr = str(f.__annotations__)\n",
    "exception group": "try:\n    for x in range(2):\n        raise ExceptionGroup('g', [ValueError(x)])\nexcept* ValueError as e:\n    r = len(e.exceptions)\n",
    "match": "r = []\nfor x in [1, 'a']:\n    match x:\n        case int():\n            r.append('int')\n        case _:\n            r.append('other')\n",
    "with": "import contextlib\nr = []\nfor x in range(2):\n    with contextlib.suppress(KeyError):\n        r.append(x)\n        raise KeyError\n",
    "async": (
        "import asyncio\nasync def a():\n    for x in range(2):\n        yield x\nasync def main():\n    r = []\n    async for x in a():\n"
        "        r.append(x)\n    for y in range(2):\n        await asyncio.sleep(0)\n        r.append(y)\n    return r\nr = asyncio.run(main())\n"
    ),
    "recursion": "def f(n):\n    s = 1\n    for x in range(n):\n        s += f(x)\n    return s\nr = f(6)\n",
    "star expression": "r = []\nfor x in *[1, 2], 3:\n    r.append(x)\n",
    "one line": "r = []\nfor x in range(3): r.append(x); r.append(-x)\n",
    "delete the variable": "for x in range(3):\n    del x\nr = 'x' in globals()\n",
    "walrus": "r = []\nfor x in (y := [1, 2]):\n    r.append((x, len(y)))\n",
    "coding cookie": "# -*- coding: utf-8 -*-\nr = 'ü'\nfor x in r:\n    pass\n",
    "many times": "def f():\n    s = 0\n    for x in (1, 2):\n        s += x\n    return s\nr = [f() for _ in range(20)]\n",
    "stop iteration in a loop": "r = []\nit = iter([1])\nfor x in range(3):\n    try:\n        r.append(next(it))\n    except StopIteration:\n        it = iter([7])\n",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_a_module_behaves_as_it_does_without_us(name: str) -> None:
    source = MODULES[name]

    followed = outcome(user_code.compile_followed(source.encode(), "module.py"))

    assert followed == outcome(compile(source, "module.py", "exec", dont_inherit=True))


def test_a_followed_loop_leaves_no_name_in_its_scope() -> None:
    source = (
        b"for x in range(2):\n    pass\ndef f(a):\n    for y in range(2):\n        inside = dir()\n    return locals()\n"
        b"class C:\n    for z in range(2):\n        pass\nseen = f(1)\nof_class = [*vars(C)]\n"
    )
    scope: dict[str, Any] = {}

    exec(user_code.compile_followed(source, "module.py"), scope)

    assert set(scope) == {"__builtins__", "x", "f", "C", "seen", "of_class"}
    assert set(scope["seen"]) == {"a", "y", "inside"}
    assert set(scope["seen"]["inside"]) <= {"a", "y", "inside"}
    assert {name for name in scope["of_class"] if not name.startswith("__")} == {"z"}


def test_a_traceback_shows_the_lines_of_the_script(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "def f(n):\n    for x in range(n):\n\n        if x:\n            raise ValueError(\n                x)\n\nf(3)\n"
    )
    linecache.checkcache()

    with pytest.raises(ValueError, match="1") as caught:
        exec(user_code.compile_followed(file.read_bytes(), str(file)), {})

    shown = [(f.lineno, f.line) for f in traceback.extract_tb(caught.value.__traceback__) if f.filename == str(file)]
    assert shown == [(8, "f(3)"), (5, "raise ValueError(")]


def test_a_syntax_error_is_the_one_that_python_gives() -> None:
    source = b"for x in range(3)\n    pass\n"

    with pytest.raises(SyntaxError) as ours:
        user_code.compile_followed(source, "module.py")
    with pytest.raises(SyntaxError) as pythons:
        compile(source, "module.py", "exec")

    assert (str(ours.value), ours.value.lineno, ours.value.text) == (
        str(pythons.value), pythons.value.lineno, pythons.value.text,
    )  # fmt: skip


@pytest.mark.parametrize(
    "source", [b"", b"\n\n# nothing\n", b'"""doc"""\n', b"\xef\xbb\xbfx = 1\n", b"# coding: latin-1\nx = '\xe4'\n"]
)
def test_a_script_without_a_loop_or_without_anything_runs(source: bytes) -> None:
    scope: dict[str, Any] = {"__name__": "__main__", "__spec__": "something"}

    exec(user_code.compile_followed(source, "script.py", is_script=True), scope)

    assert scope["__spec__"] is None
    assert scope.get("x", "ä") in ("ä", 1)


def test_a_module_of_the_users_is_followed_and_an_installed_one_is_not(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "site-packages" / "theirs").mkdir(parents=True)
    for place in (tmp_path / "mine", tmp_path / "site-packages" / "theirs"):
        (place / "__init__.py").write_text("for x in ():\n    pass\n")
    ownership.add_user_directory(str(tmp_path))
    finder = user_code._Finder()

    mine = finder.find_spec("mine", [str(tmp_path)])
    theirs = finder.find_spec("theirs", [str(tmp_path / "site-packages")])

    assert mine is not None
    assert isinstance(mine.loader, user_code.FollowedLoader)
    assert theirs is None
    assert not list((tmp_path / "mine").glob("__pycache__"))


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (["python", "train.py", "a"], "train.py"),
        (["python", "-u", "train.py"], "train.py"),
        (["python", "-W", "error", "-X", "dev", "-u", "train.py", "-m"], "train.py"),
        (["python", "-Werror", "train.py"], "train.py"),
        (["python", "-m", "pkg.train"], ""),
        (["python", "-c", "pass"], ""),
        (["python"], ""),
    ],
)
def test_the_script_is_found_among_the_interpreters_arguments(words: list[str], script: str) -> None:
    assert user_code.script_of(words) == script


# Real interpreters.

SHOW = '''\
"""What the script is for."""
from __future__ import annotations

import json
import sys

import sibling


def work() -> int:
    total = 0
    for x in range(3):
        total += x
    return total


facts = {
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__, "spec": repr(__spec__), "doc": __doc__,
    "main": sys.modules["__main__"].__dict__ is globals(), "sibling": sibling.VALUE,
    "work": work(), "environment": sorted(__import__("os").environ.get("PYTHONPATH", "").split(":")),
}
print(json.dumps(facts))
followed = "__ttprun_loop__" in work.__code__.co_names
print(json.dumps("is followed" if followed else "is not followed"))
'''  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a script and a module beside it."""
    place = tmp_path / "user"
    place.mkdir()
    (place / "show.py").write_text(SHOW)
    (place / "sibling.py").write_text("VALUE = 0\nfor x in range(5):\n    VALUE += x\n")
    return place


FOLLOWED = '"is followed"'


def facts_of(result: Outcome) -> list[str]:
    assert result.code == 0, result.printed
    return result.printed.splitlines()


@pytest.mark.parametrize(
    "words",
    [["user/show.py", "--lr", "0.1"], ["{here}/user/show.py"], ["user/../user/./show.py"], ["elsewhere/link.py"],
     ["-m", "user.pkg.train", "-x"]],
    ids=["a relative path", "a full path", "a path with dots", "behind a link", "a module"],
)  # fmt: skip
def test_a_script_sees_the_world_that_python_shows_it_and_is_followed(folder: Path, words: list[str]) -> None:
    for place in ("elsewhere", "user/pkg"):
        (folder.parent / place).mkdir()
    (folder.parent / "elsewhere" / "link.py").symlink_to(folder / "show.py")
    source = SHOW.replace('"spec": repr(__spec__)', '"spec": __spec__.name').replace(
        "import sibling", "from user import sibling"
    )
    (folder / "pkg" / "train.py").write_text(source)
    words = [word.format(here=folder.parent) for word in words]

    ours = facts_of(run_under_shim(words, folder.parent))

    assert ours == [facts_of(run_plain(words, folder.parent))[0], FOLLOWED]


def test_a_folder_or_zip_file_with_a_main_runs(folder: Path) -> None:
    (folder / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")

    assert facts_of(run_under_shim([str(folder), "a"], folder.parent)) == ["['a'] __main__"]


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(7)", 7), ("raise SystemExit('sorry')", 1), ("1 / 0", 1), ("import os; os._exit(5)", 5)],
)
def test_a_script_ends_with_the_code_that_it_chose(folder: Path, ending: str, code: int) -> None:
    (folder / "end.py").write_text(f"import sys\nfor x in range(2):\n    pass\n{ending}\n")

    result = run_under_shim([str(folder / "end.py")], folder)

    assert result.code == code


def test_a_scripts_traceback_shows_its_own_lines(folder: Path) -> None:
    (folder / "fails.py").write_text("def f():\n    for x in range(3):\n        raise ValueError('bad')\n\nf()\n")

    printed = run_under_shim([str(folder / "fails.py")], folder).printed

    assert 'fails.py", line 5, in <module>\n    f()' in printed
    assert 'fails.py", line 3, in f\n    raise ValueError' in printed


SPAWNS = """\
import multiprocessing
import sys


def work(queue):
    total = 0
    for x in range(4):
        total += x
    queue.put((total, [name for name in sys.modules if name.startswith("ttprun")], __name__))


if __name__ == "__main__":
    for method in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(queue,))
        process.start()
        total, ours, name = queue.get(timeout=30)
        process.join()
        print(method, total, process.exitcode, ours if method != "fork" else [], name)
"""


def test_a_script_can_start_processes_in_every_way(folder: Path) -> None:
    (folder / "spawns.py").write_text(SPAWNS)

    printed = facts_of(run_under_shim([str(folder / "spawns.py")], folder))

    assert printed == ["spawn 6 0 [] __mp_main__", "fork 6 0 [] __main__", "forkserver 6 0 [] __mp_main__"]


NET = """
import warnings; warnings.simplefilter('ignore')
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        for i in range(3):
            x = x + i
        return x
"""
# What a script prints, under us as without us. The last one: as nanoGPT writes its configuration.
SCRIPTS = {
    "its package": "print(__package__)",  # `if __package__ is None` asks for a module of a package (PEP 366)
    "a compiled model stays one graph": f"{NET}print(torch.compile(Net(), backend='eager', fullgraph=True)(torch.ones(1)))",
    "a model of torchscript": f"{NET}print(torch.jit.script(Net())(torch.ones(1)))",
    "source": "import inspect\ndef f():\n    for x in range(3):\n        pass\nprint(inspect.getsource(f))",
    "a child's modules": (
        "import subprocess, sys\nask = 'import sys; print([m for m in sys.modules if \"ttprun\" in m], len(sys.path_hooks))'\n"
        "print(subprocess.check_output([sys.executable, '-c', ask], text=True))"
    ),
    "a child's descriptors": "import os\nos.system('ls /proc/self/fd | wc -l')",
    "its globals": "for x in range(2):\n    pass\nprint([k for k, v in globals().items() if isinstance(v, (int, float))])",
}  # fmt: skip


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_prints_what_it_does_without_us(folder: Path, kind: str) -> None:
    (folder / "script.py").write_text(SCRIPTS[kind] + "\n")

    ours, plain = run_under_shim(["script.py"], folder), run_plain(["script.py"], folder)

    assert (ours.code, ours.printed) == (0, plain.printed)


def test_standard_input_reaches_the_script(folder: Path) -> None:
    (folder / "reads.py").write_text("import sys\nprint(sys.stdin.readline())\n")

    assert run_under_shim([str(folder / "reads.py")], folder, stdin="hello\n").printed.split() == ["hello"]


def test_a_module_that_was_compiled_beforehand_is_compiled_again_only_if_it_has_changed(folder: Path) -> None:
    file = folder / "module.py"
    file.write_text("for x in [1, 2]:\n    pass\n")
    source = file.read_bytes()

    user_code.prepare([str(file)])
    assert str(file) not in user_code.followed

    code = user_code.compile_followed(source, str(file))
    assert user_code.compile_followed(source, str(file)) is code
    changed = user_code.compile_followed(b"x = 7\n", str(file))
    values: dict[str, Any] = {}
    exec(changed, values)
    assert values["x"] == 7


def test_what_python_warns_of_in_a_module_is_not_said_again_by_the_standby_that_compiles_it_beforehand(
    folder: Path,
) -> None:
    file = folder / "module.py"
    file.write_text("assert (1, 'always true')\nx = '\\d'\n")

    user_code.prepare([str(file)])  # a warning is an error in the tests, which would leave the module to the script

    assert user_code.compile_followed(file.read_bytes(), str(file)).co_filename == str(file)
