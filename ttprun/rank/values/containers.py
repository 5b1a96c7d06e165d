"""Lists, tuples, sets, deques and dictionaries, their subclasses, and other containers of plain items."""

from __future__ import annotations

import array
import collections
import io
from collections import deque
from collections.abc import Callable
from operator import is_
from typing import Any

from ttprun import text_hashes
from ttprun.rank.process.looks import attributes_of, base_of, is_a, length_of
from ttprun.rank.values.long_items import MAX_ITEMS, MIN_ITEMS, Kept, kept_items, objects_in
from ttprun.rank.values.nodes import (
    MISSING,
    Tag,
    is_settled,
    look_up_type,
    name_of,
    unpack_items,
)
from ttprun.rank.values.objects import restore_attributes
from ttprun.rank.values.restore import Restore, unlike
from ttprun.rank.values.snapshot import Snapshot

_OTHER_ORDER = "another iteration order than in the lost rank, which a rebuilt one does not get back: a dict keeps it"
Handler = Callable[[Snapshot, Any, int], Any]


# Methods that a class overrides may load modules, or count: everything is read and written through the base class.
_FACTORY: Any = vars(collections.defaultdict)["default_factory"]
_factory_of = _FACTORY.__get__
_code_of: Any = vars(array.array)["typecode"].__get__
_max_length_of: Any = deque.maxlen.__get__


def _held(live: Any, base: Any) -> list[Any]:
    """The items of a container (keys of a dictionary); none if it is not such a container."""
    if not issubclass(type(live), base):
        return []
    return list((base_of(live) if base is dict else base).__iter__(live))


def _own(snapshot: Snapshot, value: Any, exact: type | None, depth: int) -> list[Any]:
    """What a container of a subclass has in addition to its items: its type and attributes."""
    kind = type(value)
    if kind is exact:
        return []
    attributes = snapshot.attributes(attributes_of(value), depth)
    if issubclass(kind, collections.defaultdict):
        attributes["default_factory"] = snapshot.node(_factory_of(value), depth + 1)
    return [name_of(kind), attributes]


def _items(snapshot: Snapshot, value: Any, items: list[Any], depth: int, which: int = 0) -> list[Any] | Kept:
    """Nodes of items; remembered ones if they are many and unchanged."""
    if len(items) < MIN_ITEMS:
        return snapshot.items(items, depth)
    return kept_items(snapshot, value, items, which) or snapshot.items(list(items), depth)


def _packed(found: list[Any] | Kept) -> Any:
    return found if isinstance(found, list) else found.packed


def _long(value: Any, length: int, *parts: list[Any] | Kept) -> list[Any]:
    """Too long to be recorded: compared by a digest."""
    digests, first = [], 0
    for part in parts:
        if isinstance(part, list):
            return [Tag.REFUSED, f"is a container of {length} items that can change"]
        digests.append(part.digest)
        first = first or part.first
    return [Tag.LONG, name_of(type(value)), length, " ".join(digests), first]


