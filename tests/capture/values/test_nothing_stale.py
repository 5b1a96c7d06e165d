"""Whatever a script has in its variables: never is an old value left standing."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import math
import pathlib
import queue
import re
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from torch.utils.data import DataLoader, TensorDataset

from tests.capture.user_values import Meter
from tests.capture.values.carrying import (
    Scope,
    big,
    carry,
    record,
)
from ttprun.capture.records.nodes import ListNode, Number, ValueObjectNode, WeightNode
from ttprun.capture.values import CannotRestoreError, Restore
from ttprun.capture.values.snapshot import Snapshot, with_fixed


def test_a_name_that_the_lost_rank_has_deleted_is_not_in_the_replacement() -> None:
    here: Scope = {"step": 0, "batch": [1], "scratch": 2}

    carry({"step": 1, "batch": [1]}, here)

    assert here == {"step": 1, "batch": [1]}


def test_what_has_no_state_and_was_not_made_is_named_and_what_holds_it_is_no_doubt() -> None:
    """The locks of an evaluation that the replay has passed over."""
    recorded, blobs = record({"locks": [threading.Lock()], "by_name": {"log": logging.getLogger("x")}, "best": 3})
    restore = Restore(blobs, is_comparing=True, is_strict=False)
    here: Scope = {"locks": None, "by_name": {}, "best": 0}

    restore.module(here, recorded, "")

    assert here == {"locks": [], "by_name": {}, "best": 3}
    assert restore.doubts == []
    assert [name.partition(",")[0] for name in restore.named] == ["locks[0]", "by_name['log']"]


def test_on_the_way_to_the_boundary_what_cannot_be_made_again_is_left_as_it_is() -> None:
    recorded, blobs = record({"step": 7, "writer": logging.getLogger("x"), "meter": Meter(), "data": big(1.0)})
    here: Scope = {"step": 1, "data": None}

    Restore(blobs, is_comparing=False).module(here, recorded, "")

    assert here.keys() == {"step", "data", "meter"}
    assert (here["step"], here["data"], vars(here["meter"])) == (7, None, vars(Meter()))


REPRODUCED: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock, "event": threading.Event, "logger": lambda: logging.getLogger("a"), "parser": argparse.ArgumentParser,
    "progress bar": lambda: tqdm.tqdm(range(3), disable=True), "file": lambda: sys.__stdout__, "context": contextlib.nullcontext,
    "pattern": lambda: re.compile("a+"), "data set": lambda: TensorDataset(torch.zeros(3)), "weak reference": lambda: weakref.ref(Meter),
    "lambda": lambda: (lambda x: x), "partial": lambda: functools.partial(print, end=""), "cache": lambda: functools.lru_cache(math.sin),
    "module": lambda: torch, "exception": lambda: ValueError("bad"), "no grad": torch.no_grad, "autocast": lambda: torch.autocast("cpu"),
    "property": lambda: property(math.sin), "keys": lambda: {"a": 1}.keys(), "object": object, "queue": queue.Queue,
    "loader": lambda: DataLoader(TensorDataset(torch.zeros(3))), "thread": threading.Thread, "summary": lambda: struct.Struct("<q"),
    "ufunc": lambda: np.add, "builtin method": lambda: [].append, "library function": lambda: torch.nn.functional.relu,
}  # fmt: skip


@pytest.mark.parametrize("kind", REPRODUCED)
def test_what_ordinary_scripts_have_in_variables_does_not_hinder_a_recovery(kind: str) -> None:
    here: Scope = {"thing": REPRODUCED[kind](), "step": 0, "holder": types.SimpleNamespace(it=[REPRODUCED[kind]()])}
    lost: Scope = {"thing": REPRODUCED[kind](), "step": 3, "holder": types.SimpleNamespace(it=[REPRODUCED[kind]()])}
    thing = here["thing"]

    assert carry(lost, here) == []

    assert here["step"] == 3
    assert type(here["thing"]) is type(thing)


def test_the_name_of_a_file_that_was_closed_long_ago_does_not_hinder_a_recovery(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "log", "w") as file:
        file.write("x")
    here: Scope = {}

    carry({"file": file}, here)

    assert here["file"].closed
    with pytest.raises(ValueError, match="closed"):
        here["file"].write("y")


def test_nothing_in_a_record_can_call_what_the_script_has_not_made() -> None:
    """A record names functions and types; it never calls a function, and makes only values of known kinds."""
    struck: list[int] = []
    here: Scope = {"x": 0, "strike": lambda: struck.append(1)}

    with pytest.raises((CannotRestoreError, KeyError)):
        Restore([], True).module(here, {"x": ListNode(Number(0), [], "os:system", {})}, "")
    with pytest.raises((CannotRestoreError, KeyError)):
        Restore([], True).module(here, {"x": ValueObjectNode("subprocess:Popen", {"args": "true"})}, "")

    assert struck == []


def test_another_module_of_the_same_name_is_not_taken_for_the_one_before() -> None:
    for number in range(3):
        found = record({"number": number}, key="of one name", is_lasting=True)[0]

        assert with_fixed(found) == {"number": number}


def test_a_large_tensor_that_an_optimizer_has_now_is_reported_as_a_weight() -> None:
    lost = big(1.0)
    nothing: dict[int, int] = {}
    for _ in range(3):
        Snapshot(nothing).node(lost, 0)

    found = Snapshot({lost.untyped_storage().data_ptr(): 0}).node(lost, 0)

    assert isinstance(found, WeightNode)


def test_what_a_walk_has_met_does_not_outlive_its_variables_though_the_walk_is_still_held() -> None:
    """An iterator over a loader that is still there would count as one in use."""
    loader = DataLoader(TensorDataset(torch.arange(4)))
    here: Scope = {"meter": Meter(), "loader": loader}
    recorded, blobs = record({"meter": Meter(), "loader": loader})
    restore = Restore(blobs, is_comparing=True)
    restore.module(here, recorded, "")
    met = weakref.ref(here["meter"])

    restore.forget()
    here.clear()

    assert met() is None
