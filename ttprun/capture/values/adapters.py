"""Adapters: read and restore the state of an object that is not in its attributes.

An adapter is an object with two functions. `record(value)` returns the state as plain values: numbers, text, bytes,
None, and lists, tuples and dictionaries of them, small tensors and arrays. `restore(value, state)` puts such a state
into an object of the same type that the script's set-up has made. Raising `NotProvedError` in `record` names the object
as not proved, with the error's text as the reason.

TABLE has ours, by the type's full name; a package registers its own under the same kind of name as an entry point of
the group `ttprun.adapters`.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any, Protocol

from ttprun.capture.records.nodes import (
    AnyNode,
    ArrayNode,
    BytesNode,
    DictNode,
    FrozensetNode,
    ListNode,
    Node,
    PlainNode,
    ReferenceNode,
    SetNode,
    StateNode,
    TensorNode,
    TupleNode,
)
from ttprun.capture.records.packing import pack, unpack_node
from ttprun.capture.values.compiled import pair_of
from ttprun.capture.values.not_proved import record_not_proved
from ttprun.capture.values.objects import is_of_user, restore_attributes
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Handler, Snapshot
from ttprun.capture.values.type_names import MISSING, name_of, short_name
from ttprun.introspect.looks import attributes_of, bases_of

MOST_BYTES = 1 << 20  # of a state that is recorded at each boundary
GROUP = "ttprun.adapters"
logger = logging.getLogger(__name__)


class NotProvedError(Exception):
    """The state cannot be recorded; the text says why."""


class Adapter(Protocol):
    """What an entry point gives."""

    def record(self, value: Any) -> Any:
        """The state as plain values."""

    def restore(self, value: Any, state: Any) -> None:
        """Put it into an object of the same type."""


class _Flag:
    """threading.Event and multiprocessing.Event: whether it is set. Who waits for it is woken."""

    def record(self, value: Any) -> Any:
        return value.is_set()

    def restore(self, value: Any, state: Any) -> None:
        if state != value.is_set():
            (value.set if state else value.clear)()


def _points_elsewhere(kind: Any) -> bool:
    """Whether a type of C's holds addresses, which mean nothing in another process."""
    if issubclass(kind, ctypes.Array):
        return _points_elsewhere(kind._type_)
    return not issubclass(kind, ctypes._SimpleCData) or kind._type_ in "zZPO"


class _Memory:
    """Numbers and arrays of C: their bytes."""

    def record(self, value: Any) -> Any:
        value = value.get_obj() if isinstance(value, SynchronizedBase) else value
        if _points_elsewhere(type(value)):
            raise NotProvedError("it points to other memory")
        if ctypes.sizeof(value) > MOST_BYTES:
            raise NotProvedError(f"its {ctypes.sizeof(value) >> 20} MiB are too much to record at each step")
        return ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))

    def restore(self, value: Any, state: Any) -> None:
        value = value.get_obj() if isinstance(value, SynchronizedBase) else value
        if ctypes.sizeof(value) != len(state):
            raise ValueError("it has another size")
        ctypes.memmove(ctypes.addressof(value), state, len(state))


class _Configuration:
    """omegaconf's configurations: the values that have been set in them, which only the set-up does."""

    def record(self, value: Any) -> Any:
        content = vars(value)["_content"] if "_content" in vars(value) else vars(value)["_val"]
        if type(content) is dict:
            return {key: self.record(item) for key, item in content.items()}
        if type(content) is list:
            return [self.record(item) for item in content]
        return self.record(content) if "_metadata" in getattr(content, "__dict__", ()) else content

    def restore(self, value: Any, state: Any) -> None:
        if self.record(value) != state:
            raise ValueError("it was changed in a step")


TABLE: dict[str, Adapter] = {
    "threading:Event": _Flag(),
    "multiprocessing.synchronize:Event": _Flag(),
    "multiprocessing.sharedctypes:SynchronizedBase": _Memory(),
    "_ctypes:_SimpleCData": _Memory(),
    "_ctypes:Array": _Memory(),
    "omegaconf.dictconfig:DictConfig": _Configuration(),
    "omegaconf.listconfig:ListConfig": _Configuration(),
}
_registered: dict[str, Any] | None = None


def adapter_for(kind: type) -> Adapter | None:
    """The adapter of a type or of its nearest base that has one; a registered one wins."""
    names = [name_of(base) for base in bases_of(kind)[:-1]]
    for name in names:
        entry = _entry_points().get(name)
        if entry is not None:
            try:
                adapter: Adapter = entry.load()
                return adapter() if isinstance(adapter, type) else adapter
            except Exception as error:  # of foreign code
                logger.warning("the adapter for %s cannot be used: %r", name, error)
        if name in TABLE:
            return TABLE[name]
    return None


def _entry_points() -> dict[str, Any]:
    """Registered adapters by the full name of their type, with a colon or a dot before the type's own name."""
    global _registered
    if _registered is None:
        entries = importlib.metadata.entry_points(group=GROUP)
        _registered = {
            entry.name if ":" in entry.name else ":".join(entry.name.rsplit(".", 1)): entry for entry in entries
        }
    return _registered


def record_with(adapter: Adapter, kind: type) -> Handler:
    """A handler for the objects of a type."""
    has_attributes = is_of_user(kind)

    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        try:
            state = adapter.record(value)
        except NotProvedError as error:
            return record_not_proved(snapshot, value, str(error))
        except Exception as error:
            return record_not_proved(snapshot, value, f"its state cannot be read ({error!r})")
        node = snapshot.separate_node(state, depth + 1)
        packed = pack(node)
        if not is_plain_state(node) or len(packed) > MOST_BYTES:
            return record_not_proved(snapshot, value, "its state holds what cannot be recorded")
        attributes = snapshot.attributes(attributes_of(value), depth) if has_attributes else {}
        return StateNode(snapshot.number(value), name_of(kind), packed, attributes)

    return handle


_CONTAINERS = (ListNode, TupleNode, SetNode, FrozensetNode)
_SMALL = (PlainNode, BytesNode, ArrayNode, TensorNode, ReferenceNode)


def is_plain_state(node: Node) -> bool:
    """Whether a value can be made of its node alone."""
    if isinstance(node, _CONTAINERS):
        return isinstance(node.items, bytes) or all(map(is_plain_state, node.items))
    if isinstance(node, DictNode):
        return all(isinstance(items, bytes) or all(map(is_plain_state, items)) for items in (node.keys, node.values))
    return not isinstance(node, AnyNode) or isinstance(node, _SMALL)


def restore_state(restore: Restore, live: Any, node: StateNode, name: str) -> Any:
    """Put the lost rank's state into the replacement's object."""
    kind = node.kind
    is_alike = live is not MISSING and name_of(type(live)) == kind
    adapter = adapter_for(type(live)) or pair_of(type(live)) if is_alike else None
    if adapter is None:
        return restore.refuse(live, unlike(name, kind, live))
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    try:
        adapter.restore(live, Restore([], is_comparing=True).value(MISSING, unpack_node(node.state), name))
    except Exception as error:
        return restore.refuse(live, f"{name}, a {short_name(kind)}, cannot be restored: {error}")
    if node.attributes:
        restore_attributes(restore, live, node.attributes, name, keep=None)
    return live
