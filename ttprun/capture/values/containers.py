"""Lists, tuples, sets, deques and dictionaries, their subclasses, and other containers of plain items."""

from __future__ import annotations

import collections
import types
from collections import deque
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

from ttprun import text_hashes
from ttprun.capture.records.nodes import (
    AnyNode,
    DequeNode,
    DictNode,
    FrozensetNode,
    IdNode,
    ListNode,
    LongNode,
    Node,
    Number,
    ReferenceNode,
    RefusedNode,
    SameNode,
    SetNode,
    TupleNode,
    WeightNode,
)
from ttprun.capture.records.packing import MISSING, is_settled, listed, look_up, look_up_type, name_of
from ttprun.capture.values.data_trees import holds_trees, node_of, note_changed
from ttprun.capture.values.long_items import MANY_ROWS, MAX_ITEMS, MIN_ITEMS, KeptItems, kept_items, objects_in
from ttprun.capture.values.objects import restore_attributes
from ttprun.capture.values.restore import Restore, has_no_state, unlike
from ttprun.capture.values.snapshot import Snapshot, traces
from ttprun.introspect import current_rank
from ttprun.introspect.safe_reads import attributes_of, base_of, dictionary_of, is_a, length_of, slots_of
from ttprun.protocol.reason import Reason

_OTHER_ORDER = "another iteration order than in the lost rank, which a rebuilt one does not get back: a dict keeps it"
Handler = Callable[[Snapshot, Any, int], Any]
_FIXED_ITEMS = (SameNode, WeightNode, ReferenceNode)  # of a set
_PLAIN: tuple[Any, ...] = (None, {})  # what `_own` says of a subclass, of the class itself
_LOWEST_ID = 1 << 32  # what a script counts is mostly less, and an address more


# Methods that a class overrides may load modules, or count: everything is read and written through the base class.
_FACTORY: Any = vars(collections.defaultdict)["default_factory"]
_factory_of = _FACTORY.__get__
_max_length_of: Any = deque.maxlen.__get__


def _held(live: Any, base: Any) -> list[Any]:
    """The items of a container (keys of a dictionary); none if it is not such a container."""
    if not issubclass(type(live), base):
        return []
    return list((base_of(live) if base is dict else base).__iter__(live))


def _own(snapshot: Snapshot, value: Any, exact: type | None, depth: int) -> tuple[Any, ...]:
    """What a container of a subclass has in addition to its items: its type and attributes."""
    kind = type(value)
    if kind is exact:
        return ()
    attributes = snapshot.attributes(attributes_of(value), depth)
    if issubclass(kind, collections.defaultdict):
        attributes["default_factory"] = snapshot.node(_factory_of(value), depth + 1)
    return name_of(kind), attributes


def _items(snapshot: Snapshot, value: Any, items: Any, depth: int, which: int = 0) -> list[Any] | KeptItems:
    """Nodes of items; remembered ones if they are many and unchanged.

    which   as for `kept_items`
    """
    if len(items) < MIN_ITEMS or holds_trees(items):
        return snapshot.items(list(items), depth)
    kept = kept_items(snapshot, value, items, which)
    if snapshot.is_separate:
        return kept or snapshot.items(list(items), depth)
    if (kept is not None and kept.samples) or len(items if kept is None else kept.trace.contents) > MANY_ROWS:
        snapshot.trace.open += 1  # what is in it is looked at here
    elif kept is not None:
        snapshot.trace.add(kept.trace)
        snapshot.alive += kept.objects
    return kept or snapshot.items(list(items), depth)


def _packed(snapshot: Snapshot, nodes: list[Node] | KeptItems) -> Any:
    if isinstance(nodes, list):
        return nodes
    return bytes(nodes.packed) if snapshot.is_keeping else nodes.packed


def _long(
    snapshot: Snapshot, number: Number, value: Any, length: int, *parts: list[Node] | KeptItems
) -> LongNode | RefusedNode:
    """Too long to be recorded: compared by a digest."""
    digests, objects, first = [], 0, Number(0)
    for part in parts:
        if isinstance(part, list):
            return RefusedNode(f"is a container of {length} items that can change", "container-too-long")
        digests.append(part.digest)
        if part.objects and not objects:
            met = snapshot.numbers.get(id(part.objects[0]))
            objects, first = len(part.objects), Number(part.first if met is None else met)
    return LongNode(number, name_of(type(value)), length, " ".join(digests), first, objects, _age(*parts))


def _age(*parts: list[Node] | KeptItems) -> int:
    return max(0 if isinstance(part, list) else part.age for part in parts)


