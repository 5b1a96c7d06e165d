"""A record as a tree: its objects by number, and the comparison of two records.

The types of nodes say which parts are nodes again (records/nodes.py). Begin with `Tree`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import xxhash
from msgspec.structs import replace

from ttprun.capture.records.nodes import (
    LISTS,
    PARTS,
    AnyNode,
    ChangedDataNode,
    DataNode,
    DataTreeNode,
    DictNode,
    LongNode,
    ModuleNode,
    Named,
    Node,
    NotProvedNode,
    NumberedNode,
    Part,
    ReferenceNode,
    TensorNode,
    WeightNode,
)
from ttprun.capture.records.packing import (
    MISSING,
    ModuleDescription,
    ScriptState,
    listed,
    unpack_description,
    unpack_node,
)
from ttprun.capture.values.large import tensor_of
from ttprun.capture.values.snapshot import with_fixed

PLACE = 1 << 32  # what a place outside of a tree of data counts in the number of a reference to it


def number_of(node: Node) -> int | None:
    """The number of the object that a node defines; None if it defines none."""
    return node.number if isinstance(node, NumberedNode) else None


def numbers_inside(node: Node) -> range:
    """The numbers of the objects in a node that have no nodes of their own: a module's parts, rows of data."""
    if isinstance(node, DataTreeNode):
        return range(node.number, node.number + node.objects)
    if isinstance(node, LongNode):
        return range(node.first, node.first + node.objects)
    if not isinstance(node, ModuleNode):
        return range(0)
    described = unpack_description(node.description)
    return range(node.number + 1, node.number + len(described.modules) + len(described.tensors))


def parts(node: AnyNode) -> Iterator[Node]:
    """The nodes right below a node."""
    for name, part in PARTS[type(node)].items():
        value = getattr(node, name)
        if part is Part.NODE:
            yield value
        elif part in LISTS:
            yield from listed(value)
        elif part is Part.NAMED:
            yield from value.values()
        elif part is Part.GROUPS:
            yield from (item for group in value for item in group.values())


def walk(node: Node, name: str) -> Iterator[tuple[AnyNode, str]]:
    """A node and all nodes below it, each with its name for the user; packed items are plain and left out.

    Not recursive: the script's objects may be nested deeply.
    """
    waiting = [(node, name)]
    while waiting:
        node, name = waiting.pop()
        if isinstance(node, AnyNode):
            yield node, name
            waiting += reversed(list(_named_parts(node, name)))


def _named_parts(node: AnyNode, name: str) -> Iterator[tuple[Node, str]]:
    if isinstance(node, ModuleNode):
        for path, nodes in node.attributes.items():
            yield from ((child, f"{name}.{path}.{key}" if path else f"{name}.{key}") for key, child in nodes.items())
    for field, part in PARTS[type(node)].items():
        content = getattr(node, field)
        if part is Part.NODE:
            yield content, name
        elif part is Part.NAMED:
            yield from ((child, f"{name}.{key}") for key, child in content.items())
        elif part is Part.GROUPS:
            yield from ((child, f"{name}.{key}") for group in content for key, child in group.items())
        elif part in (Part.NUMBER, Part.AGE) or isinstance(content, bytes | bytearray):
            continue
        elif isinstance(node, DictNode) and field == "keys":
            yield from ((key, f"a key of {name}") for key in content)
        elif isinstance(node, DictNode):
            keys = ("..." if isinstance(key, AnyNode) else repr(key) for key in listed(node.keys))
            yield from ((value, f"{name}[{key}]") for key, value in zip(keys, content, strict=True))
        else:
            yield from ((child, f"{name}[{index}]") for index, child in enumerate(content))


def is_by_history(node: Node) -> bool:
    """Whether a record holds of a value what it has become since an earlier record, or nothing, and not what it is."""
    return any(
        isinstance(part, LongNode | ChangedDataNode | DataNode | NotProvedNode)
        or (isinstance(part, DataTreeNode) and not part.packed)
        for part, _ in walk(node, "")
    )


def whole_of(tree: DataTreeNode) -> Node:
    """The node of data that was recorded whole, in the numbers of its record."""
    return _in_numbers_of(tree, unpack_node(tree.packed))


def _in_numbers_of(tree: DataTreeNode, node: Any) -> Any:
    """A node in a tree with the numbers that the tree's objects have in the record."""
    if not isinstance(node, AnyNode):
        return node
    if isinstance(node, ReferenceNode):
        if node.number >= 0:
            return ReferenceNode(tree.number + node.number)
        place, offset = divmod(~node.number, PLACE)
        reference = tree.outside[place]
        return ReferenceNode(reference.number + offset) if isinstance(reference, ReferenceNode) else reference
    return replace(node, **parts_anew(node, tree.number.__add__, lambda inner, _: _in_numbers_of(tree, inner)))


