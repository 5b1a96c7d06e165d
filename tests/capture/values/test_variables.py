"""The variables of frames that run: read and written without a trace in what `locals()` hands out."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from ttprun.introspect.ownership import set_local, unset_local, variables_of


class Thing:
    pass


def test_what_a_script_changes_in_its_locals_stays_changed_when_its_variables_are_read() -> None:
    def main(lr: float, width: int = 32) -> tuple[dict[str, Any], dict[str, Any]]:
        config = locals()
        config["lr"] *= 2
        config["extra"] = "new"
        return variables_of(sys._getframe()), config

    seen, config = main(0.001)

    assert config == {"lr": 0.002, "width": 32, "extra": "new"}
    assert seen == {"lr": 0.001, "width": 32, "config": config}


def test_all_kinds_of_variables_are_read() -> None:
    outer = "outer"

    def work(first: int, in_cell: str, *rest: int, key: str = "k", **more: int) -> Iterator[dict[str, Any]]:
        inner = lambda: (in_cell, outer, late)  # noqa: E731
        yield variables_of(sys._getframe())
        late = 3
        del first
        squares = [x * x for x in rest]
        yield variables_of(sys._getframe()) | {"inner": inner()}
        yield squares  # type: ignore[misc]

    before, after, _ = work(1, "cell", 2, 3, more=4)

    assert {name: value for name, value in before.items() if name != "inner"} == {
        "first": 1, "in_cell": "cell", "rest": (2, 3), "key": "k", "more": {"more": 4}, "outer": "outer",
    }  # fmt: skip
    assert after == {
        "inner": ("cell", "outer", 3), "in_cell": "cell", "rest": (2, 3), "key": "k", "more": {"more": 4},
        "outer": "outer", "late": 3, "squares": [4, 9],
    }  # fmt: skip


def test_a_variable_that_was_read_dies_when_the_script_lets_go_of_it() -> None:
    def work() -> bool:
        thing = Thing()
        gone = weakref.ref(thing)
        variables_of(sys._getframe())
        del thing
        return gone() is None

    assert work()


def test_reading_variables_leaves_nothing_to_the_garbage_collector() -> None:
    def work(first: int, second: int) -> int:
        variables_of(sys._getframe())
        gc.collect()
        variables_of(sys._getframe())
        return gc.collect()

    work(1, 2)

    assert work(1, 2) == 0


def test_variables_of_a_function_are_written_and_its_locals_stay_as_they_were() -> None:
    things = [Thing(), Thing()]
    counts = [sys.getrefcount(thing) for thing in things]

    def work(plain: Any, in_cell: Any) -> tuple[Any, ...]:
        config = locals()
        set_local(sys._getframe(), "plain", things[1])
        set_local(sys._getframe(), "in_cell", 7)
        return plain is things[1], (lambda: in_cell)(), config["plain"] is things[0], config["in_cell"]

    assert work(things[0], 5) == (True, 7, True, 5)
    assert [sys.getrefcount(thing) for thing in things] == counts


def test_a_variable_of_a_function_is_set_again_after_it_was_deleted() -> None:
    def work() -> int:
        late = 1
        del late
        set_local(sys._getframe(), "late", 8)
        return late  # type: ignore[name-defined, no-any-return]  # noqa: F821

    assert work() == 8


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="functions read what is certainly set without looking")
def test_a_variable_of_a_function_is_deleted() -> None:
    def work() -> int:
        gone = 9
        unset_local(sys._getframe(), "gone")
        return gone

    with pytest.raises(UnboundLocalError):
        work()


def test_variables_of_a_suspended_generator_are_read_and_written() -> None:
    def count(start: int) -> Iterator[int]:
        while True:
            yield start
            start += 1

    counter: Any = count(3)
    next(counter)

    assert variables_of(counter.gi_frame) == {"start": 3}
    set_local(counter.gi_frame, "start", 10)
    assert next(counter) == 11


def test_variables_of_modules_and_class_bodies_are_those_of_their_own_dictionary() -> None:
    scope: dict[str, Any] = {"look": lambda: variables_of(sys._getframe(1)), "frames": []}

    exec("class C:\n    x = 1\n    seen = dict(look())\ny = look() is globals()", scope)

    assert scope["y"]
    assert scope["C"].seen["x"] == 1


def test_a_frame_deep_below_is_read() -> None:
    def outer(value: int) -> dict[str, Any]:
        return inner()

    def inner() -> dict[str, Any]:
        frame: FrameType | None = sys._getframe().f_back
        assert frame is not None
        return variables_of(frame)

    assert outer(4)["value"] == 4