def restore_long(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """Compare with what the replay has made."""
    _, kind, length, digest, first = node
    if live is MISSING or name_of(type(live)) != kind:
        return restore.refuse(live, unlike(name, kind, live))
    if length_of(live) != length:
        restore.is_same(False, name, "is a long container of another length")
        return live
    mine = restore.snapshot(live)
    is_same = mine[0] == Tag.LONG and mine[3] == digest
    restore.is_same(is_same, name, "is a long container with other items")
    if is_same:
        for number, item in enumerate(objects_in(live), first):
            restore.claim(number, item)
    return live


def record_sequence(tag: Tag, exact: type | None) -> Handler:
    """A handler for lists and deques; `exact` is the type that need not be recorded."""
    iterate: Any = list.__iter__ if tag is Tag.LIST else deque.__iter__

    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        number = snapshot.number(value)
        items = value if type(value) is list else list(iterate(value))
        found = _items(snapshot, value, items, depth)
        if len(items) > MAX_ITEMS:
            return _long(value, len(items), found)
        nodes = _packed(found)
        own = _own(snapshot, value, exact, depth)
        return [tag, number, nodes, *own] if tag is Tag.LIST else [tag, number, nodes, *own, _max_length_of(value)]

    return handle


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


def restore_list(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """A list or deque: in place, or a new one if it is another one's or a deque of another maximal length."""
    base: Any = deque if node[0] == Tag.DEQUE else list
    kind, attributes, *length = node[3:] or [None, {}]
    is_alike = not (length and isinstance(live, deque)) or _max_length_of(live) == length[0]
    target = _made(restore, live if is_alike else MISSING, node[1], kind, base, name)
    if target is MISSING:
        return live
    items = restore.items(_held(live, base), node[2], name)
    if base is list:
        list.__setitem__(target, slice(None), items)
    else:
        deque.__init__(target, items, length[0])
    if len(node) > 3:
        restore_attributes(restore, target, attributes, name)
    return target


def record_tuple(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A tuple; with the type of a named tuple."""
    items = snapshot.items(value if type(value) is tuple else tuple(tuple.__iter__(value)), depth)
    if len(items) > MAX_ITEMS:
        return [Tag.REFUSED, f"is a tuple of {len(items)} items"]
    return [Tag.TUPLE, items, *_own(snapshot, value, tuple, depth)]


def restore_tuple(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """The same one if nothing has changed, else a new one."""
    kind: Any = tuple if len(node) == 2 else look_up_type(node[2], tuple)
    if kind is None:
        kind = type(live) if name_of(type(live)) == node[2] else None
        if kind is None:
            return restore.refuse(live, unlike(name, node[2], live))
    have = _held(live, tuple)
    items = restore.items(have, node[1], name)
    if type(live) is kind and len(have) == len(items) and all(map(is_, have, items)):
        return live
    if len(items) != len(node[1]):
        return live
    if hasattr(kind, "n_sequence_fields"):  # e.g. results of torch.max and time.localtime
        return kind(items)
    made = tuple.__new__(kind, items) if kind is not tuple else tuple(items)
    if len(node) > 2 and node[3]:
        restore_attributes(restore, made, node[3], name)
    return made


def record_set(tag: Tag, exact: Any) -> Handler:
    """A handler for sets of plain values, or of objects that the replay reproduces."""

    def handle(snapshot: Snapshot, value: Any, depth: int) -> Any:
        number = [snapshot.number(value)] if tag is Tag.SET else []
        items = list(exact.__iter__(value))
        nodes = [snapshot.node(item, depth + 1) for item in items]
        if all(map(is_settled, nodes)) or all(map(_is_found_class, items, nodes)):
            own = _own(snapshot, value, exact, depth)
            if tag is Tag.FROZENSET:
                return [tag, nodes, *own]
            return [tag, *number, nodes, *(own or (None, {}))]
        if any(node.__class__ is list and node[0] not in (Tag.SAME, Tag.WEIGHT, Tag.REFERENCE) for node in nodes):
            return [Tag.REFUSED, "is a set of objects that can change"]
        kinds = sorted(name_of(type(item)) for item in items)
        return [Tag.SAME, name_of(type(value)), f"{len(kinds)} of {', '.join(kinds)}"]

    return handle


def _is_found_class(value: Any, node: Any) -> bool:
    """Whether it is a class that another process finds by its name."""
    return issubclass(type(value), type) and node[0] is not Tag.SAME


def _has_lasting_hash(item: Any) -> bool:
    """Whether it has the same hash in each run, even without ttprun."""
    if type(item) is tuple:
        return all(map(_has_lasting_hash, item))
    if type(item) in (str, bytes):
        return text_hashes.have_seed_of_user()
    return type(item) in (int, bool, float) and item == item


def restore_set(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """In place, or a new one. Refuses if the iteration order differs then, which depends on the set's history."""
    _, number, nodes, kind, attributes = node
    target = _made(restore, live, number, kind, set, name)
    if target is MISSING:
        return live
    items = restore.items([], nodes, name)
    if not _is_as_recorded(_held(target, set), items):
        set.clear(target)
        set.update(target, items)
        if not _is_as_recorded(_held(target, set), items):
            return restore.refuse(live, f"{name} is a set with {_OTHER_ORDER}")
    restore_attributes(restore, target, attributes, name)
    return target


def _is_as_recorded(have: list[Any], items: list[Any]) -> bool:
    return have == items if all(map(_has_lasting_hash, items)) else set(have) == set(items)


def restore_frozenset(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """The same one if nothing has changed, else a new one; as `restore_set`."""
    kind: Any = frozenset if len(node) == 2 else look_up_type(node[2], frozenset)
    items = restore.items([], node[1], name)
    if kind is None:
        return restore.refuse(live, unlike(name, node[2], live))
    if type(live) is kind and _is_as_recorded(_held(live, frozenset), items):
        return live
    made = frozenset.__new__(kind, items)
    if not _is_as_recorded(_held(made, frozenset), items):
        return restore.refuse(live, f"{name} is a frozenset with {_OTHER_ORDER}")
    return made


def record_dict(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """A dictionary: keys and values, in order."""
    number = snapshot.number(value)
    all_keys: Any
    all_values: Any
    if type(value) is dict and len(value) >= MIN_ITEMS:
        all_keys, all_values = value.keys(), value.values()  # mostly not iterated over
    elif type(value) is dict:
        all_keys, all_values = list(value), list(value.values())
    else:
        base = base_of(value)
        all_keys, all_values = list(base.__iter__(value)), list(base.values(value))
    if len(all_keys) < MIN_ITEMS:
        keys, values = snapshot.items(all_keys, depth), snapshot.items(all_values, depth)
    else:
        of_keys = _items(snapshot, value, all_keys, depth)
        of_values = _items(snapshot, value, all_values, depth, 1)
        if len(all_keys) > MAX_ITEMS:
            return _long(value, len(all_keys), of_keys, of_values)
        keys, values = _packed(of_keys), _packed(of_values)
    return [Tag.DICT, number, keys, values, *_own(snapshot, value, dict, depth)]


def restore_dict(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """In place, in the order of the lost rank, without further keys; or a new one."""
    target = _made(restore, live, node[1], node[4] if len(node) > 4 else None, dict, name)
    if target is MISSING:
        return live
    base: Any = base_of(target)
    have = _held(live, dict)
    key_nodes, value_nodes = (n if isinstance(n, list) else list(unpack_items(n)) for n in node[2:4])
    old = dict(zip(have, base_of(live).values(live), strict=True)) if issubclass(type(live), dict) else {}
    new = {}
    for index, (key_node, value_node) in enumerate(zip(key_nodes, value_nodes, strict=True)):
        key = restore.value(have[index] if index < len(have) else MISSING, key_node, f"a key of {name}")
        value = restore.value(old.get(key, MISSING), value_node, f"{name}[{key!r}]")
        if value is MISSING or key is MISSING:
            if restore.is_comparing:
                restore.refuse(live, f"{name} holds objects that are not in the replacement and cannot be recorded")
            continue
        new[key] = value
    if list(new) != list(base.__iter__(target)) or any(
        base.__getitem__(target, key) is not value for key, value in new.items()
    ):
        base.clear(target)
        for key, value in new.items():
            base.__setitem__(target, key, value)
    if len(node) > 4:
        attributes = dict(node[5])
        if issubclass(type(target), collections.defaultdict):
            factory = restore.value(_factory_of(target) or MISSING, attributes.pop("default_factory"), name)
            _FACTORY.__set__(target, None if factory is MISSING else factory)
        restore_attributes(restore, target, attributes, name)
    return target


def record_bytes(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """bytearray and array.array."""
    code = _code_of(value) if is_a(value, array.array) else ""
    return [Tag.BYTES, snapshot.number(value), code, array.array.tobytes(value) if code else bytes(value)]


def restore_bytes(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """In place, or a new one."""
    _, number, code, raw = node
    made: Any = array.array(code, raw) if code else bytearray(raw)
    if type(live) is not type(made) or getattr(live, "typecode", "") != code or not restore.claim(number, live):
        restore.claim(number, made)
        return made
    if live != made:
        live[:] = made
    return live


def record_buffer(snapshot: Snapshot, value: io.StringIO | io.BytesIO, depth: int) -> Any:
    """A file in memory."""
    if value.closed:
        return [Tag.CLOSED, name_of(type(value))]
    return [Tag.BUFFER, snapshot.number(value), value.getvalue(), value.tell()]


def restore_buffer(restore: Restore, live: Any, node: list[Any], name: str) -> Any:
    """In place, or a new one."""
    _, number, content, position = node
    kind = io.StringIO if isinstance(content, str) else io.BytesIO
    target: Any = live
    if type(live) is not kind or live.closed or not restore.claim(number, live):
        target = kind()
        restore.claim(number, target)
    if target.getvalue() != content:
        target.seek(0)
        target.truncate()
        target.write(content)
    target.seek(position)
    return target
