"""Which values a run on other ranks takes from an old run's record, and which from its own setup.

Three records of the same place in the script are compared: the old run's first one, its last one, and that of the new
run after its setup. What has changed from the first to the last (a counter, a running mean, the state of a scheduler)
is the work of the training, and is taken from the last; what has not changed (rank, world size, arguments, lengths)
belongs to the setup, and is kept from the new run. This is decided down to attributes of objects and keys of
dictionaries. The outcome is again a record, which `Restore` writes into the variables.

Begin with `Merge.value`; outcome.py combines the nodes of both runs in one record.
"""

from __future__ import annotations

from typing import Any

from ttprun.elastic_resume.outcome import Outcome
from ttprun.rank.values.large_data import tensor_of
from ttprun.rank.values.nodes import MISSING, CannotRestoreError, Tag, pack, unpack
from ttprun.rank.values.trees import (
    CONTENTS,
    LAYOUT,
    Comparison,
    Node,
    Part,
    Tree,
    is_node,
    is_same_scalar,
    listed,
    number_of,
    shape_of,
)

_HELD_IN = frozenset({Tag.LIST, Tag.TUPLE, Tag.DICT})
_PLACE = 3  # of a generator's node: its instruction, and the positions of its loops


class Merge(Outcome):
    """One walk over three records.

    first, last   of the old run
    mine          of the new one
    ahead         fingerprints of data that the old run had prefetched and not trained on: the new one fetches its own
    is_resized    the new run has another number of ranks

    blobs         of the outcome: those of the last record, then those of mine, then a choice of both for modules
    left          the part of `ahead` that was met in the old run's variables
    """

    def __init__(self, first: Tree, last: Tree, mine: Tree, ahead: frozenset[bytes], is_resized: bool) -> None:
        super().__init__(last, mine, is_resized)
        self._first = first
        self._ahead = ahead
        self._compared = Comparison(first, last)
        self.blobs: list[memoryview] = [*last.blobs, *mine.blobs]
        self.left: set[bytes] = set()

    def record(self) -> dict[str, Any]:
        """The fields of the outcome that differ from the last record.

        Raises CannotRestoreError if the first record was made in other functions than the last one.
        """
        first, last, mine = self._first.fields, self._last.fields, self._mine.fields
        functions = [[frame[:2] for frame in fields["place"]] for fields in (first, last)]
        if functions[0] != functions[1]:
            raise CannotRestoreError(
                "the run's first optimizer step was made in another function, so it is not known what has changed since"
            )
        variables = [
            self.named(*scopes)
            for scopes in zip(self._first.variables, self._last.variables, self._mine.variables, strict=True)
        ]
        loops = []
        for number, (of_last, of_mine) in enumerate(zip(last["loops"], mine["loops"], strict=True)):
            of_first = first["loops"][number]
            loops.append(
                [
                    one
                    | {
                        "over": self.value(
                            of_first[i]["over"] if i < len(of_first) else MISSING, one["over"], m["over"]
                        )
                    }
                    for i, (one, m) in enumerate(zip(of_last, of_mine, strict=True))
                ]
            )
        modules = {
            name: self.named(self._first.modules.get(name, {}), scope, self._mine.modules.get(name, {}))
            for name, scope in self._last.modules.items()
        }
        optimizers = self._in_order(first["optimizers"], last["optimizers"], mine["optimizers"])
        returned = self.value(first.get("returned"), last.get("returned"), mine.get("returned"))
        return {
            "variables": variables, "loops": loops, "modules": modules, "optimizers": optimizers, "returned": returned,
        }  # fmt: skip

    # Three nodes of one place.

    def named(self, first: dict[Any, Node], last: dict[Any, Node], mine: dict[Any, Node]) -> dict[Any, Node]:
        """Variables or attributes; those deleted since the first record are left out.

        first, last, mine   name -> node, of the same scope in each of the three records
        returns             the same for the outcome
        """
        found = {
            name: self.value(first.get(name, MISSING), node, mine.get(name, MISSING)) for name, node in last.items()
        }
        for name, node in mine.items():
            if name not in last and name not in first:
                found[name] = self.of_mine(node)
        return found

    def value(self, first: Node, last: Node, mine: Node) -> Node:
        """The node to restore at one place in the script, of which each record has a node.

        first, mine   MISSING if the record has nothing there

        Raises CannotRestoreError.
        """
        if not is_node(last):
            is_left = first is not MISSING and not is_node(first) and is_same_scalar(first, last)
            return self.of_mine(mine) if is_left and mine is not MISSING else last
        first, last, found = self._first.resolve(first), self._last.resolve(last), self._mine.resolve(mine)
        if last[0] == Tag.ACTIVATION:
            return last
        if last[0] == Tag.SHARDED and self._is_resized:
            return [Tag.ACTIVATION, last[3][0]]  # other ranks cannot use a part of it
        if last[0] == Tag.DATA and found == last:  # made again, e.g. by a loop that has jumped
            return found
        if self._is_ahead(last):
            if mine is MISSING:
                raise CannotRestoreError("prefetched data is in a variable that the new run has not set")
            self.pair(last, found)
            return self.of_mine(mine)
        number = number_of(last)
        is_again = number is not None and self.outcome_of_last(number) in self.defined
        own = number_of(found)
        # Two names of one object in one run may be two objects in the other.
        is_again = is_again or (own is not None and self.outcome_of_mine(own) in self.defined)
        if is_again or not self._are_alike(first, last, found):
            if mine is not MISSING and self._compared.is_same(first, last):
                self.pair(last, found)
                return self.of_mine(mine)
            if not is_again and self._are_views(first, last, found):
                return self._moved(last, found)
            return self.of_last(last, found)
        self._compared.bind(first, last)
        self.pair(last, found)
        return self._merged(first, last, found)

    def _are_alike(self, first: Node, last: list[Any], mine: Node) -> bool:
        """Whether three nodes can be merged part by part."""
        if not is_node(first) or not is_node(mine) or {first[0], mine[0]} != {last[0]}:
            return False
        if last[0] == Tag.MODULE:
            return bool(first[2] == last[2] == mine[2] or mine[6] is not None or last[6] is not None)
        shape = shape_of(last)
        if not any(part is not Part.NUMBER and part is not Part.UNORDERED for part in shape.values()):
            return False
        if last[0] == Tag.DICT and not self._has_keys_alike(first, last, mine):
            return False
        lengths = {len(first), len(last), len(mine)}
        plain = [at for at in range(len(last)) if at not in shape]
        nodes = [_without_positions(node) for node in (first, last, mine)]
        is_plain_alike = len(lengths) == 1 and all(nodes[0][at] == nodes[1][at] == nodes[2][at] for at in plain)
        counts = [at for at, part in shape.items() if part in (Part.NODES, Part.GROUPS) and at < len(last)]
        return is_plain_alike and (
            last[0] == Tag.DICT
            or all(len({len(listed(node[at])) for node in (first, last, mine)}) == 1 for at in counts)
        )

    def _are_views(self, first: Node, last: list[Any], mine: Node) -> bool:
        """Whether three tensors are parts of small memory that the training has not changed, e.g. of a dataset."""
        nodes = (first, last, mine)
        if not all(is_node(node) and node[0] == Tag.TENSOR and isinstance(node[LAYOUT], list) for node in nodes):
            return False
        contents = [tree.contents(n) for tree, n in zip((self._first, self._last, self._mine), nodes, strict=True)]
        return contents[0] == contents[1] and all(isinstance(one, bytes) for one in contents)

    def _moved(self, last: list[Any], mine: list[Any]) -> Node:
        """Another part of the new run's memory, which must not be overwritten by the old run's."""
        stride, offset, _ = last[LAYOUT]
        size = mine[LAYOUT][2]
        reach = offset + 1 + sum((length - 1) * by for length, by in zip(last[3], stride, strict=True))
        if reach * tensor_of(last[2], [0], b"").element_size() > size:
            raise CannotRestoreError("a tensor is a part of memory that is smaller in the new run")
        self.pair(last, mine)
        made = self.of_mine(mine)
        return (
            [*made[:2], last[2], last[3], [stride, offset, size], *made[CONTENTS:]] if made[0] == Tag.TENSOR else made
        )

    def _has_keys_alike(self, *nodes: list[Any]) -> bool:
        return all(all(_is_key(key) for key in listed(node[2])) for node in nodes)

    def _merged(self, first: list[Any], last: list[Any], mine: list[Any]) -> Node:
        number = number_of(mine)
        if number is not None:
            self.define(self.outcome_of_mine(number), mine)
        if last[0] == Tag.MODULE:
            return self._merged_module(first, last, mine)
        if last[0] == Tag.DICT:
            return self._merged_dict(first, last, mine)
        shape = shape_of(last)
        made = list(last)
        if last[0] == Tag.SUSPENDED:
            made[_PLACE] = mine[_PLACE]  # its loops have jumped
        for at in range(len(last)):
            part = shape.get(at)
            if part is Part.NUMBER:
                made[at] = self.outcome_of_mine(mine[at])
            elif part is Part.NODE:
                made[at] = self.value(first[at], last[at], mine[at])
            elif part is Part.NODES:
                made[at] = self._in_order(listed(first[at]), listed(last[at]), listed(mine[at]))
            elif part is Part.NAMED:
                made[at] = self.named(first[at], last[at], mine[at])
            elif part is Part.GROUPS:
                made[at] = list(map(self.named, first[at], last[at], mine[at]))
        return made

    def _in_order(self, first: list[Node], last: list[Node], mine: list[Node]) -> list[Node]:
        return [
            self.value(first[i] if i < len(first) else MISSING, node, mine[i] if i < len(mine) else MISSING)
            for i, node in enumerate(last)
        ]

    def _merged_dict(self, first: list[Any], last: list[Any], mine: list[Any]) -> Node:
        keys: dict[bytes, Node] = {}
        values: list[dict[bytes, Node]] = []
        for node in (mine, first, last):
            names = list(map(pack, listed(node[2])))
            keys.update(zip(names, listed(node[2]), strict=True))
            values.append(dict(zip(names, listed(node[3]), strict=True)))
        made = self.named(values[1], values[2], values[0])
        attributes = [self.named(first[5], last[5], mine[5])] if len(last) > 5 else []
        number = self.outcome_of_mine(mine[1])
        return [Tag.DICT, number, [keys[name] for name in made], list(made.values()), *last[4:5], *attributes]

    def _merged_module(self, first: list[Any], last: list[Any], mine: list[Any]) -> Node:
        """If one is wrapped (by DistributedDataParallel) and the other is not, merge the inner module."""
        inner_first = first if first[6] is None else self._first.resolve(first[6])
        inner_last = last if last[6] is None else self._last.resolve(last[6])
        if mine[6] is None:
            return self._merged_parts(inner_first, inner_last, mine)
        is_left = None in (first[6], last[6]) or first[3] == last[3]
        inner = self._mine.resolve(mine[6])
        number = self.outcome_of_mine(inner[1])
        if number in self.defined:
            wrapped: Node = [Tag.REFERENCE, number]
        elif self._are_alike(inner_first, inner_last, inner):
            self._compared.bind(inner_first, inner_last)
            self.pair(inner_last, inner)
            wrapped = self._merged(inner_first, inner_last, inner)
        else:
            wrapped = self.of_last(inner_last, inner)
        outcome = self.outcome_of_mine(mine[1])
        return [Tag.MODULE, outcome, mine[2], mine[3] if is_left else last[3], {}, 0, wrapped]

    def _merged_parts(self, first: list[Any], last: list[Any], mine: list[Any]) -> Node:
        described = [unpack(node[3]) for node in (first, last, mine)]
        names = [[described[i]["modules"], [path for path, _ in described[i]["tensors"]]] for i in range(3)]
        if not names[0] == names[1] == names[2]:
            if self._compared.is_same(first, last):
                return self.copied(mine, is_mine=True)
            raise CannotRestoreError("a module has other parts than in the old run, and they have changed since")
        self.pair_parts(last, mine)
        begin = len(self.blobs)
        for offset, path in enumerate(names[2][1]):
            one, other, own = (
                tree.blobs[node[5] + offset]
                for tree, node in ((self._first, first), (self._last, last), (self._mine, mine))
            )
            is_sharded = path in described[2].get("sharded", ())
            if one != other and (is_sharded or len(other) != len(own)):
                what = "is sharded over the ranks, and was changed" if is_sharded else "has another shape than"
                raise CannotRestoreError(f"{path} of a module {what} in the old run")
            # Buffers in a state_dict are taken from the old run, as from a checkpoint; others are the constructor's.
            is_left = one == other and (is_sharded or path in described[2]["passing"] or len(other) != len(own))
            self.blobs.append(own if is_left else other)
        own_description = dict(described[2])
        if described[1]["frozen"] != described[0]["frozen"]:
            own_description["frozen"] = described[1]["frozen"]
        attributes = {}
        for path in described[2]["attributes"]:
            scopes = [
                d["attributes"].get(path, {}) | n[4].get(path, {})
                for d, n in zip(described, (first, last, mine), strict=True)
            ]
            attributes[path] = self.named(*scopes)
        own_description["attributes"] = {path: {} for path in attributes}
        return [Tag.MODULE, self.outcome_of_mine(mine[1]), mine[2], pack(own_description), attributes, begin, None]

    # Prefetched data.

    def _is_ahead(self, node: list[Any]) -> bool:
        """Whether it is prefetched data, or holds some."""
        if not self._ahead:
            return False
        nodes = [node]
        if node[0] in _HELD_IN:
            nodes += [
                self._last.resolve(part)
                for at in (1, 2, 3)
                if shape_of(node).get(at) is Part.NODES
                for part in listed(node[at])
            ]
        found = {self._last.digest(part) for part in nodes} & self._ahead
        self.left |= {digest for digest in found if digest is not None}
        return bool(found)


def _without_positions(node: list[Any]) -> list[Any]:
    """A generator's node without the positions of its loops, which have advanced; any other node as it is."""
    return [*node[:_PLACE], node[_PLACE][:1], *node[_PLACE + 1 :]] if node[0] == Tag.SUSPENDED else node


def _is_key(node: Node) -> bool:
    return not is_node(node) or node[0] == Tag.PLAIN or (node[0] == Tag.TUPLE and all(map(_is_key, listed(node[1]))))
