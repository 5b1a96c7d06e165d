"""Variables of a function that are dead at a call: set again before anything reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from ttprun.capture.position.liveness import dead_in

CASES = {
    "set again by the loop": (
        "def f(items):\n    batch = None\n    for batch in items:\n        loss = batch * 2\n        step()\n",
        {"batch", "loss", "items"},
    ),
    "read after the loop": (
        "def f(items):\n    for batch in items:\n        loss = batch * 2\n        step()\n    return loss\n", {"items", "batch"}
    ),
    "counted": ("def f():\n    n = 0\n    while n < 2:\n        n += 1\n        step()\n", set()),
    "read in one branch": (
        "def f(items):\n    kept = other = 0\n    for x in items:\n        if x:\n            print(kept, end='')\n"
        "        else:\n            kept = 0\n        other = 1\n        step()\n", {"items", "other", "x"}
    ),
    "read by a handler": (
        "def f(items):\n    kept = other = 1\n    for x in items:\n        try:\n            step()\n            kept = 2\n"
        "        except ValueError:\n            print(kept)\n        other = 3\n", {"items", "x", "other"}
    ),
    "in a cell": (
        "def f(items):\n    seen = 0\n    def look():\n        return seen\n    for x in items:\n        seen = x\n        step()\n",
        {"items", "x", "look"},
    ),
    "locals()": ("def f(items):\n    a = 1\n    for x in items:\n        step()\n    return locals()\n", set()),
    "model.eval()": (
        "def f(items):\n    model = __import__('types').SimpleNamespace(eval=int)\n    for x in items:\n        step()\n"
        "        model.eval()\n", {"items", "x"}
    ),
    "vars() of something": (
        "def f(items):\n    import types\n    args = types.SimpleNamespace()\n    for x in items:\n        step()\n        vars(args)\n",
        {"items", "x", "types"},
    ),
    "vars()": ("def f(items):\n    for x in items:\n        step()\n        vars()\n", set()),
    "deleted": ("def f(items):\n    for x in items:\n        y = x\n        step()\n        del y\n", {"items", "x"}),
    "with": (
        "def f(items):\n    import contextlib\n    for x in items:\n        with contextlib.nullcontext() as c:\n            step()\n",
        {"items", "x", "c"},
    ),
    "comprehension": (
        "def f(items):\n    for x in items:\n        y = [x for x in (1, 2)]\n        step()\n", {"items", "y"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_variable_is_dead_if_it_is_set_before_it_is_read(case: str) -> None:
    source, expected = CASES[case]
    found: list[frozenset[str]] = []
    scope: dict[str, Any] = {"step": lambda: found.append(dead_in(sys._getframe(1)))}
    exec(source, scope)

    scope["f"](*([[1, 2]] if "items" in scope["f"].__code__.co_varnames else []))

    assert found[0] - {"x"} == expected - {"x"}
    assert len(set(found)) == 1


def test_variables_of_a_module_are_alive() -> None:
    found: list[frozenset[str]] = []
    look: Callable[[], None] = lambda: found.append(dead_in(sys._getframe(1)))  # noqa: E731

    exec("x = 1\nlook()\nx = 2\n", {"look": look})

    assert found == [frozenset()]
