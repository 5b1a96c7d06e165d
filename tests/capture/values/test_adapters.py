"""Objects with state that Python cannot see: recorded by an adapter, compared, or named as not proved."""

from __future__ import annotations

import _random
import ctypes
import datetime
import functools
import hashlib
import importlib
import logging
import mmap
import multiprocessing
import queue
import re
import sqlite3
import threading
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.capture import user_values
from tests.capture.values.carrying import Scope, carry, is_refused, not_proved
from ttprun.capture.values import CannotRestoreError, adapters


class Pointing(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p),)


def _set(event: Any) -> Any:
    event.set()
    return event


def test_an_event_that_is_set_wakes_the_thread_that_waits_for_it() -> None:
    lost, live = _set(threading.Event()), threading.Event()
    thread = threading.Thread(target=live.wait, args=(60,))
    thread.start()

    carry({"stop": lost}, {"stop": live})
    thread.join(60)

    assert not thread.is_alive()


NAMED: dict[str, tuple[Callable[[], Any], str]] = {
    "digest": (lambda: hashlib.sha256(b"a"), "_hashlib.HASH"),
    "compressor": (zlib.compressobj, "zlib.Compress"),
    "pointer of C": (lambda: Pointing(5), f"{Pointing.__module__}.Pointing"),
    "match": (lambda: re.match("a", "ab"), "re.Match"),
    "semaphore": (threading.Semaphore, "threading.Semaphore"),
    "semaphore between processes": (multiprocessing.Semaphore, "multiprocessing.synchronize.Semaphore"),
    "database": (lambda: sqlite3.connect(":memory:"), "sqlite3.Connection"),
    "weak table": (weakref.WeakValueDictionary, "weakref.WeakValueDictionary"),
    "array between processes": (
        lambda: multiprocessing.Array("d", 2),
        "multiprocessing.sharedctypes.SynchronizedArray",
    ),
    "file in memory": (lambda: mmap.mmap(-1, 4096), "mmap.mmap"),
    "memory of a tensor": (lambda: torch.ones(2).untyped_storage(), "torch.storage.UntypedStorage"),
}


@pytest.mark.parametrize("kind", NAMED)
def test_an_object_that_reveals_nothing_of_its_state_is_named_and_does_not_hinder_a_recovery(kind: str) -> None:
    make, name = NAMED[kind]
    lost = {"step": 1, "deep": {"list": [make()]}, "x": make()}
    here: Scope = {"step": 0, "deep": {"list": [make()]}, "x": make()}

    assert carry(lost, here) == []

    assert here["step"] == 1
    assert [one.partition(":")[0] for one in not_proved(lost)] == [f"deep['list'][0] ({name})", f"x ({name})"]


def test_loggers_and_locks_are_not_named() -> None:
    assert (
        not_proved({"log": logging.getLogger("a"), "lock": threading.Lock(), "condition": threading.Condition()}) == []
    )


@pytest.mark.parametrize("make", [user_values.make_noise, lambda: user_values.Cached.noise])
def test_a_function_that_has_remembered_something_is_named(make: Callable[[], Any]) -> None:
    lost = make()
    assert not_proved({"noise": lost}) == []

    lost(0, number=4)

    assert [one.partition(":")[0] for one in not_proved({"noise": lost})] == ["noise (functools._lru_cache_wrapper)"]
    assert carry({"noise": lost}, {"noise": make()}) == []


def test_the_cache_of_a_librarys_function_is_left_alone() -> None:
    here: Scope = {"cached": re._compile_template if hasattr(re, "_compile_template") else functools.lru_cache(len)}

    assert not is_refused(dict(here), here)


def test_a_configuration_of_omegaconf_is_compared() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    made = {"lr": 0.1, "model": {"width": 8, "layers": [1, 2], "half": "${lr}"}, "name": None}
    lost, live = (omegaconf.OmegaConf.create(made) for _ in range(2))
    here = {"cfg": live, "model": live.model}

    assert carry({"cfg": lost, "model": lost.model}, here) == []
    assert here["model"] is live.model
    lost.model.layers[1] = 7
    assert is_refused({"cfg": lost}, {"cfg": live})


def test_a_configuration_of_ml_collections_that_is_changed_in_mid_run_comes_back() -> None:
    config_dict = pytest.importorskip("ml_collections").config_dict
    lost, live = (config_dict.create(lr=0.1, model=config_dict.create(width=8)) for _ in range(2))
    lost.lr, lost.model.width, lost.late = 0.05, 16, 1

    assert carry({"cfg": lost}, {"cfg": live}) == []

    assert live == lost
    assert not_proved({"cfg": lost}) == []


class Simulator(_random.Random):
    """What an extension gives: all of its state is C's."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


def test_an_object_of_an_extension_that_reports_its_state_comes_back() -> None:
    lost, live = Simulator(1), Simulator(2)
    lost.random()

    assert carry({"game": lost}, {"game": live}) == []

    assert live.random() == lost.random()
    assert not_proved({"game": lost}) == []


class Deaf(Simulator):
    def setstate(self, state: Any) -> None:
        """As a second __setstate__ of pybind11's."""


def test_an_object_of_an_extension_that_does_not_take_a_state_over_is_refused() -> None:
    with pytest.raises(CannotRestoreError, match="setstate has not set the state"):
        carry({"game": Deaf(1)}, {"game": Deaf(2)})


class Inbox(queue.SimpleQueue):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.taken = 0


def test_a_subclass_of_a_compiled_type_that_reveals_nothing_is_named() -> None:
    lost = Inbox()
    lost.put("a message")

    assert carry({"inbox": lost}, {"inbox": Inbox()}) == []

    (named,) = not_proved({"inbox": lost})
    assert named == f"inbox ({__name__}.Inbox): it can change, and does not show its state"


def test_a_subclass_of_a_compiled_type_is_named_without_attributes_too() -> None:
    (named,) = not_proved({"inbox": user_values.BareInbox()})

    assert named.startswith("inbox (tests.capture.user_values.BareInbox): ")


class Moment(datetime.datetime):
    label = ""


def test_a_subclass_of_a_compiled_type_is_compared_by_what_it_gives_to_pickle() -> None:
    lost, live, other = Moment(2024, 1, 1), Moment(2024, 1, 1), Moment(2025, 1, 1)

    assert carry({"best": lost}, {"best": live}) == []

    assert not_proved({"best": lost}) == []
    with pytest.raises(CannotRestoreError, match="best, a Moment, differs from the lost rank's"):
        carry({"best": lost}, {"best": other})


def test_a_function_pointer_is_not_named() -> None:
    call_back = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)

    assert not_proved({"call_back": call_back}) == []


def test_a_registered_adapter_records_and_restores(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "simulators-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulators\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ttprun.adapters]\nhidden_game.Game = hidden_game:Adapter\n")
    (tmp_path / "hidden_game.py").write_text(
        "class Game:\n    __slots__ = ()\n\nscores = {}\n\n"
        "class Adapter:\n"
        "    def record(self, value):\n        return {'score': scores[id(value)]}\n"
        "    def restore(self, value, state):\n        scores[id(value)] = state['score']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(adapters, "_registered", None)
    game = importlib.import_module("hidden_game")
    lost, live = game.Game(), game.Game()
    game.scores.update({id(lost): 7, id(live): 0})

    assert carry({"game": lost}, {"game": live}) == []

    assert game.scores[id(live)] == 7
    monkeypatch.setattr(adapters, "_registered", None)