def _name_age(restore: Restore, node: ListNode | DequeNode | DictNode | SetNode | LongNode, name: str) -> None:
    """What was not looked at as a whole at the boundary itself is named."""
    if node.age:
        restore.note_age(name, node.age)


def restore_long(restore: Restore, live: Any, node: LongNode, name: str) -> Any:
    """Compare with what the replay has made."""
    _name_age(restore, node, name)
    if live is MISSING or name_of(type(live)) != node.kind:
        return restore.refuse(live, unlike(name, node.kind, live))
    if length_of(live) != node.length:
        restore.is_same(False, name, "is a long container of another length")
        return live
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    mine = restore.snapshot(live)
    is_same = isinstance(mine, LongNode) and mine.digest == node.digest
    restore.is_same(is_same, name, "is a long container with other items")
    if is_same:
        for number, item in enumerate(objects_in(live), node.first):
            restore.claim(number, item)
    return live


def record_sequence(base: type) -> Handler:
    """A handler for lists and deques."""
    iterate: Any = base.__iter__  # type: ignore[attr-defined]

    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        if base is list and (data := node_of(snapshot, value)) is not None:
            return data
        number = snapshot.number(value)
        snapshot.trace.contents.append(value)
        items = value if type(value) in (list, deque) else list(iterate(value))
        recorded = _items(snapshot, value, items, depth)
        if len(items) > MAX_ITEMS and snapshot.has_limit:
            return _long(snapshot, number, value, len(items), recorded)
        if type(value) is list and type(recorded) is list:
            return ListNode(number, recorded, None, {}, 0)
        nodes = _packed(snapshot, recorded)
        if base is list:
            kind, attributes = _own(snapshot, value, list, depth) or _PLAIN
            return ListNode(number, nodes, kind, attributes, _age(recorded))
        kind, attributes = _own(snapshot, value, None, depth)
        return DequeNode(number, nodes, kind, attributes, _max_length_of(value), _age(recorded))

    return traces(handle)


def _made(restore: Restore, live: Any, number: int, kind_name: str | None, base: type, name: str) -> Any:
    """The container to fill: the live one if it can be the recorded one's counterpart, else a new and empty one."""
    kind: Any = base if kind_name is None else look_up_type(kind_name, base)
    if kind is None and name_of(type(live)) == kind_name:
        kind = type(live)
    if type(live) is kind and restore.claim(number, live):
        return live
    if kind is None:
        return restore.refuse(MISSING, unlike(name, kind_name or "", live))
    made: Any = kind.__new__(kind)
    restore.claim(number, made)
    return made


def restore_list(restore: Restore, live: Any, node: ListNode | DequeNode, name: str) -> Any:
    """A list or deque: in place, or a new one if it is another one's or a deque of another maximal length."""
    _name_age(restore, node, name)
    base: Any = deque if isinstance(node, DequeNode) else list
    is_alike = not (isinstance(node, DequeNode) and isinstance(live, deque)) or _max_length_of(live) == node.max_length
    target = _made(restore, live if is_alike else MISSING, node.number, node.kind, base, name)
    if target is MISSING:
        return live
    items = restore.items(_held(live, base), node.items, name)
    if not restore.are_all_here(items, node.items):  # better the replay's own than one with gaps
        return live
    if isinstance(node, DequeNode):
        deque.__init__(target, items, node.max_length)
    else:
        list.__setitem__(target, slice(None), items)
        note_changed(target)
    if node.kind is not None:
        restore_attributes(restore, target, node.attributes, name)
    return target


