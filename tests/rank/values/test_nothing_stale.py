"""Whatever a script has in its variables: never is an old value left standing."""

from __future__ import annotations

import argparse
import contextlib
import decimal
import functools
import hashlib
import logging
import math
import operator
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

from tests.rank.user_values import (
    Meter,
)
from tests.rank.values.carrying import (
    Scope,
    big,
    carry,
    is_refused,
    record,
)
from ttprun.rank.values import CannotRestoreError, Restore


def test_a_name_that_the_lost_rank_has_deleted_is_not_in_the_replacement() -> None:
    here: Scope = {"step": 0, "batch": [1], "scratch": 2}

    carry({"step": 1, "batch": [1]}, here)

    assert here == {"step": 1, "batch": [1]}


def test_what_the_replacement_has_not_made_and_cannot_make_is_refused_with_its_name() -> None:
    with pytest.raises(
        CannotRestoreError, match="writer is a Logger in the lost rank, cannot be recorded, and is not set"
    ):
        carry({"writer": logging.getLogger("x")}, {})


def test_on_the_way_to_the_boundary_what_does_not_fit_is_left_as_it_is() -> None:
    recorded, blobs = record({"step": 7, "writer": logging.getLogger("x"), "meter": Meter(), "data": big(1.0)})
    here: Scope = {"step": 1, "data": None}

    Restore(blobs, is_comparing=False).module(here, recorded, "")

    assert here == {"step": 7, "data": None}


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


def test_an_object_of_an_extension_module_is_compared() -> None:
    assert is_refused({"x": operator.itemgetter(1)}, {"x": None})
    assert not is_refused({"x": decimal.Context(prec=5)}, {"x": decimal.Context(prec=5)})
    assert is_refused({"x": decimal.Context(prec=5)}, {"x": decimal.Context(prec=6)})
    assert is_refused({"x": hashlib.sha256(b"a")}, {"x": hashlib.sha256(b"b")})


def test_nothing_in_a_record_can_call_what_the_script_has_not_made() -> None:
    """A record names functions and types; it never calls a function, and makes only values of known kinds."""
    struck: list[int] = []
    here: Scope = {"x": 0, "strike": lambda: struck.append(1)}

    with pytest.raises((CannotRestoreError, KeyError)):
        Restore([], True).module(here, {"x": ["l", 0, [], "os:system", {}]}, "")
    with pytest.raises((CannotRestoreError, KeyError)):
        Restore([], True).module(here, {"x": ["v", "subprocess:Popen", {"args": "true"}]}, "")

    assert struck == []
