"""Variables of functions and modules: set, written in place, unset."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.capture.user_values import (
    train,
)
from tests.capture.values.carrying import (
    Scope,
    carry,
)
from ttprun.capture import values
from ttprun.capture.values import CannotRestoreError, Restore, Snapshot


def test_a_function_that_runs_goes_on_with_the_variables_of_the_lost_rank() -> None:
    recorded: list[Any] = []

    def act(stack: list[types.FrameType]) -> None:
        if not recorded:
            snapshot = Snapshot({})
            recorded.extend(values.unpack_named(values.pack(snapshot.variables(frame.f_locals))) for frame in stack)
            return
        restore = Restore([], is_comparing=True)
        for frame, variables in zip(stack, recorded, strict=True):
            restore.frame(frame, variables, "")

    lost = train(act, start=7)
    replacement = train(act, start=1)

    assert replacement == lost


def test_an_expression_that_a_later_line_has_made_takes_the_place_of_the_first() -> None:
    recorded: dict[str, Any] = {}

    def record() -> None:
        variables = {**sys._getframe(1).f_locals, "act": restore}
        recorded.update(values.unpack_named(values.pack(Snapshot({}).variables(variables))))

    def restore() -> None:
        Restore([], is_comparing=False).frame(sys._getframe(1), recorded, "")

    def work(act: Callable[[], None]) -> list[int]:
        source = (number * 2 for number in itertools.islice(range(9), 9))
        if act is record:
            source = (number + 100 for number in itertools.islice(range(9), 9))
            next(source)
            next(source)
        act()
        return [*source]

    assert work(record) == work(restore) == [102, 103, 104, 105, 106, 107, 108]


def test_globals_of_a_module_are_written_in_place() -> None:
    here = {"__name__": "config", "steps": 0, "schedule": [1, 2], "torch": torch, "train": train}
    schedule = here["schedule"]

    carry({"__name__": "other", "steps": 5, "schedule": [4, 5, 6], "torch": torch, "train": train}, here)

    assert here["steps"] == 5
    assert here["schedule"] is schedule
    assert schedule == [4, 5, 6]
    assert (here["__name__"], here["torch"], here["train"]) == ("config", torch, train)


def test_a_variable_of_a_function_that_the_lost_rank_has_deleted_is_unset() -> None:
    def work() -> bool:
        step, scratch = 1, 2
        frame = sys._getframe()
        Restore([], is_comparing=True).frame(frame, {"step": 5, "frame": ["=", "builtins:frame", ""]}, "")
        try:
            return (step, scratch) == (5, 2)
        except UnboundLocalError:
            return step == 5

    if sys.version_info < (3, 12):
        assert work()
    else:
        with pytest.raises(CannotRestoreError, match="scratch is set here"):
            work()


def test_what_torch_compile_puts_beside_its_functions_stays_there() -> None:
    here: Scope = {"step": 1, "__compiled_fn_2_ab07480": print, "__resume_at_30_1": print}

    assert carry({"step": 7, "__compiled_fn_1_ffff": len}, here) == []
    assert here == {"step": 7, "__compiled_fn_2_ab07480": print, "__resume_at_30_1": print}
