"""A step inside of something that gathers items where nobody can see them is reported; one in a loop that is followed is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.rank.fakes import make_session
from tests.rank.processes import run_alone
from ttprun.capture.position import call_site, user_code
from ttprun.introspect import ownership
from ttprun.rank.step import record

ROOT = Path(__file__).parents[2]
GATHERS = {
    "list comprehension": ("losses = [train(b) for b in [1, 2]]", "a comprehension"),
    "set comprehension": ("losses = {train(b) for b in [1, 2]}", "a comprehension"),
    "dict comprehension": ("losses = {b: train(b) for b in [1, 2]}", "a comprehension"),
    "nested": ("losses = [train(b) for a in [1, 2] for b in [a]]", "a comprehension"),
    "in a followed loop": ("for a in [1]:\n    losses = [train(b) for b in [a]]", "a comprehension"),
    "in a handler in a followed loop": (
        "for a in [1]:\n    try:\n        raise KeyError\n    except KeyError:\n        [train(b) for b in [a]]",
        "a comprehension",
    ),
    "in a loop that its first round leaves": ("for a in [1]:\n    [train(b) for b in [a]]\n    break", "a comprehension"),
    "around a followed loop": ("def epoch():\n    for b in [1]:\n        train(b)\n\n[epoch() for _ in [1]]", "a comprehension"),
    "nested, in a generator": ("for a in (train(c) for b in [1] for c in (b, b)):\n    pass", "a comprehension"),
    "sum": ("total = sum(train(b) for b in [1, 2])", "a generator expression that a call consumes"),
    "join": ("text = ''.join(str(train(b)) for b in [1, 2])", "a generator expression that a call consumes"),
    "unpacked": ("a, b = (train(b) for b in [1, 2])", "a generator expression that a call consumes"),
    "list of map": ("losses = list(map(train, [1, 2]))", "a call of list"),
    "reduce": ("import functools\ntotal = functools.reduce(lambda a, b: a + train(b), [1, 2], 0)", "a call of functools.reduce"),
    "any of map": ("found = any(map(train, [1, 2]))", "a call of any"),
    "sum of a generator": (
        "def batches():\n    for b in [1, 2]:\n        yield train(b)\n\ntotal = sum(batches())",
        "a call of sum",
    ),
}  # fmt: skip
DOES_NOT = {
    "for": "for b in [1, 2]:\n    train(b)",
    "nested": "for a in [1, 2]:\n    for b in [a]:\n        train(b)",
    "behind a comprehension": "batches = [b for b in [1, 2]]\ntrain(sum(b for b in batches))",
    "what a comprehension runs over": "losses = [loss for loss in [train(1)]]",
    "what a call is given": "total = sum([train(1)], train(2))\nbest = max(train(3), 2)",
    "for over a generator expression": "for loss in (train(b) for b in [1, 2]):\n    pass",
    "for over a chain of generator expressions": "for loss in (str(a) for a in (train(b) for b in [1, 2])):\n    pass",
    "yield from": "def losses():\n    yield from (train(b) for b in [1, 2])\n\nfor loss in losses():\n    pass",
    "next": "def losses():\n    for b in [1, 2]:\n        yield train(b)\n\nnext(losses())",
    "what a comprehension makes, behind it": (
        "steps = [lambda: train(b) for b in [1, 2]]\nfor step in steps:\n    step()\n"
        "for losses in [(train(b) for b in [c]) for c in [1, 2]]:\n    for loss in losses:\n        pass"
    ),
    "while": "n = 0\nwhile n < 2:\n    n += train(n)",
    "for with try, else and with": (
        "import contextlib\nfor b in [1, 2]:\n    with contextlib.nullcontext():\n        try:\n            train(b)\n"
        "            raise KeyError\n        except KeyError:\n            train(b)\n        finally:\n            train(b)\n"
        "else:\n    train(3)"
    ),
}


def run_steps(source: str, directory: str, step: Callable[[FrameType], None]) -> None:
    """Run such a script of the user's; `step` is given its frame at each step."""
    ownership.add_user_directory(directory)
    script = f"{directory}/script.py"

    def train(batch: Any) -> int:
        step(sys._getframe(1))
        return 1

    scope: dict[str, Any] = {"__name__": "script", "train": train}
    scope["__builtins__"] = vars(__import__("builtins")) | {
        **user_code.BUILTINS,
    }
    exec(user_code.compile_followed(source.encode(), script), scope)


def seen_from(source: str, directory: str) -> list[str]:
    """What is reported of each step."""
    found: list[str] = []

    def step(frame: FrameType) -> None:
        found.append(call_site.look(frame).why_not)

    run_steps(source, directory, step)
    return found


def records_of(source: str, directory: str) -> list[str]:
    """Why the record of each step's boundary cannot be used."""
    found: list[str] = []
    session = make_session(directory)
    run_steps(source, directory, lambda frame: found.append(record.describe(session, 1, frame)[0].unfollowed))
    return found


@pytest.mark.parametrize("kind", GATHERS)
def test_what_gathers_around_a_step_is_reported_with_its_place(kind: str, tmp_path: Path) -> None:
    source, what = GATHERS[kind]

    found = run_alone(seen_from, source, str(tmp_path))

    assert found
    for reported in found:
        assert f"within {what} ({tmp_path}/script.py:" in reported


def test_it_is_reported_where_python_keeps_no_columns_of_its_instructions(tmp_path: Path) -> None:
    source = "\n".join(source for source, _ in GATHERS.values())
    look = f"from tests.capture.test_gathering import seen_from; print(*seen_from({source!r}, {str(tmp_path)!r}), sep='\\n')"
    arguments = [sys.executable, "-X", "no_debug_ranges", "-c", look]

    found = subprocess.run(
        arguments, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    ).stdout.splitlines()

    assert [reported for reported in found if "is taken within a" not in reported] == []
    assert [what for _, what in GATHERS.values() if not any(f"within {what} (" in reported for reported in found)] == []


@pytest.mark.parametrize("kind", DOES_NOT)
def test_what_gathers_nothing_around_a_step_is_not_reported(kind: str, tmp_path: Path) -> None:
    found = run_alone(seen_from, DOES_NOT[kind], str(tmp_path))

    assert found
    assert set(found) == {""}


def test_the_record_of_such_a_step_says_why_no_replacement_can_use_it_and_what_to_write_instead(tmp_path: Path) -> None:
    found = run_alone(records_of, "losses = [train(b) for b in [1, 2]]\nfor b in [1]:\n    train(b)", str(tmp_path))

    why = (
        f"the optimizer step is taken within a comprehension ({tmp_path}/script.py:1), "
        "and its results so far are in no variable: use a `for` loop instead"
    )
    assert found == [why, why, ""]


def test_to_look_for_calls_in_a_module_does_not_warn_of_it_again() -> None:
    assert list(call_site._read(b"x = '\\d'\nsum(x)\n").calls.values()) == ["sum"]  # warnings are errors in tests
