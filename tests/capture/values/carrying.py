"""Carry variables from a lost rank to its replacement, through what the recorder writes."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from tests.capture import user_values
from tests.capture.records import record_of
from ttprun.capture import values
from ttprun.capture.values import CannotRestoreError, Restore, Snapshot
from ttprun.capture.values.changes import ANSWERS, DICTIONARIES, ITEMS, LONG_LISTS
from ttprun.capture.values.long_items import SAMPLES
from ttprun.capture.values.trees import Comparison
from ttprun.introspect import ownership

ownership.add_user_directory(user_values.__file__)
ownership._user_directories.append(user_values.__file__)  # the file alone: the tests beside it are not the user's

Scope = dict[str, Any]
LONG = 100_010  # more items than are recorded one by one
_NOTHING: dict[int, int] = {}
LARGE = 40_000  # elements: more than are recorded, so that they are compared


def look_at_few(patch: pytest.MonkeyPatch, most: int) -> None:
    """Of each kind of things, so many are a part that is looked at in its turn."""
    for kind in (DICTIONARIES, ITEMS, LONG_LISTS, ANSWERS, SAMPLES):
        patch.setattr(kind, "most", 2 * most if kind is ANSWERS else most)  # two answers of each object


def record(
    scope: Scope, stepped: set[int] | None = None, key: str | None = None, is_lasting: bool = False
) -> tuple[Any, list[memoryview]]:
    """A scope as it comes out of the recorder; one with a key was recorded under it before."""
    snapshot = Snapshot(dict.fromkeys(stepped, 0) if stepped else _NOTHING)
    with values.room_to_walk():
        packed = values.pack(snapshot.variables(scope, key, is_lasting))
    blobs = as_the_recorder_writes_them(snapshot.blobs)
    return values.unpack_named(packed), blobs


def as_the_recorder_writes_them(blobs: list[torch.Tensor]) -> list[memoryview]:
    """What lies in memory where a blob says that it begins."""
    return [memoryview(ctypes.string_at(blob.data_ptr(), blob.nbytes)) for blob in blobs]


def carry(lost: Scope, here: Scope, stepped: set[int] | None = None) -> list[str]:
    """Put the lost rank's variables into the replacement's; returns the mismatches."""
    recorded, blobs = record(lost, stepped)
    restore = Restore(blobs, is_comparing=True)
    with values.room_to_walk():
        restore.module(here, recorded, "")
    return [*map(str, restore.doubts)]


def not_proved(lost: Scope) -> list[str]:
    """What `ttprun status` would say of these variables."""
    snapshot = Snapshot(_NOTHING)
    with values.room_to_walk():
        nodes = snapshot.variables(lost)
    return [*map(str, values.names_not_proved(snapshot, {"": nodes}))]


def is_refused(lost: Scope, here: Scope) -> bool:
    """Whether the recovery would end here with a reason."""
    try:
        return bool(carry(lost, here))
    except CannotRestoreError:
        return True


# Plain values of any form.
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet=st.characters(codec="utf-8"))
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4)
    | st.tuples(inner, inner)
    | st.dictionaries(st.text(alphabet="abc", max_size=2) | st.integers(0, 5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def big(fill: float) -> torch.Tensor:
    """A tensor of LARGE elements."""
    return torch.full((LARGE,), fill)


def are_alike(one: tuple[Scope, list[memoryview]], other: tuple[Scope, list[memoryview]]) -> bool:
    """Whether two scopes that were recorded stand for the same; numbers of objects do not count."""
    trees = [values.Tree(record_of(variables=[scope]), blobs) for scope, blobs in (one, other)]
    return Comparison(*trees).are_same_named(trees[0].variables[0], trees[1].variables[0])
