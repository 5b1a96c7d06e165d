"""Nodes of two runs' records in one record: they get its numbers, and each object is defined once.

In the outcome the objects of the new run have higher numbers than those of the old one. Objects at the same place in
both runs become one object, with the new run's number.

Variables that the new run's first step has changed, such as the first loss, are not the setup's. That step is trained
on any data, and undone. Where it has changed a variable, the old run's value is used, even if the old run has not
changed it since its own first step (`spoil`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ttprun.capture.records.nodes import (
    PARTS,
    ActivationNode,
    AnyNode,
    ChangedDataNode,
    DataNode,
    DataTreeNode,
    DictNode,
    FileNode,
    LongNode,
    ModuleNode,
    Named,
    Node,
    Number,
    NumberedNode,
    NumpyRandomNode,
    Part,
    RandomNode,
    ReferenceNode,
    RefusedNode,
    ShardedNode,
    TensorNode,
    WeightNode,
    WrapperNode,
)
from ttprun.capture.records.packing import MISSING, CannotRestoreError, listed, unpack_description
from ttprun.capture.values.trees import Comparison, Tree, is_same_scalar, number_of, numbers_inside, parts_anew

MODULES = (ModuleNode, WrapperNode)


def are_of_a_kind(node: Node, other: Node) -> bool:
    """Whether two nodes are of one type, or both of modules, wrapped or not."""
    if not isinstance(node, AnyNode) or not isinstance(other, AnyNode):
        return False
    return type(node) is type(other) or (isinstance(node, MODULES) and isinstance(other, MODULES))


def state_of(node: RandomNode | NumpyRandomNode) -> list[Any]:
    """Kind and state of a random generator."""
    return [node.kind, node.state] if isinstance(node, RandomNode) else ["numpy", node.state]


class Outcome:
    """The outcome while it is made, part by part.

    last, mine    records of the old run and of the new one
    is_resized    the new run has another number of ranks

    defined       numbers of the outcome whose object has been defined
    generators    random generators whose state comes from the old run: number in the outcome -> kind and state
    """

    def __init__(self, last: Tree, mine: Tree, is_resized: bool) -> None:
        self._last, self._mine = last, mine
        self._is_resized = is_resized
        self._shift = 1 + max(last.definitions, default=0)  # from a number in mine to that of the outcome
        self._mine_of: dict[int, int] = {}  # number in the last record -> number in mine
        self._last_of: dict[int, int] = {}
        self.defined: set[int] = set()
        self.generators: dict[int, list[Any]] = {}

    def of_last(self, node: Node, mine: Node = MISSING) -> Node:
        """A node of the old run's last record, to replace `mine`. Raises CannotRestoreError."""
        if not isinstance(node, AnyNode):
            return node
        if isinstance(node, ReferenceNode):
            outcome = self.outcome_of_last(node.number)
            referent = self._last.resolve(node)
            if outcome in self.defined or referent is node:
                return ReferenceNode(outcome)
            node = referent
        mine = self._mine.resolve(mine)
        number = number_of(node)
        if number is not None:
            if self.outcome_of_last(number) in self.defined:
                return ReferenceNode(self.outcome_of_last(number))
            self.pair(node, mine)
            self.define(self.outcome_of_last(number), node)
        if isinstance(node, DataNode):
            return ActivationNode(node.shape)
        if isinstance(node, ShardedNode) and self._is_resized:
            return ActivationNode(node.layout[0])
        if isinstance(node, FileNode) and self._is_resized:
            raise CannotRestoreError(
                "the script reads a file by itself in its steps, and it is unknown how the ranks divide the rest of it"
            )
        if isinstance(node, WeightNode):
            weight = self._last.weight(node.index)
            index = None if weight is None else self._mine.index_of(weight)
            if index is None:
                raise CannotRestoreError("a variable holds an optimizer's state of a weight")
            return replace(node, index=index)
        if isinstance(node, RandomNode | NumpyRandomNode):
            self.generators[self.outcome_of_last(node.number)] = state_of(node)
        return self.copied(node, is_mine=False, beside=mine)

    def of_mine(self, node: Node) -> Node:
        """A node of the new run's record, left as it is."""
        if not isinstance(node, AnyNode):
            return node
        if isinstance(node, ReferenceNode):
            referent = self._mine.resolve(node)
            if self.outcome_of_mine(node.number) in self.defined or referent is node:
                return ReferenceNode(self.outcome_of_mine(node.number))
            node = referent
        number = number_of(node)
        if number is not None:
            outcome = self.outcome_of_mine(number)
            if outcome in self.defined:
                return ReferenceNode(outcome)
            self.define(outcome, node)
        return self.copied(node, is_mine=True)

    def copied(self, node: Any, is_mine: bool, beside: Node = MISSING) -> Any:
        """A node with the outcome's numbers; its parts are of the same record.

        beside   the new run's node at the place of a node of the old one
        """
        outcome = self.outcome_of_mine if is_mine else self.outcome_of_last
        has_counterparts = type(beside) is type(node)
        if has_counterparts and isinstance(node, DictNode):
            has_counterparts = listed(beside.keys) == listed(node.keys)

        def inner(part: Node, counterpart: Node = MISSING) -> Node:
            return self.of_mine(part) if is_mine else self.of_last(part, counterpart)

        made = parts_anew(node, outcome, inner, beside if has_counterparts else None)
        shift = len(self._last.blobs) if is_mine else 0
        if isinstance(node, ChangedDataNode):
            made["blob"] = node.blob + shift
        elif isinstance(node, TensorNode) and isinstance(node.contents, list):
            made["contents"] = [node.contents[0] + shift]
        elif isinstance(node, TensorNode) and isinstance(node.contents, int):
            made["contents"] = outcome(node.contents)
        elif isinstance(node, ModuleNode):
            made["first_blob"] = node.first_blob + shift
            made["attributes"] = {
                path: {name: inner(part) for name, part in nodes.items()} for path, nodes in node.attributes.items()
            }
        return replace(node, **made)

    # Numbers.

    def outcome_of_mine(self, number: int) -> Number:
        """The number in the outcome of an object of the new run."""
        return Number(number + self._shift)

    def outcome_of_last(self, number: int) -> Number:
        """The number in the outcome of an object of the old run."""
        mine = self._mine_of.get(number)
        return Number(number) if mine is None else self.outcome_of_mine(mine)

    def pair(self, last: Node, mine: Node) -> None:
        """Combine an object of the old run and one of the new run that are at the same place."""
        if not are_of_a_kind(last, mine):
            return
        number, own = number_of(last), number_of(mine)
        if number is None or own is None or number in self.defined:
            return
        if number not in self._mine_of and own not in self._last_of:
            self._mine_of[number], self._last_of[own] = own, number
            if isinstance(last, DataTreeNode | LongNode) and type(mine) is type(last):
                self.pair_parts(last, mine)

    def pair_parts(self, last: NumberedNode, mine: NumberedNode) -> None:
        """Combine all parts and tensors of modules that have the same ones, or the rows of data."""
        inside = zip(numbers_inside(last), numbers_inside(mine), strict=False)
        for number, own in ((last.number, mine.number), *inside):
            self._mine_of.setdefault(number, own)
            self._last_of.setdefault(own, number)

    def define(self, outcome: int, node: NumberedNode) -> None:
        """An object, with all parts of a module, is defined in the outcome from now on."""
        self.defined.add(outcome)
        self.defined.update(number + outcome - node.number for number in numbers_inside(node))


