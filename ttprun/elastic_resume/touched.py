"""Variables that the new run's first step has changed, such as the first loss, so that they are not the setup's.

That step is trained on any data, and undone. Where it has changed a variable, the old run's value is used, even if the
old run has not changed it since its own first step. Begin with `spoil`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttprun.rank.values.nodes import Tag, unpack
from ttprun.rank.values.trees import Comparison, Node, Part, Tree, is_node, is_same_scalar, number_of, shape_of

# Replaces a node of the first record, so that it counts as changed.
SPOILED = [Tag.REFUSED, "was changed by the first step"]


def spoil(first: Tree, before: Tree, mine: Tree) -> None:
    """Make everything that differs between two records of the new run count as changed by the old run, too.

    first    of the old run; changed in place
    before   of the new run, before its first step
    mine     of the new run, after it; may have more frames
    """
    walk = _Walk(first, before, mine)
    functions = [[frame[:2] for frame in tree.fields["place"]] for tree in (first, before, mine)]
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

    def named(self, first: dict[str, Node], before: dict[str, Node], mine: dict[str, Node]) -> None:
        for name in first.keys() & before.keys() & mine.keys():
            first[name] = self._spoiled(first[name], before[name], mine[name])

    def _spoiled(self, first: Node, before: Node, mine: Node) -> Node:
        if not is_node(before) or not is_node(mine):
            is_same = not is_node(before) and not is_node(mine) and is_same_scalar(before, mine)
            return first if is_same else SPOILED
        resolved = [tree.resolve(node) for tree, node in zip(self._trees, (first, before, mine), strict=True)]
        number = number_of(resolved[2])
        if number in self._seen or self._compared.is_same(before, mine):
            return first
        if number is not None:
            self._seen.add(number)
        if not all(is_node(node) and node[0] == resolved[2][0] for node in resolved):
            return SPOILED
        if mine[0] == Tag.MODULE or resolved[2][0] == Tag.MODULE:
            self._module(*resolved)
            return first
        parts = [(at, part) for at, part in shape_of(resolved[2]).items() if part in (Part.NAMED, Part.NODES)]
        is_sequence = any(part is Part.NODES for _, part in parts)
        if not parts or (is_sequence and not self._are_of_one_length(parts, resolved)):
            return SPOILED
        for at, part in parts:
            if any(at >= len(node) for node in resolved):
                continue
            own, *others = (node[at] for node in resolved)
            if part is Part.NAMED:
                self.named(own, *others)
            else:
                own[:] = [self._spoiled(*nodes) for nodes in zip(own, *others, strict=True)]
        return first

    def _are_of_one_length(self, parts: Sequence[tuple[int, Part]], nodes: list[Any]) -> bool:
        lists = [[node[at] for node in nodes if at < len(node)] for at, part in parts if part is Part.NODES]
        if not all(isinstance(one, list) for found in lists for one in found):
            return False  # packed: compared as a whole
        if nodes[0][0] == Tag.DICT and not all(found == lists[0][0] for found in lists[0]):
            return False
        return all(len(set(map(len, found))) == 1 for found in lists)

    def _module(self, first: list[Any], before: list[Any], mine: list[Any]) -> None:
        """Attributes only, as the tensors come from the old run anyhow."""
        if None not in (first[6], before[6], mine[6]):
            self._spoiled(first[6], before[6], mine[6])
        if first[6] is not None or before[6] is not None or mine[6] is not None:
            return
        settled = [unpack(node[3])["attributes"] for node in (first, before, mine)]
        for path in settled[0].keys() & settled[1].keys() & settled[2].keys():
            scopes = [
                found[path] | node[4].get(path, {}) for found, node in zip(settled, (first, before, mine), strict=True)
            ]
            self.named(*scopes)
            first[4][path] = scopes[0]
