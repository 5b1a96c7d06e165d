"""Variables that the new run's first step has changed, such as the first loss, so that they are not the setup's.

That step is trained on any data, and undone. Where it has changed a variable, the old run's value is used, even if the
old run has not changed it since its own first step. Begin with `spoil`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttprun.capture.merging.combined import MODULES, are_of_a_kind
from ttprun.capture.records.nodes import (
    PARTS,
    AnyNode,
    DictNode,
    ModuleNode,
    Named,
    Node,
    Part,
    RefusedNode,
    WrapperNode,
)
from ttprun.capture.records.packing import unpack_description
from ttprun.capture.values.trees import Comparison, Tree, is_same_scalar, number_of

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
            is_same = are_scalars and is_same_scalar(before, mine)
            return first if is_same else SPOILED
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
