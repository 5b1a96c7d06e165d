"""control_flow.py: which instructions stand in a loop; what stands there is known by the line that it belongs to."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ttprun.capture.position.control_flow import instruction_at, looping


def look() -> None:
    pass


def a_with() -> None:
    with contextlib.suppress(ValueError):
        look()
    look()


def a_try() -> None:
    try:
        look()
    except ValueError:
        look()
    finally:
        look()


def behind_a_for() -> None:
    for _ in range(3):
        pass
    look()


def behind_a_for_that_handles_errors() -> None:
    for _ in range(3):
        try:
            len([])
        except ValueError:
            continue
    look()


async def awaiting() -> None:
    await anything()
    look()


async def anything() -> None:
    pass


def delegating() -> Iterator[int]:
    look()
    yield from range(3)


@pytest.mark.parametrize(
    "function", [a_with, a_try, behind_a_for, behind_a_for_that_handles_errors, awaiting, delegating]
)
def test_what_is_in_no_loop(function: Callable[[], Any]) -> None:
    assert reported(function) == {False}


@pytest.mark.parametrize("function", [awaiting, delegating])
def test_what_waits_for_another_one_is_no_loop(function: Callable[[], Any]) -> None:
    assert not looping(function.__code__)


def a_for() -> None:
    for _ in range(3):
        look()


def a_while() -> None:
    while True:
        look()


def a_with_in_a_for() -> None:
    for _ in range(3):
        with contextlib.suppress(ValueError):
            look()


def a_for_left_by_its_first_round_unless_it_fails() -> None:
    for _ in range(3):
        try:
            look()
        except ValueError:
            continue
        break


def in_a_handler() -> None:
    while True:
        try:
            len([])
        except ValueError:
            look()


@pytest.mark.parametrize(
    "function",
    [a_for, a_while, a_with_in_a_for, a_for_left_by_its_first_round_unless_it_fails, in_a_handler],
)
def test_what_is_in_a_loop(function: Callable[[], Any]) -> None:
    assert reported(function) == {True}


def reported(function: Callable[..., Any]) -> set[bool]:
    """Of the instructions that load `look`: whether they are in a loop."""
    steps = dis.get_instructions(function.__code__)
    return {step.offset in looping(function.__code__) for step in steps if step.argval == "look"}


def test_a_frame_that_calls_another_one_is_named_by_the_instruction_and_not_by_its_cache() -> None:
    def caller() -> str:
        frame = sys._getframe(1)
        return dis.opname[frame.f_code.co_code[instruction_at(frame.f_code, frame.f_lasti)]]

    def asked() -> Iterator[str]:
        for _ in range(100):
            yield dis.opname[caller_of.f_code.co_code[instruction_at(caller_of.f_code, caller_of.f_lasti)]]

    caller_of = sys._getframe()
    found = set()
    for _ in range(100):  # Python calls its own functions in another way after some rounds
        found.add(caller())
    asking = set()
    for opname in asked():
        asking.add(opname)

    assert all(opname.startswith("CALL") for opname in found)
    assert asking == {"FOR_ITER"}
