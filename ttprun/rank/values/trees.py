"""A record as a tree: the parts of each kind of node, its objects by number, and the comparison of two records.

SHAPES is the table; places of a node that it does not name are plain. Begin with `Tree`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Any

import xxhash

from ttprun.rank.values.large_data import tensor_of
from ttprun.rank.values.nodes import MISSING, Tag, unpack, unpack_items
from ttprun.rank.values.snapshot import FIXED

Node = Any


class Part(enum.Enum):
    """The kind of content at a place of a node."""

    NUMBER = "number"
    NODE = "node"
    NODES = "nodes"
    UNORDERED = "nodes in any order"
    NAMED = "nodes by name"
    GROUPS = "list of nodes by name"


_N = Part.NUMBER
SHAPES: dict[str, dict[int, Part]] = {
    Tag.LIST: {1: _N, 2: Part.NODES, 4: Part.NAMED},
    Tag.TUPLE: {1: Part.NODES, 3: Part.NAMED},
    Tag.SET: {1: _N, 2: Part.UNORDERED, 4: Part.NAMED},
    Tag.FROZENSET: {1: Part.UNORDERED, 3: Part.NAMED},
    Tag.DEQUE: {1: _N, 2: Part.NODES, 4: Part.NAMED},
    Tag.DICT: {1: _N, 2: Part.NODES, 3: Part.NODES, 5: Part.NAMED},
    Tag.STATE: {1: _N, 4: Part.NAMED},
    Tag.BYTES: {1: _N},
    Tag.LONG: {4: _N},
    Tag.BUFFER: {1: _N},
    Tag.FILE: {1: _N},
    Tag.OBJECT: {1: _N, 3: Part.NAMED},
    Tag.VALUE_OBJECT: {2: Part.NAMED},
    Tag.CLASS: {1: _N, 3: Part.NAMED},
    Tag.FUNCTION: {1: _N, 3: Part.NAMED, 4: Part.NAMED, 5: Part.NODES},
    Tag.METHOD: {1: Part.NODE},
    Tag.WEAK: {1: Part.NODE},
    Tag.PARTIAL: {1: _N, 2: Part.NODE, 3: Part.NODE, 4: Part.NODE},
    Tag.TENSOR: {1: _N},
    Tag.CHANGED_DATA: {1: _N, 5: _N},
    Tag.ARRAY: {1: _N, 6: Part.NODE},
    Tag.OBJECT_ARRAY: {1: _N, 3: Part.NODES},
    Tag.RANDOM: {1: _N},
    Tag.OPTIMIZER: {1: _N, 3: Part.GROUPS, 4: Part.NAMED},
    Tag.ITERATOR: {1: _N, 3: Part.NODES, 4: Part.NODE},
    Tag.SUSPENDED: {1: _N, 4: Part.NAMED, 5: Part.NODE},
    Tag.SHARDED: {1: _N, 2: Part.NODE},
    Tag.MODULE: {1: _N},
}
_RAW_STATES = ("torch", "python")  # random generators whose state is not a node
BLOB_AT = {Tag.CHANGED_DATA: 4}
_KEYS = 2  # of a dictionary's node
LAYOUT = 4  # of a tensor's node: see tensors.py
CONTENTS = 5  # of a tensor's node: bytes, [blob], or the number of the tensor whose memory it shares


def shape_of(node: list[Any]) -> dict[int, Part]:
    """The content of a node's places."""
    if node[0] == Tag.RANDOM and node[2] not in _RAW_STATES:
        return {1: Part.NUMBER, 3: Part.NODE}
    if node[0] == Tag.MODULE and node[6] is not None:
        return {1: Part.NUMBER, 6: Part.NODE}
    return SHAPES.get(node[0], {})


def listed(nodes: Any) -> list[Node]:
    """A container's nodes, which may be packed."""
    return nodes if isinstance(nodes, list) else list(unpack_items(nodes))


def is_node(value: Any) -> bool:
    """Whether it is more than a scalar."""
    return value.__class__ is list


def number_of(node: Node) -> int | None:
    """The number of the object that a node defines; None if it defines none."""
    if not is_node(node) or shape_of(node).get(1) is not Part.NUMBER:
        return None
    number: int = node[1]
    return number


def parts(node: list[Any]) -> Iterator[Node]:
    """The nodes right below a node."""
    for at, part in shape_of(node).items():
        if at >= len(node) or part is Part.NUMBER:
            continue
        if part is Part.NODE:
            yield node[at]
        elif part in (Part.NODES, Part.UNORDERED):
            yield from listed(node[at])
        elif part is Part.NAMED:
            yield from node[at].values()
        else:
            yield from (item for group in node[at] for item in group.values())


def walk(node: Node, name: str) -> Iterator[tuple[list[Any], str]]:
    """A node and all nodes below it, each with its name for the user; packed items are plain and left out.

    Not recursive: the script's objects may be nested deeply.
    """
    waiting = [(node, name)]
    while waiting:
        node, name = waiting.pop()
        if is_node(node) and node:
            yield node, name
            waiting += reversed(list(_named_parts(node, name)))


