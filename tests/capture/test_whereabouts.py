"""Where a script stands at its steps: what is kept of a way on which it comes there is that way's alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.rank.processes import run_alone
from ttprun.capture.position import call_site, loops, user_code
from ttprun.introspect import ownership

IN_TURN = """\
for epoch in range(2):
    for batch in range(2):
        step()
        step()
    step()
step()
"""
BY_CALLS = """\
def train(count):
    for batch in range(count):
        step()
        batch + 1

for epoch in (2, 1):
    train(epoch)
"""
NO_LONGER_FOLLOWED = f"""\
for number in range({loops.TRIALS + 2}):
    for batch in range(1):
        if number > {loops.TRIALS}:
            step()
for batch in range(1):
    step()
"""


def _run(source: str, directory: str, look: Callable[[FrameType], Any]) -> list[Any]:
    """What is seen at each step of such a script."""
    ownership.add_user_directory(directory)
    found: list[Any] = []
    scope: dict[str, Any] = {"__name__": "script", "step": lambda: found.append(look(sys._getframe(1)))}
    scope["__builtins__"] = vars(__import__("builtins")) | {
        **user_code.BUILTINS,
    }
    exec(user_code.compile_followed(source.encode(), f"{directory}/script.py"), scope)
    return found


def _line_and_positions(frame: FrameType) -> tuple[Any, list[int]]:
    here = call_site.look(frame)
    return here.place[-1][2], [loop.position for loop in here.around]


def _seen_in_turn(directory: str) -> list[Any]:
    return _run(IN_TURN, directory, _line_and_positions)


def _seen_by_calls(directory: str) -> list[Any]:
    def look(frame: FrameType) -> Any:
        here = call_site.look(frame)
        return [scope.get("batch", scope.get("epoch")) for scope in here.scopes], [
            loop.position for loop in here.around
        ]

    return _run(BY_CALLS, directory, look)


def _seen_no_longer_followed(directory: str) -> list[Any]:
    return _run(NO_LONGER_FOLLOWED, directory, lambda frame: call_site.look(frame).why_not)


def test_steps_on_different_lines_stand_in_their_own_loops_each_time(tmp_path: Path) -> None:
    found = run_alone(_seen_in_turn, str(tmp_path))

    of_epoch = [[(3, [n, 1]), (4, [n, 1]), (3, [n, 2]), (4, [n, 2]), (5, [n])] for n in (1, 2)]
    assert found == [*of_epoch[0], *of_epoch[1], (6, [])]


def test_on_the_same_way_again_the_variables_and_loops_are_those_of_the_moment(tmp_path: Path) -> None:
    found = run_alone(_seen_by_calls, str(tmp_path))

    assert found == [([2, 0], [1, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1])]


def test_a_loop_that_is_not_followed_hinders_a_replacement_only_as_long_as_the_step_is_in_it(tmp_path: Path) -> None:
    found = run_alone(_seen_no_longer_followed, str(tmp_path))

    assert found == ["a loop around the optimizer step is not followed", ""]