def parts_anew(
    node: AnyNode, number: Callable[[int], int], inner: Callable[[Node, Node], Node], beside: Any = None
) -> dict[str, Any]:
    """The parts of a node by name, with other numbers, and other nodes below it.

    number   gives the number that takes a number's place
    inner    gives the node that takes a node's place, also of what is at its place in `beside`, MISSING if nothing is
    beside   another node of this type; None if there is none
    """
    made: dict[str, Any] = {}
    for name, part in PARTS[type(node)].items():
        value, other = getattr(node, name), getattr(beside, name, None)
        if part is Part.NUMBER:
            made[name] = number(value)
        elif part is Part.NODE:
            made[name] = inner(value, MISSING if beside is None else other)
        elif part in LISTS:
            others = [] if other is None or part is Part.UNORDERED else listed(other)
            made[name] = [
                inner(each, others[at] if at < len(others) else MISSING) for at, each in enumerate(listed(value))
            ]
        elif part is Part.NAMED:
            made[name] = {key: inner(each, (other or {}).get(key, MISSING)) for key, each in value.items()}
        elif part is Part.GROUPS:
            made[name] = [{key: inner(each, MISSING) for key, each in group.items()} for group in value]
    return made


class Tree:
    """One record.

    fields       as it was unpacked
    blobs        bytes of each
    definitions  by number, the node of the object; of a module's parts, that of the module
    """

    def __init__(self, fields: ScriptState, blobs: list[memoryview]) -> None:
        self.fields = fields
        self.blobs = blobs
        self.variables = [with_fixed(scope) for scope in fields.variables]
        self.modules = {name: with_fixed(scope) for name, scope in fields.modules.items()}
        self.definitions: dict[int, Any] = {}
        overs = [loop.over for of_frame in fields.loops for loop in of_frame]
        scopes = [*self.variables, *self.modules.values()]
        nodes = [node for scope in scopes for node in scope.values()]
        for node in (*nodes, *overs, *fields.optimizers, fields.returned):
            self._index(node)

    def _index(self, node: Node) -> None:
        if not isinstance(node, AnyNode):
            return
        number = number_of(node)
        if number is not None:
            self.definitions.setdefault(number, node)
        inner = whole_of(node) if isinstance(node, DataTreeNode) and node.packed else node
        for part in parts(inner) if isinstance(inner, AnyNode) else ():
            self._index(part)
        for defined in numbers_inside(node):
            self.definitions.setdefault(defined, node)

    def resolve(self, node: Node) -> Node:
        """The node that a reference refers to; the node itself if it is not a reference to a whole object."""
        if isinstance(node, ReferenceNode):
            definition = self.definitions.get(node.number)
            if definition is not None and definition.number == node.number:
                return definition
        return node

    def contents(self, node: TensorNode | ChangedDataNode) -> bytes | int:
        """The bytes of a tensor or changed array; the number of the tensor whose memory it shares."""
        if isinstance(node, ChangedDataNode):
            return bytes(self.blobs[node.blob])
        return bytes(self.blobs[node.contents[0]]) if isinstance(node.contents, list) else node.contents

    def digest(self, node: Node) -> bytes | None:
        """The fingerprint of a tensor's elements, as the loaders note it; None if the node is not a tensor's."""
        if isinstance(node, DataNode):
            return node.digest
        if isinstance(node, ChangedDataNode):
            return xxhash.xxh3_64_digest(bytes(self.blobs[node.blob]))
        if not isinstance(node, TensorNode):
            return None
        layout = node.layout
        raw = self.contents(node)
        while isinstance(raw, int):
            raw = self.contents(self.definitions[raw])
        if not layout:
            return xxhash.xxh3_64_digest(raw) if raw else b""
        stride, offset, _ = layout
        tensor = tensor_of(node.dtype, [len(raw) // (tensor_of(node.dtype, [0], b"").element_size())], raw)
        return xxhash.xxh3_64_digest(tensor.as_strided(node.shape, stride, offset).contiguous().numpy().tobytes())

    def weight(self, index: int) -> tuple[int, bool, int] | None:
        """(optimizer, whether it is a parameter, which one) of a tensor that optimizers update; None if unknown."""
        for is_state in (0, 1):
            for optimizer, counts in enumerate(self.fields.stepped):
                if index < counts[is_state]:
                    return optimizer, not is_state, index
                index -= counts[is_state]
        return None

    def index_of(self, weight: tuple[int, bool, int]) -> int | None:
        """The inverse of `weight`; None if there is no such parameter here."""
        optimizer, is_parameter, index = weight
        counts = self.fields.stepped
        if not is_parameter or optimizer >= len(counts) or index >= counts[optimizer][0]:
            return None
        return int(sum(parameters for parameters, _ in counts[:optimizer])) + index


def name_of_blob(fields: ScriptState, index: int) -> str:
    """The user's name of the variable, or of its part, whose contents a blob of a record is; "" if there is none."""
    for scope in (*fields.variables, *fields.modules.values()):
        for variable, node in with_fixed(scope).items():
            for part, name in walk(node, variable):
                if _has_blob(part, index):
                    return name
    return ""


def _has_blob(node: AnyNode, index: int) -> bool:
    if isinstance(node, TensorNode):
        return node.contents == [index]
    if isinstance(node, ModuleNode):
        return node.first_blob <= index < node.first_blob + len(unpack_description(node.description).tensors)
    return isinstance(node, ChangedDataNode) and node.blob == index


def all_attributes(node: ModuleNode, described: ModuleDescription) -> dict[str, Named]:
    """Of each part of a module, those that are settled and those that are not."""
    return {path: settled | node.attributes.get(path, {}) for path, settled in described.attributes.items()}


def is_same_scalar(value: Any, other: Any) -> bool:
    """Whether two scalars are equal, in type too."""
    if value.__class__ is not other.__class__:
        return False
    return bool(value == other) or (value.__class__ is float and math.isnan(value) and math.isnan(other))


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
        number, other = number_of(first), number_of(last)
        if number is not None and other is not None:
            self.same.setdefault(number, other)
            for here, there in zip(numbers_inside(first), numbers_inside(last), strict=False):
                self.same.setdefault(here, there)

    def is_same(self, first: Node, last: Node) -> bool:
        """Whether nothing has changed."""
        if first is MISSING or last is MISSING:
            return first is last
        if not isinstance(first, AnyNode) or not isinstance(last, AnyNode):
            return is_same_scalar(first, last)
        first, last = self.first.resolve(first), self.last.resolve(last)
        if type(first) is not type(last):  # whether what never changed is data differs between processes
            first, last = (
                whole_of(node) if isinstance(node, DataTreeNode) and node.packed else node for node in (first, last)
            )
        if isinstance(first, ReferenceNode) and isinstance(last, ReferenceNode):  # to a part of a module, or a row
            if first.number not in self.same:
                self._look_around(first, last)
            return self.same.get(first.number) == last.number
        if type(first) is not type(last):
            return False
        number, other = number_of(first), number_of(last)
        if number is None or other is None:
            return number is other and self._are_same_parts(first, last)
        if self.same.get(number, other) != other:
            return False
        self.bind(first, last)
        if number in self._open:
            return True
        if (number, other) not in self._known:
            self._open.add(number)
            self._known[number, other] = self._are_same_parts(first, last)
            self._open.discard(number)
        return self._known[number, other]

    def _look_around(self, first: ReferenceNode, last: ReferenceNode) -> None:
        """A part was met before the whole: compare that, which binds its parts."""
        here, there = self.first.definitions.get(first.number), self.last.definitions.get(last.number)
        if here is not None and there is not None:
            self.is_same(here, there)

    def _are_same_parts(self, first: Any, last: Any) -> bool:
        if isinstance(first, WeightNode):
            weights = self.first.weight(first.index), self.last.weight(last.index)
            return weights[0] == weights[1] and replace(first, index=last.index) == last
        if isinstance(first, TensorNode | ChangedDataNode):
            return self.is_same_tensor(first, last)
        if isinstance(first, ModuleNode):
            return self._is_same_module(first, last)
        shape = PARTS[type(first)]
        fields = first.__struct_fields__
        return all(self._is_same_part(shape.get(name), getattr(first, name), getattr(last, name)) for name in fields)

    def _is_same_part(self, part: Part | None, first: Any, last: Any) -> bool:
        if part in (Part.NUMBER, Part.AGE):
            return True
        if part is Part.NODE:
            return self.is_same(first, last)
        if part in (Part.NODES, Part.ITEMS):
            return self.are_same(listed(first), listed(last))
        if part is Part.UNORDERED:
            return self.are_same(sorted(listed(first), key=repr), sorted(listed(last), key=repr))
        if part is Part.NAMED:
            return self.are_same_named(first, last)
        if part is Part.GROUPS:
            return len(first) == len(last) and all(map(self.are_same_named, first, last))
        return bool(first == last)

    def are_same(self, first: list[Node], last: list[Node]) -> bool:
        """Whether two lists of nodes stand for the same."""
        return len(first) == len(last) and all(map(self.is_same, first, last))

    def are_same_named(self, first: dict[str, Node], last: dict[str, Node]) -> bool:
        """Whether nodes by name stand for the same."""
        return first.keys() == last.keys() and all(self.is_same(first[name], last[name]) for name in first)

    def is_same_tensor(self, first: Any, last: Any) -> bool:
        """Whether two tensors whose elements were recorded are equal, or two large arrays that change."""
        skip = ("number", "contents", "blob")
        if any(getattr(first, name) != getattr(last, name) for name in first.__struct_fields__ if name not in skip):
            return False
        content, other = self.first.contents(first), self.last.contents(last)
        if isinstance(content, int) and isinstance(other, int):
            return self.same.get(content) == other
        return bool(content == other)

    def _is_same_module(self, first: ModuleNode, last: ModuleNode) -> bool:
        description, other = unpack_description(first.description), unpack_description(last.description)
        if first.kind != last.kind or replace(description, attributes={}) != replace(other, attributes={}):
            return False
        count = len(description.tensors)
        blobs = zip(
            self.first.blobs[first.first_blob :][:count], self.last.blobs[last.first_blob :][:count], strict=True
        )
        if any(mine != theirs for mine, theirs in blobs):
            return False
        # Whether an attribute was seen to change, and so is recorded apart, differs between processes.
        here, there = all_attributes(first, description), all_attributes(last, other)
        return here.keys() == there.keys() and all(self.are_same_named(here[path], there[path]) for path in here)