@traces
def record_tuple(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A tuple; with the type of a named tuple."""
    if type(value) is not tuple and (dictionary_of(value) is not None or slots_of(type(value))):
        snapshot.trace.open += 1
    items = snapshot.items(value if type(value) is tuple else tuple(tuple.__iter__(value)), depth)
    if len(items) > MAX_ITEMS:
        return RefusedNode(f"is a tuple of {len(items)} items", "container-too-long")
    return TupleNode(items, *_own(snapshot, value, tuple, depth))


def restore_tuple(restore: Restore, live: Any, node: TupleNode, name: str) -> Any:
    """The replacement's tuple if nothing has changed, else a new one."""
    kind: Any = tuple if node.kind is None else look_up_type(node.kind, tuple)
    if kind is None and node.kind is not None:
        kind = type(live) if name_of(type(live)) == node.kind else None
        if kind is None:
            return restore.refuse(live, unlike(name, node.kind, live))
    have = _held(live, tuple)
    items = restore.items(have, node.items, name)
    if type(live) is kind and len(have) == len(items) and all(map(is_, have, items)):
        return live
    if len(items) != len(node.items):
        return live
    if hasattr(kind, "n_sequence_fields"):  # e.g. results of torch.max and time.localtime
        return kind(items)
    made = tuple.__new__(kind, items) if kind is not tuple else tuple(items)
    if node.attributes:
        restore_attributes(restore, made, node.attributes, name)
    return made


def _ids(snapshot: Snapshot, items: Iterable[Any], depth: int) -> list[Node] | None:
    """Nodes of the keys of a dict or the items of a set, if they begin with the id of an object that was met."""
    first = next(iter(items), None)
    if type(first) is not int or first < _LOWEST_ID:
        return None
    snapshot.trace.open += 1
    carrier = current_rank.current()
    weights = {id(weight): weight for weight in ([] if carrier is None else carrier.observers.weights())}

    def node_of(item: Any) -> Node:
        if type(item) is int and (number := snapshot.numbers.get(item)) is not None:
            return IdNode(ReferenceNode(number))
        if type(item) is int and item in weights:
            return IdNode(snapshot.node(weights[item], depth + 1))
        return snapshot.node(item, depth + 1)

    nodes = [node_of(item) for item in items]
    return nodes if isinstance(nodes[0], IdNode) else None


def restore_id(restore: Restore, live: Any, node: IdNode, name: str) -> Any:
    """The id of the counterpart."""
    referent = restore.value(MISSING, node.referent, name)
    return MISSING if referent is MISSING else id(referent)


def record_set(exact: Any) -> Handler:
    """A handler for sets of plain values, or of objects that the replay reproduces."""

    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        number = snapshot.number(value) if exact is set else Number(0)
        if type(value) is not frozenset:
            snapshot.trace.contents.append(value)
        first = next(exact.__iter__(value), None)
        is_long = type(value) is set and len(value) >= MIN_ITEMS and not snapshot.is_separate
        if is_long and not (type(first) is int and first >= _LOWEST_ID):
            recorded = _items(snapshot, value, value, depth)
            if isinstance(recorded, KeptItems) and not recorded.numbers:
                return SetNode(number, _packed(snapshot, recorded), None, {}, _age(recorded))
        items = list(exact.__iter__(value))
        if all(type(item) is types.FunctionType or is_a(item, type) for item in items) and not all(
            map(_has_name, items)
        ):
            names = sorted(f"{item.__module__}:{item.__qualname__}" for item in items)
            return SameNode(name_of(exact), " ".join(names))  # what a decorator has collected: no state
        nodes = _ids(snapshot, items, depth) or [snapshot.node(item, depth + 1) for item in items]
        if all(is_settled(node) or type(node) is IdNode for node in nodes) or all(
            issubclass(type(item), type) and not isinstance(node, SameNode)  # a class that others find by its name
            for item, node in zip(items, nodes, strict=False)
        ):
            own = _own(snapshot, value, exact, depth)
            return SetNode(number, nodes, *own) if exact is set else FrozensetNode(nodes, *own)
        if any(isinstance(node, AnyNode) and not isinstance(node, _FIXED_ITEMS) for node in nodes):
            return RefusedNode("is a set of objects that can change", "set-of-objects")
        kinds = sorted(name_of(type(item)) for item in items)
        return SameNode(name_of(type(value)), f"{len(kinds)} of {', '.join(kinds)}")

    return traces(handle)


def _has_name(item: Any) -> bool:
    """Whether a function or class is what its name gives: a decorator may put something else in its place."""
    try:
        return look_up(name_of(item)) is item
    except (AttributeError, TypeError):
        return False


def _has_lasting_hash(item: Any) -> bool:
    """Whether it has the same hash in each run, even without ttprun."""
    if type(item) is tuple:
        return all(map(_has_lasting_hash, item))
    if type(item) in (str, bytes):
        return text_hashes.have_seed_of_user()
    return type(item) in (int, bool, float) and item == item


def restore_set(restore: Restore, live: Any, node: SetNode, name: str) -> Any:
    """In place, or a new one. Refuses if the iteration order differs then, which depends on the set's history."""
    _name_age(restore, node, name)
    target = _made(restore, live, node.number, node.kind, set, name)
    if target is MISSING:
        return live
    items = restore.items([], node.items, name)
    is_as_recorded = _is_as_recorded
    if any(type(item) is IdNode for item in listed(node.items)):  # its order is another one in each process
        is_as_recorded = _has_the_same
    if not is_as_recorded(_held(target, set), items):
        set.clear(target)
        set.update(target, items)
        if not is_as_recorded(_held(target, set), items):
            return restore.refuse(live, Reason("iteration-order", f"{name} is a set with {_OTHER_ORDER}"))
    restore_attributes(restore, target, node.attributes, name)
    return target


def _is_as_recorded(have: list[Any], items: list[Any]) -> bool:
    return have == items if all(map(_has_lasting_hash, items)) else _has_the_same(have, items)


def _has_the_same(have: list[Any], items: list[Any]) -> bool:
    return set(have) == set(items)


def restore_frozenset(restore: Restore, live: Any, node: FrozensetNode, name: str) -> Any:
    """The replacement's frozenset if nothing has changed, else a new one; as `restore_set`."""
    kind: Any = frozenset if node.kind is None else look_up_type(node.kind, frozenset)
    items = restore.items([], node.items, name)
    if kind is None:
        return restore.refuse(live, unlike(name, node.kind or "", live))
    if type(live) is kind and _is_as_recorded(_held(live, frozenset), items):
        return live
    made = frozenset.__new__(kind, items)
    if not _is_as_recorded(_held(made, frozenset), items):
        return restore.refuse(live, Reason("iteration-order", f"{name} is a frozenset with {_OTHER_ORDER}"))
    return made


@traces
def record_dict(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A dictionary: keys and values, in order."""
    if (data := node_of(snapshot, value)) is not None:
        return data
    number = snapshot.number(value)
    snapshot.trace.contents.append(value)
    all_keys: Any
    all_values: Any
    if type(value) is dict and len(value) >= MIN_ITEMS:
        all_keys, all_values = value.keys(), value.values()  # mostly not iterated over
    elif type(value) is dict:
        all_keys, all_values = list(value), list(value.values())
    else:
        base = base_of(value)
        all_keys, all_values = list(base.__iter__(value)), list(base.values(value))
    age = 0
    may_be_ids = all_keys and type(next(iter(all_keys))) is int and len(all_keys) <= MAX_ITEMS
    if may_be_ids and (ids := _ids(snapshot, all_keys, depth)) is not None:
        keys, values = ids, snapshot.items(list(all_values), depth)
    elif len(all_keys) < MIN_ITEMS:
        keys, values = snapshot.items(all_keys, depth), snapshot.items(all_values, depth)
    else:
        of_keys = _items(snapshot, value, all_keys, depth)
        of_values = _items(snapshot, value, all_values, depth, 1)
        if len(all_keys) > MAX_ITEMS and snapshot.has_limit:
            return _long(snapshot, number, value, len(all_keys), of_keys, of_values)
        keys, values, age = _packed(snapshot, of_keys), _packed(snapshot, of_values), _age(of_keys, of_values)
    kind, attributes = _PLAIN if type(value) is dict else _own(snapshot, value, dict, depth) or _PLAIN
    return DictNode(number, keys, values, kind, attributes, age)


def restore_dict(restore: Restore, live: Any, node: DictNode, name: str) -> Any:
    """In place, in the order of the lost rank, without further keys; or a new one."""
    _name_age(restore, node, name)
    target = _made(restore, live, node.number, node.kind, dict, name)
    if target is MISSING:
        return live
    base: Any = base_of(target)
    have = _held(live, dict)
    key_nodes, value_nodes = map(listed, (node.keys, node.values))
    old = dict(zip(have, base_of(live).values(live), strict=True)) if issubclass(type(live), dict) else {}
    new = {}
    for index, (key_node, value_node) in enumerate(zip(key_nodes, value_nodes, strict=True)):
        key = restore.value(have[index] if index < len(have) else MISSING, key_node, f"a key of {name}")
        value = restore.value(old.get(key, MISSING), value_node, f"{name}[{key!r}]")
        if value is MISSING or key is MISSING:
            if restore.is_comparing and not (key is not MISSING and has_no_state(value_node)):
                restore.refuse(live, f"{name} holds objects that are not in the replacement and cannot be recorded")
            continue
        new[key] = value
    if list(new) != list(base.__iter__(target)) or any(
        base.__getitem__(target, key) is not value for key, value in new.items()
    ):
        base.clear(target)
        for key, value in new.items():
            base.__setitem__(target, key, value)
    note_changed(target)
    if node.kind is not None:
        attributes = dict(node.attributes)
        if issubclass(type(target), collections.defaultdict):
            factory = restore.value(_factory_of(target) or MISSING, attributes.pop("default_factory"), name)
            _FACTORY.__set__(target, None if factory is MISSING else factory)
        restore_attributes(restore, target, attributes, name)
    return target
