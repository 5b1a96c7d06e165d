"""Long containers of values that never change: packed once, and again only what was added.

A vocabulary, a list of file names, the losses so far: walking them at each boundary would cost more than all the rest.
A container is known to be as it was if it holds the very same objects, which is seen at once from their addresses. Only
containers of settled nodes (see nodes.py), or of tensors that optimizers update, are kept: nothing large is held here.

The attributes of objects are kept in the same way, however few: whether they are as they were is seen from a version.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from operator import is_
from typing import Any

import xxhash
from torch import Tensor

from ttprun.rank.values.nodes import SETTLED, Tag, is_settled, pack
from ttprun.rank.values.versions import ARE_KEPT, Versions
from ttprun.rank.weights.sharded import is_distributed, local_of

MIN_ITEMS = 12  # below, packing anew is as fast
MAX_ITEMS = 100_000  # of more items only a digest is recorded, and compared
_OB_ITEM = 3 * ctypes.sizeof(ctypes.c_void_p)  # offset of the items' address in CPython's list object
_WORD = ctypes.sizeof(ctypes.c_void_p)


class Kept:
    """What is known of one container.

    items     what it has held
    packed    their nodes, one behind the other
    memory    of tensors that optimizers update: where each lies; else empty
    stepped   the optimizers' storages by which those were told
    """

    __slots__ = ("_digest", "_digest_of", "items", "memory", "packed", "stepped")

    def __init__(self, stepped: Any) -> None:
        self.stepped = stepped
        self.memory: list[int] = []
        self.items: list[Any] = []
        self.packed = bytearray()
        self._digest, self._digest_of = "", -1

    @property
    def digest(self) -> str:
        """Of `packed`, to which things are only ever added."""
        if self._digest_of != len(self.packed):
            self._digest, self._digest_of = xxhash.xxh3_64_hexdigest(self.packed), len(self.packed)
        return self._digest


_kept: dict[tuple[int, int], Kept] = {}
_before: dict[tuple[int, int], Kept] = {}


class _Attributes:
    """What is known of the dictionary of an object's attributes.

    versions  of that dictionary, which keeps its address its own
    without   names that have no node
    nodes     of the others, all of them settled
    """

    __slots__ = ("nodes", "versions", "without")

    def __init__(self, scope: dict[str, Any], without: frozenset[str], nodes: dict[str, Any]) -> None:
        self.versions = Versions((scope,))
        self.without = without
        self.nodes = nodes


_attributes: dict[int, _Attributes] = {}
_attributes_before: dict[int, _Attributes] = {}


def forget_unused() -> None:
    """A boundary begins: what was not asked for at the one before is forgotten."""
    global _kept, _before, _attributes, _attributes_before
    _before, _kept = _kept, {}
    _attributes_before, _attributes = _attributes, {}


def known_attributes(scope: dict[str, Any], without: frozenset[str]) -> dict[str, Any] | None:
    """The nodes of an object's attributes, if these are as they were; None if they must be asked for."""
    key = id(scope)
    known = _attributes.get(key) or _attributes_before.get(key)
    if known is None or known.without is not without or not known.versions.are_as_they_were():
        return None
    _attributes[key] = known
    return known.nodes


def keep_attributes(scope: dict[str, Any], without: frozenset[str], nodes: dict[str, Any]) -> None:
    """Know the nodes of an object's attributes from now on, if all are settled."""
    if ARE_KEPT and all(map(is_settled, nodes.values())):
        _attributes[id(scope)] = _Attributes(scope, without, nodes)


_memcmp = ctypes.PyDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def _compared_at_once(items: list[Any], first: list[Any]) -> bool:
    size = len(first)
    at, known_at = (ctypes.c_void_p.from_address(id(one) + _OB_ITEM).value for one in (items, first))
    return size <= len(items) and (not size or _memcmp(at, known_at, size * _WORD) == 0)


def _compared_one_by_one(items: list[Any], first: list[Any]) -> bool:
    return len(first) <= len(items) and all(map(is_, items, first))


def _choose() -> Callable[[list[Any], list[Any]], bool]:
    """The fast way, if this interpreter's lists are laid out as expected."""
    items = [object(), "x", 7.5]
    others = [items[:2], items[:], [], [items[0], object()], [*items, 1]]
    found, expected = ([way(items, other) for other in others] for way in (_compared_at_once, _compared_one_by_one))
    return _compared_at_once if found == expected else _compared_one_by_one


begins_with = _choose()  # whether a list begins with the very objects of another one


def packed_items(key: tuple[int, int], items: list[Any], node: Callable[[Any, int], Any], stepped: Any) -> Kept | None:
    """What is known of the items, with the nodes of all of them; None if some item can change.

    key      (address of the container, 0 for its keys, 1 for its values); another container there does no harm
    items    what it holds now, in order
    node     gives the node of one item
    stepped  the storages that optimizers update; tensors in them are told by their place there
    """
    first = items[0].__class__
    if first not in SETTLED and not issubclass(first, (tuple, Tensor)):
        return None
    kept = _before.get(key) or _kept.get(key)
    if kept is None or (kept.memory and not _is_where_it_was(kept, items, stepped)):
        kept = Kept(stepped)
    if not begins_with(items, kept.items) or (kept.memory and len(items) > len(kept.items)):
        kept = Kept(stepped)
    begin = len(kept.items)
    if begin < len(items):
        new = added = items[begin:]
        if not set(map(type, added)) <= SETTLED:
            added = [node(item, 1) for item in added]
            if issubclass(first, Tensor):
                if not all(item[0] is Tag.WEIGHT for item in added):
                    return None
                kept.memory = _pointers(items)
            elif not all(map(is_settled, added)):
                return None
        kept.packed += pack_all(added)
        kept.items += new
    _kept[key] = kept
    return kept


def _is_where_it_was(kept: Kept, items: list[Any], stepped: Any) -> bool:
    try:
        return kept.stepped is stepped and _pointers(items) == kept.memory
    except (TypeError, AttributeError):  # something else than a tensor among them
        return False


def _pointers(tensors: list[Any]) -> list[int]:
    """Where each lies. Raises TypeError or AttributeError if one is no tensor."""
    if is_distributed(tensors[0]):
        return [local_of(tensor).data_ptr() for tensor in tensors]
    return list(map(Tensor.data_ptr, tensors))


def pack_all(nodes: list[Any]) -> bytes:
    """Nodes one behind the other: a packed list without its head of 1, 3 or 5 bytes."""
    packed = pack(nodes)
    return packed[1 if len(nodes) < 16 else 3 if len(nodes) < 1 << 16 else 5 :]