_IN_ORDER = (Part.NODES, Part.ITEMS)
# Replaces a node of the first record, so that it counts as changed.
SPOILED = RefusedNode("was changed by the first step")


def spoil(first: Tree, before: Tree, mine: Tree) -> None:
    """Make everything that differs between two records of the new run count as changed by the old run, too.

    first    of the old run; changed in place
    before   of the new run, before its first step
    mine     of the new run, after it; may have more frames
    """
    walk = _Walk(first, before, mine)
    functions = [[frame[:2] for frame in tree.fields.place] for tree in (first, before, mine)]
    for depth, scope in enumerate(first.variables):
        if depth < len(before.variables) and functions[0][depth] == functions[1][depth] == functions[2][depth]:
            walk.named(scope, before.variables[depth], mine.variables[depth])
    for name in first.modules.keys() & before.modules.keys() & mine.modules.keys():
        walk.named(first.modules[name], before.modules[name], mine.modules[name])


class _Walk:
    def __init__(self, first: Tree, before: Tree, mine: Tree) -> None:
        self._trees = (first, before, mine)
        self._compared = Comparison(before, mine)
        self._seen: set[int] = set()

    def named(self, first: Named, before: Named, mine: Named) -> None:
        for name in first.keys() & before.keys() & mine.keys():
            first[name] = self._spoiled(first[name], before[name], mine[name])

    def _spoiled(self, first: Node, before: Node, mine: Node) -> Node:
        if not isinstance(before, AnyNode) or not isinstance(mine, AnyNode):
            are_scalars = not isinstance(before, AnyNode) and not isinstance(mine, AnyNode)
            return first if are_scalars and is_same_scalar(before, mine) else SPOILED
        resolved = [tree.resolve(node) for tree, node in zip(self._trees, (first, before, mine), strict=True)]
        number = number_of(resolved[2])
        if number in self._seen or self._compared.is_same(before, mine):
            return first
        if number is not None:
            self._seen.add(number)
        if not all(are_of_a_kind(node, resolved[2]) for node in resolved):
            return SPOILED
        if isinstance(resolved[2], MODULES):
            self._module(*resolved)
            return first
        shape = PARTS[type(resolved[2])]
        parts = [(name, part) for name, part in shape.items() if part in (Part.NAMED, *_IN_ORDER)]
        is_sequence = any(part in _IN_ORDER for _, part in parts)
        if not parts or (is_sequence and not self._are_of_one_length(parts, resolved)):
            return SPOILED
        for field, part in parts:
            own, *others = (getattr(node, field) for node in resolved)
            if part is Part.NAMED:
                self.named(own, *others)
            else:
                own[:] = [self._spoiled(*nodes) for nodes in zip(own, *others, strict=True)]
        return first

    def _are_of_one_length(self, parts: Sequence[tuple[str, Part]], nodes: list[Any]) -> bool:
        lists = [[getattr(node, name) for node in nodes] for name, part in parts if part in _IN_ORDER]
        if not all(isinstance(items, list) for row in lists for items in row):
            return False  # packed: compared as a whole
        if isinstance(nodes[0], DictNode) and not all(row == lists[0][0] for row in lists[0]):
            return False
        return all(len(set(map(len, row))) == 1 for row in lists)

    def _module(self, first: Any, before: Any, mine: Any) -> None:
        """Attributes only, as the tensors come from the old run anyhow."""
        if all(isinstance(node, WrapperNode) for node in (first, before, mine)):
            self._spoiled(first.wrapped, before.wrapped, mine.wrapped)
        if not all(isinstance(node, ModuleNode) for node in (first, before, mine)):
            return
        settled = [unpack_description(node.description).attributes for node in (first, before, mine)]
        for path in settled[0].keys() & settled[1].keys() & settled[2].keys():
            scopes = [
                attributes[path] | node.attributes.get(path, {})
                for attributes, node in zip(settled, (first, before, mine), strict=True)
            ]
            self.named(*scopes)
            first.attributes[path] = scopes[0]
