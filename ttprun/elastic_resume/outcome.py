"""Combine nodes of two runs' records in one record: they get its numbers, and each object is defined once.

In the outcome the objects of the new run have higher numbers than those of the old one. Objects at the same place in
both runs become one object, with the new run's number.
"""

from __future__ import annotations

from typing import Any

from ttprun.rank.values.nodes import MISSING, CannotRestoreError, Tag
from ttprun.rank.values.trees import (
    BLOB_AT,
    CONTENTS,
    Node,
    Part,
    Tree,
    count_of_parts,
    is_node,
    listed,
    number_of,
    shape_of,
)


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
        if not is_node(node):
            return node
        if node[0] == Tag.REFERENCE:
            outcome = self.outcome_of_last(node[1])
            found = self._last.resolve(node)
            if outcome in self.defined or found is node:
                return [Tag.REFERENCE, outcome]
            node = found
        mine = self._mine.resolve(mine)
        number = number_of(node)
        if number is not None:
            if self.outcome_of_last(number) in self.defined:
                return [Tag.REFERENCE, self.outcome_of_last(number)]
            self.pair(node, mine)
            self.define(self.outcome_of_last(number), node)
        if node[0] == Tag.DATA:
            return [Tag.ACTIVATION, node[2]]
        if node[0] == Tag.SHARDED and self._is_resized:
            return [Tag.ACTIVATION, node[3][0]]
        if node[0] == Tag.FILE and self._is_resized:
            raise CannotRestoreError(
                "the script reads a file by itself in its steps, and it is unknown how the ranks divide the rest of it"
            )
        if node[0] == Tag.WEIGHT:
            weight = self._last.weight(node[1])
            index = None if weight is None else self._mine.index_of(weight)
            if index is None:
                raise CannotRestoreError("a variable holds an optimizer's state of a weight")
            return [node[0], index, *node[2:]]
        if node[0] == Tag.RANDOM and number is not None:
            self.generators[self.outcome_of_last(number)] = node[2:]
        return self.copied(node, is_mine=False, beside=mine)

    def of_mine(self, node: Node) -> Node:
        """A node of the new run's record, left as it is."""
        if not is_node(node):
            return node
        if node[0] == Tag.REFERENCE:
            found = self._mine.resolve(node)
            if self.outcome_of_mine(node[1]) in self.defined or found is node:
                return [Tag.REFERENCE, self.outcome_of_mine(node[1])]
            node = found
        number = number_of(node)
        if number is not None:
            outcome = self.outcome_of_mine(number)
            if outcome in self.defined:
                return [Tag.REFERENCE, outcome]
            self.define(outcome, node)
        return self.copied(node, is_mine=True)

    def copied(self, node: list[Any], is_mine: bool, beside: Node = MISSING) -> list[Any]:
        """A node with the outcome's numbers; its parts are of the same record.

        beside   the new run's node at the place of a node of the old one
        """
        outcome = self.outcome_of_mine if is_mine else self.outcome_of_last
        has_counterparts = is_node(beside) and beside[0] == node[0] and shape_of(beside) == shape_of(node)
        if has_counterparts and node[0] == Tag.DICT:
            has_counterparts = listed(beside[2]) == listed(node[2])

        def one(part: Node, counterpart: Node) -> Node:
            return self.of_mine(part) if is_mine else self.of_last(part, counterpart)

        def some(found: list[Node], counterparts: list[Node]) -> list[Node]:
            return [one(p, counterparts[i] if i < len(counterparts) else MISSING) for i, p in enumerate(found)]

        made = list(node)
        for at, part in shape_of(node).items():
            if at >= len(node):
                continue
            other = beside[at] if has_counterparts and at < len(beside) else None
            if part is Part.NUMBER:
                made[at] = outcome(node[at])
            elif part is Part.NODE:
                made[at] = one(node[at], MISSING if other is None else other)
            elif part in (Part.NODES, Part.UNORDERED):
                made[at] = some(listed(node[at]), listed(other) if other is not None and part is Part.NODES else [])
            elif part is Part.NAMED:
                made[at] = {name: one(p, (other or {}).get(name, MISSING)) for name, p in node[at].items()}
            else:
                made[at] = [{name: one(p, MISSING) for name, p in group.items()} for group in node[at]]
        shift = len(self._last.blobs) if is_mine else 0
        if node[0] in BLOB_AT:
            made[BLOB_AT[node[0]]] += shift
        elif node[0] == Tag.TENSOR and isinstance(node[CONTENTS], list):
            made[CONTENTS] = [node[CONTENTS][0] + shift]
        elif node[0] == Tag.TENSOR and isinstance(node[CONTENTS], int):
            made[CONTENTS] = outcome(node[CONTENTS])
        elif node[0] == Tag.MODULE and node[6] is None:
            made[5] += shift
            made[4] = {path: {name: one(p, MISSING) for name, p in nodes.items()} for path, nodes in node[4].items()}
        return made

    # Numbers.

    def outcome_of_mine(self, number: int) -> int:
        """The number in the outcome of an object of the new run."""
        return number + self._shift

    def outcome_of_last(self, number: int) -> int:
        """The number in the outcome of an object of the old run."""
        mine = self._mine_of.get(number)
        return number if mine is None else self.outcome_of_mine(mine)

    def pair(self, last: Node, mine: Node) -> None:
        """Combine an object of the old run and one of the new run that are at the same place."""
        if not is_node(last) or not is_node(mine) or last[0] != mine[0]:
            return
        number, own = number_of(last), number_of(mine)
        if number is None or own is None or number in self.defined:
            return
        if number not in self._mine_of and own not in self._last_of:
            self._mine_of[number], self._last_of[own] = own, number

    def pair_parts(self, last: list[Any], mine: list[Any]) -> None:
        """The same for all parts and tensors of modules that have the same ones."""
        for offset in range(1 + count_of_parts(mine)):
            self._mine_of.setdefault(last[1] + offset, mine[1] + offset)
            self._last_of.setdefault(mine[1] + offset, last[1] + offset)

    def define(self, outcome: int, node: list[Any]) -> None:
        """An object, with all parts of a module, is defined in the outcome from now on."""
        self.defined.update(range(outcome, outcome + 1 + count_of_parts(node)))