def _named_parts(node: list[Any], name: str) -> Iterator[tuple[Node, str]]:
    if node[0] == Tag.MODULE and node[6] is None:
        for path, nodes in node[4].items():
            yield from ((one, f"{name}.{path}.{key}" if path else f"{name}.{key}") for key, one in nodes.items())
    for at, part in shape_of(node).items():
        held = node[at] if at < len(node) else []
        if part is Part.NODE and at < len(node):
            yield held, name
        elif part is Part.NAMED:
            yield from ((one, f"{name}.{key}") for key, one in dict(held).items())
        elif part is Part.GROUPS:
            yield from ((one, f"{name}.{key}") for group in held for key, one in group.items())
        elif node[0] == Tag.DICT and at == _KEYS and isinstance(held, list):
            yield from ((key, f"a key of {name}") for key in held)
        elif node[0] == Tag.DICT and part is Part.NODES and isinstance(held, list):
            keys = ("..." if is_node(key) else repr(key) for key in listed(node[_KEYS]))
            yield from ((value, f"{name}[{key}]") for key, value in zip(keys, held, strict=True))
        elif part is not Part.NUMBER and isinstance(held, list):
            yield from ((one, f"{name}[{index}]") for index, one in enumerate(held))


class Tree:
    """One record.

    fields       as it was unpacked
    blobs        bytes of each
    definitions  by number, the node of the object; of a module's parts, that of the module
    """

    def __init__(self, fields: dict[str, Any], blobs: list[memoryview]) -> None:
        self.fields = fields
        self.blobs = blobs
        self.variables = [with_fixed(scope) for scope in fields["variables"]]
        self.modules = {name: with_fixed(scope) for name, scope in fields["modules"].items()}
        self.definitions: dict[int, list[Any]] = {}
        overs = [loop["over"] for of_frame in fields["loops"] for loop in of_frame]
        scopes = [*self.variables, *self.modules.values()]
        returned = fields.get("returned")
        for node in (*(node for scope in scopes for node in scope.values()), *overs, *fields["optimizers"], returned):
            self._index(node)

    def _index(self, node: Node) -> None:
        if not is_node(node):
            return
        number = number_of(node)
        if number is not None:
            for one in range(number, number + 1 + count_of_parts(node)):
                self.definitions.setdefault(one, node)
        for part in parts(node):
            self._index(part)

    def resolve(self, node: Node) -> Node:
        """The node that a reference refers to; the node itself if it is not a reference to a whole object."""
        if is_node(node) and node[0] == Tag.REFERENCE:
            found = self.definitions.get(node[1])
            if found is not None and found[1] == node[1]:
                return found
        return node

    def contents(self, node: list[Any]) -> Any:
        """The bytes of a tensor or changed array; the number of the tensor whose memory it shares."""
        if node[0] in BLOB_AT:
            return bytes(self.blobs[node[BLOB_AT[node[0]]]])
        found = node[CONTENTS]
        return bytes(self.blobs[found[0]]) if isinstance(found, list) else found

    def digest(self, node: Node) -> bytes | None:
        """The fingerprint of a tensor's elements, as the loaders note it; None if the node is not a tensor's."""
        if not is_node(node):
            return None
        if node[0] == Tag.DATA:
            found: bytes = node[3]
            return found
        if node[0] == Tag.CHANGED_DATA:
            return xxhash.xxh3_64_digest(self.contents(node))
        if node[0] != Tag.TENSOR:
            return None
        _, _, dtype, shape, layout, *_ = node
        raw = self.contents(node)
        while isinstance(raw, int):
            raw = self.contents(self.definitions[raw])
        if not layout:
            return xxhash.xxh3_64_digest(raw) if raw else b""
        stride, offset, _ = layout
        tensor = tensor_of(dtype, [len(raw) // (tensor_of(dtype, [0], b"").element_size())], raw)
        return xxhash.xxh3_64_digest(tensor.as_strided(shape, stride, offset).contiguous().numpy().tobytes())

    def weight(self, index: int) -> tuple[int, bool, int] | None:
        """(optimizer, whether it is a parameter, which one) of a tensor that optimizers update; None if unknown."""
        for is_state in (0, 1):
            for optimizer, counts in enumerate(self.fields["stepped"]):
                if index < counts[is_state]:
                    return optimizer, not is_state, index
                index -= counts[is_state]
        return None

    def index_of(self, weight: tuple[int, bool, int]) -> int | None:
        """The inverse of `weight`; None if there is no such parameter here."""
        optimizer, is_parameter, index = weight
        counts = self.fields["stepped"]
        if not is_parameter or optimizer >= len(counts) or index >= counts[optimizer][0]:
            return None
        return int(sum(parameters for parameters, _ in counts[:optimizer])) + index


def with_fixed(scope: dict[str, Any]) -> dict[str, Any]:
    """A scope's nodes, including the packed ones that are the same at each boundary."""
    found = {name: node for name, node in scope.items() if name != FIXED}
    return (unpack(scope[FIXED]) if FIXED in scope else {}) | found


def count_of_parts(node: list[Any]) -> int:
    """How many further numbers a node takes: those of a module's parts and tensors."""
    if node[0] != Tag.MODULE or node[6] is not None:
        return 0
    described = unpack(node[3])
    return len(described["modules"]) + len(described["tensors"]) - 1


def is_same_scalar(one: Any, other: Any) -> bool:
    """Whether two scalars are equal, in type too."""
    if one.__class__ is not other.__class__:
        return False
    return bool(one == other) or (one.__class__ is float and math.isnan(one) and math.isnan(other))


class Comparison:
    """Whether nodes of an earlier record and of a later one are equal; numbers may differ.

    same   number in the earlier record -> number in the later one, of objects at the same place
    """

    def __init__(self, first: Tree, last: Tree) -> None:
        self.first, self.last = first, last
        self.same: dict[int, int] = {}
        self._open: set[int] = set()  # numbers of what is being compared further up
        self._known: dict[tuple[int, int], bool] = {}

    def bind(self, first: Node, last: Node) -> None:
        """Two nodes are at the same place."""
        one, other = number_of(first), number_of(last)
        if one is not None and other is not None:
            for offset in range(1 + min(count_of_parts(first), count_of_parts(last))):
                self.same.setdefault(one + offset, other + offset)

    def is_same(self, first: Node, last: Node) -> bool:
        """Whether nothing has changed."""
        if first is MISSING or last is MISSING:
            return first is last
        if not is_node(first) or not is_node(last):
            return is_same_scalar(first, last)
        first, last = self.first.resolve(first), self.last.resolve(last)
        if Tag.REFERENCE in (first[0], last[0]):  # to a part of a module
            return bool(first[0] == last[0] and self.same.get(first[1]) == last[1])
        if first[0] != last[0] or len(first) != len(last):
            return False
        one, other = number_of(first), number_of(last)
        if one is None or other is None:
            return one is other and self._are_same_parts(first, last)
        if self.same.get(one, other) != other:
            return False
        self.bind(first, last)
        if one in self._open:
            return True
        if (one, other) not in self._known:
            self._open.add(one)
            self._known[one, other] = self._are_same_parts(first, last)
            self._open.discard(one)
        return self._known[one, other]

    def _are_same_parts(self, first: list[Any], last: list[Any]) -> bool:
        if first[0] == Tag.WEIGHT:
            return bool(self.first.weight(first[1]) == self.last.weight(last[1]) and first[2:] == last[2:])
        if first[0] in (Tag.TENSOR, *BLOB_AT):
            return self.is_same_tensor(first, last)
        if first[0] == Tag.MODULE and first[6] is None:
            return self._is_same_module(first, last)
        shape = shape_of(first)
        return all(self._is_same_part(shape.get(at), first[at], last[at]) for at in range(len(first)))

    def _is_same_part(self, part: Part | None, first: Any, last: Any) -> bool:
        if part is Part.NUMBER:
            return True
        if part is Part.NODE:
            return self.is_same(first, last)
        if part is Part.NODES:
            return self.are_same(listed(first), listed(last))
        if part is Part.UNORDERED:
            return self.are_same(sorted(listed(first), key=repr), sorted(listed(last), key=repr))
        if part is Part.NAMED:
            return self.are_same_named(first, last)
        if part is Part.GROUPS:
            return len(first) == len(last) and all(map(self.are_same_named, first, last))
        return bool(first == last)

    def are_same(self, first: list[Node], last: list[Node]) -> bool:
        """The same for lists."""
        return len(first) == len(last) and all(map(self.is_same, first, last))

    def are_same_named(self, first: dict[str, Node], last: dict[str, Node]) -> bool:
        """The same for nodes by name."""
        return first.keys() == last.keys() and all(self.is_same(first[name], last[name]) for name in first)

    def is_same_tensor(self, first: list[Any], last: list[Any]) -> bool:
        """The same for tensors whose elements were recorded, and for large arrays that change."""
        skip = {1, BLOB_AT.get(first[0], CONTENTS)}
        if any(first[at] != last[at] for at in range(len(first)) if at not in skip):
            return False
        one, other = self.first.contents(first), self.last.contents(last)
        if isinstance(one, int) and isinstance(other, int):
            return self.same.get(one) == other
        return bool(one == other)

    def _is_same_module(self, first: list[Any], last: list[Any]) -> bool:
        one, other = unpack(first[3]), unpack(last[3])
        here, there = one.pop("attributes"), other.pop("attributes")
        if first[2] != last[2] or one != other:
            return False
        count = len(one["tensors"])
        blobs = zip(self.first.blobs[first[5] :][:count], self.last.blobs[last[5] :][:count], strict=True)
        if any(mine != theirs for mine, theirs in blobs):
            return False
        # Whether an attribute was seen to change, and so is recorded apart, differs between processes.
        return here.keys() == there.keys() and all(
            self.are_same_named(here[path] | first[4].get(path, {}), there[path] | last[4].get(path, {}))
            for path in here
        )
