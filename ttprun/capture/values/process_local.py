"""What a replay makes again by itself (left_to_replay.py says what, and why): only the type is compared, or a digest.

A file that is closed can be made again.
"""

from __future__ import annotations

import io
import weakref
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED
from typing import Any

import xxhash

from ttprun.capture.records.nodes import ClosedNode, Node, NotProvedNode, RefusedNode, SameNode, WeakNode
from ttprun.capture.records.packing import pack
from ttprun.capture.values import save_futures
from ttprun.capture.values.not_proved import record_not_proved
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import Snapshot, traces
from ttprun.capture.values.trees import walk
from ttprun.capture.values.type_names import MISSING, name_of
from ttprun.introspect.looks import attributes_of, is_a, plain_of

_DONE = (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)  # states of a future


@traces
def record_same(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Compared by type."""
    snapshot.trace.typed.append(value)
    return SameNode(name_of(type(value)), "")


def record_future(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """Work that another thread or process was given: compared with what it gives, once that is known."""
    if save_futures.is_save(value):
        return save_futures.record(value)
    attributes = attributes_of(value)
    if attributes["_state"] not in _DONE:
        return RefusedNode("is work of another thread or process that is not done, and what it will give is not known")
    error, result = attributes["_exception"], attributes["_result"]
    if attributes["_state"] != FINISHED or error is not None:
        what = "cancelled" if error is None else f"{type(error).__qualname__} {_text_of(error)}"
        return SameNode(name_of(type(value)), what)
    node = snapshot.separate_node(result, depth + 1)
    if _is_untold(node):
        return RefusedNode(f"holds a {type(result).__qualname__}, which cannot be recorded")
    return SameNode(name_of(type(value)), xxhash.xxh3_64_hexdigest(pack(node)))


def record_weak_reference(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A weakref.ref, by its referent; one with a callback is compared by type."""
    if value.__callback__ is not None:
        return record_same(snapshot, value, depth)
    referent = value()
    return WeakNode(None if referent is None else snapshot.node(referent, depth + 1))


def restore_weak_reference(restore: Restore, live: Any, node: WeakNode, name: str) -> Any:
    """One to the counterpart of that object."""
    old = live() if type(live) is weakref.ref else MISSING
    if node.referent is None:
        return live if old is None else weakref.ref(_Gone())
    referent = restore.value(old, node.referent, f"{name}()")
    if referent is MISSING:
        return restore.refuse(live, f"{name} refers to an object that is not in the replacement")
    return live if referent is old else weakref.ref(referent)


class _Gone:
    """What a reference refers to that refers to nothing."""


def record_exception(snapshot: Snapshot, value: BaseException, depth: int) -> Any:
    """An exception that was kept: compared with what it says."""
    return SameNode(name_of(type(value)), _text_of(value))


def _text_of(error: BaseException) -> str:
    """What an exception says, as far as that is not up to the script's own objects."""
    arguments = BaseException.args.__get__(error)  # type: ignore[attr-defined]
    return " ".join(str(plain_of(argument)) for argument in arguments if is_a(argument, (int, float, str, bytes)))


def restore_closed(restore: Restore, live: Any, node: ClosedNode, name: str) -> Any:
    """A closed file, which `with open(...) as file` leaves in a variable. Any closed file matches."""
    if getattr(live, "closed", False) is True:
        return live
    made = io.BytesIO()
    made.close()
    return made


def record_unknown(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """An object of an extension module: compared by a digest of what it would give to pickle, walked by us."""
    try:
        reduced = value.__reduce_ex__(2)
        if isinstance(reduced, str):
            return SameNode(name_of(type(value)), reduced)
        separate = Snapshot(snapshot.stepped, is_separate=True)
        separate.numbers[id(value)] = 0
        nodes = [separate.node(list(part) if hasattr(part, "__next__") else part, depth + 1) for part in reduced[:5]]
        packed = pack(nodes)
    except Exception:
        return record_not_proved(snapshot, value)
    if separate.blobs or any(map(_is_untold, nodes)):
        return record_not_proved(snapshot, value, "its content cannot be recorded")
    return SameNode(name_of(type(value)), xxhash.xxh3_64_hexdigest(packed))


def record_file_in_memory(snapshot: Snapshot, value: io.StringIO | io.BytesIO, depth: int) -> Any:
    """A file in memory: compared by what it holds, since no program was met that changes one in its steps."""
    return ClosedNode(name_of(type(value))) if value.closed else record_unknown(snapshot, value, depth)


def _is_untold(node: Node) -> bool:
    return any(isinstance(part, RefusedNode | NotProvedNode) for part, _ in walk(node, ""))
