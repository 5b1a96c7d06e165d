"""Objects whose state is not in their attributes: it is read and set by methods.

Random generators have methods of their own. A simulator or decoder of a compiled extension returns its state by
`__getstate__` and sets it by `__setstate__`, or by a pair of methods of other names (PAIRS). The state is recorded as
plain values and set on the object that the replay has made; then it is read again, since some (pybind11's) silently
ignore a second `__setstate__`. Objects without such a pair are compared by their pickled state, or named as not proved.
Nothing is unpickled. For all others there are adapters.
"""

from __future__ import annotations

import _random
import importlib.metadata
import logging
import random
from typing import Any, Protocol

import numpy
import torch

from ttprun.capture.records.nodes import (
    AnyNode,
    ArrayNode,
    DictNode,
    FrozensetNode,
    ListNode,
    Node,
    NumpyRandomNode,
    PlainNode,
    RandomNode,
    ReferenceNode,
    SameNode,
    SetNode,
    StateNode,
    TensorNode,
    TupleNode,
)
from ttprun.capture.records.packing import MISSING, name_of, pack, short_name, unpack_node
from ttprun.capture.values.objects import is_of_user, restore_attributes
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Handler, Snapshot
from ttprun.capture.values.tensors import raw_bytes
from ttprun.introspect import random_state
from ttprun.introspect.safe_reads import (
    attributes_of,
    base_of_class,
    bases_of,
    dictionary_of,
    dictionary_of_class,
    is_a,
    size_of_objects,
)
from ttprun.protocol.reason import Reason

PAIRS = (
    ("__getstate__", "__setstate__"),
    ("clone_state", "restore_state"),
    ("cloneState", "restoreState"),
    ("get_state", "set_state"),
    ("getstate", "setstate"),
    ("state_dict", "load_state_dict"),
)
_POINTER = 8


class Pair:
    """An adapter by two methods of the object's own."""

    def __init__(self, get: str, put: str) -> None:
        self._get, self._put = get, put

    def record(self, value: Any) -> Any:
        """The state of an object."""
        return getattr(value, self._get)()

    def restore(self, value: Any, state: Any) -> None:
        """Set the state of an object. Raises ValueError if it has another one then."""
        getattr(value, self._put)(state)
        if self.record(value) != state:
            raise ValueError(f"{self._put} has not set the state")


def pair_of(kind: type) -> Pair | None:
    """The methods to read and set hidden state of a type's objects; None if they have none."""
    if not hides_state(kind):
        return None
    for get, put in PAIRS:
        if getattr(kind, get, None) is not getattr(object, get, None) and callable(getattr(kind, put, None)):
            return Pair(get, put)
    return None


def hides_state(kind: type) -> bool:
    """Whether objects hold more than Python's attributes and slots, as those of compiled extensions do."""
    return any(_own_bytes(base) > 0 for base in bases_of(kind)[:-1])


def _own_bytes(kind: Any) -> int:
    """Bytes that a class adds to its base's objects, without slots, dictionary and weak references."""
    attributes = dictionary_of_class(kind)
    names = attributes.get("__slots__", ())
    slots = [slot for slot in attributes.values() if type(slot).__name__ == "member_descriptor"] if names else []
    # A name that is there twice has two places.
    repeated = len(names) - len(set(names)) if isinstance(names, list | tuple) else 0
    expected = len(slots) + repeated + ("__dict__" in attributes) + ("__weakref__" in attributes)
    return int(size_of_objects(kind) - size_of_objects(base_of_class(kind)) - _POINTER * expected)


MOST_BYTES = 1 << 20  # of a state that is recorded at each boundary
GROUP = "ttprun.adapters"
logger = logging.getLogger(__name__)


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


class _Value:
    """multiprocessing.Value, a number that the workers of a loader read."""

    def record(self, value: Any) -> Any:
        return value.value

    def restore(self, value: Any, state: Any) -> None:
        value.value = state


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
    "multiprocessing.sharedctypes:Synchronized": _Value(),
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
        except Exception as error:
            return snapshot.unproved(type(value), f"its state cannot be read ({error!r})")
        node = snapshot.separate_node(state, depth + 1)
        packed = pack(node)
        if not is_plain_state(node) or len(packed) > MOST_BYTES:
            return snapshot.unproved(type(value), "its state holds what cannot be recorded")
        attributes = snapshot.attributes(attributes_of(value), depth) if has_attributes else {}
        return StateNode(snapshot.number(value), name_of(kind), packed, attributes)

    return handle


_CONTAINERS = (ListNode, TupleNode, SetNode, FrozensetNode)
_SMALL = (PlainNode, ArrayNode, TensorNode, ReferenceNode)


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


OF_NUMPY = (numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState)


def record_torch(snapshot: Snapshot, value: torch.Generator, depth: int) -> Any:
    """torch.Generator."""
    if value is torch.default_generator:
        return SameNode("torch:Generator", "the default one")
    return RandomNode(snapshot.number(value), "torch", raw_bytes(value.get_state()))


def record_python(snapshot: Snapshot, value: random.Random, depth: int) -> Any:
    """random.Random."""
    if type(value).getstate is random.Random.getstate:
        words = _random.Random.getstate(value)
        version, gauss = random.Random.VERSION, (dictionary_of(value) or {}).get("gauss_next")
    else:
        version, words, gauss = value.getstate()
    return RandomNode(snapshot.number(value), "python", [version, list(words), gauss])


def record_numpy(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """numpy.random's Generator, BitGenerator, and RandomState over any bit generator."""
    is_legacy = is_a(value, numpy.random.RandomState)
    state = value.get_state(legacy=False) if is_legacy else getattr(value, "bit_generator", value).state
    return NumpyRandomNode(snapshot.number(value), snapshot.node(state, depth + 1))


def restore_random(restore: Restore, live: Any, node: RandomNode | NumpyRandomNode, name: str) -> Any:
    """Put the state into the replacement's own generator."""
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    state: Any = node.state
    try:
        if isinstance(node, NumpyRandomNode):
            state = restore.value(MISSING, state, name)
            if isinstance(live, numpy.random.RandomState):
                live.set_state(state)
            else:
                getattr(live, "bit_generator", live).state = state
        elif node.kind == "torch":
            live.set_state(random_state.tensor_from_bytes(state))
        else:
            live.setstate((state[0], tuple(state[1]), state[2]))
    except (AttributeError, TypeError, ValueError):
        return restore.refuse(live, Reason("random-draws", f"{name} is another random generator than in the lost rank"))
    return live
