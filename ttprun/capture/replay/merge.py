"""Which values a run on other ranks takes from an old run's record, and which from its own setup.

Three records of the same place in the script are compared: the old run's first one, its last one, and that of the new
run after its setup. What has changed from the first to the last (a counter, a running mean, the state of a scheduler)
is the work of the training, and is taken from the last; what has not changed (rank, world size, arguments, lengths)
belongs to the setup, and is kept from the new run. This is decided down to attributes of objects and keys of
dictionaries. The outcome is again a record, which `Restore` writes into the variables.

Begin with `Merge.value`; combined.py combines the nodes of both runs in one record.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from ttprun.capture.records.nodes import (
    PARTS,
    ActivationNode,
    AnyNode,
    DataNode,
    DictNode,
    ListNode,
    ModuleNode,
    Node,
    Part,
    PlainNode,
    ReferenceNode,
    ShardedNode,
    SuspendedNode,
    TensorNode,
    TupleNode,
    WrapperNode,
)
from ttprun.capture.records.packing import MISSING, CannotRestoreError, listed, pack, unpack_description
from ttprun.capture.replay.combined import MODULES, Outcome, are_of_a_kind
from ttprun.capture.values.large import tensor_of
from ttprun.capture.values.trees import Comparison, Tree, all_attributes, is_same_scalar, number_of

_IN_ORDER = (Part.NODES, Part.ITEMS)
_INITIAL = "initial_lr"  # what a scheduler multiplies
Group = dict[Any, Node]


class Merge(Outcome):
    """One walk over three records.

    first, last   of the old run
    mine          of the new one
    ahead         fingerprints of data that the old run had prefetched and not trained on: the new one fetches its own
    is_resized    the new run has another number of ranks
    hyperparameters   whose count if they differ: "script", "checkpoint"; "auto": the checkpoint's if the training has
                      changed them, e.g. a learning rate by a scheduler

    blobs         of the outcome: those of the last record, then those of mine, then a choice of both for modules
    left          the part of `ahead` that was met in the old run's variables
    differing     hyperparameters that differ, a phrase each
    """

    def __init__(
        self,
        first: Tree,
        last: Tree,
        mine: Tree,
        ahead: frozenset[bytes],
        is_resized: bool,
        hyperparameters: str = "auto",
    ) -> None:
        super().__init__(last, mine, is_resized)
        self._whose = hyperparameters
        self.differing: list[str] = []
        self._chosen: dict[int | None, list[Group]] = {}  # number of an optimizer in the last record -> of each group
        self._initial: dict[
            Any, Node
        ] = {}  # initial learning rate of the script -> that of the checkpoint, which counts
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
        functions = [[frame[:2] for frame in fields.place] for fields in (first, last)]
        if functions[0] != functions[1]:
            raise CannotRestoreError(
                "the run's first optimizer step was made in another function, so it is not known what has changed since"
            )
        for nodes in zip(*map(optimizers_of, (self._first, self._last, self._mine)), strict=False):
            groups = zip(*(node.groups for node in nodes), strict=False)
            self._chosen[number_of(nodes[1])] = [self._choose(*group) for group in groups]
        variables = [
            self.named(*scopes)
            for scopes in zip(self._first.variables, self._last.variables, self._mine.variables, strict=True)
        ]
        loops = []
        for of_first, of_last, of_mine in zip(first.loops, last.loops, mine.loops, strict=True):
            overs = [MISSING if i >= len(of_first) else of_first[i].over for i in range(len(of_last))]
            loops.append(
                [
                    replace(loop, over=self.value(over, loop.over, m.over))
                    for over, loop, m in zip(overs, of_last, of_mine, strict=True)
                ]
            )
        modules = {
            name: self.named(self._first.modules.get(name, {}), scope, self._mine.modules.get(name, {}))
            for name, scope in self._last.modules.items()
        }
        optimizers = self._in_order(first.optimizers, last.optimizers, mine.optimizers)
        returned = self.value(first.returned, last.returned, mine.returned)
        return {
            "variables": variables, "loops": loops, "modules": modules, "optimizers": optimizers, "returned": returned,
        }  # fmt: skip

    # Three nodes of one place.

    def named(self, first: dict[Any, Node], last: dict[Any, Node], mine: dict[Any, Node]) -> dict[Any, Node]:
        """Variables or attributes; those deleted since the first record are left out.

        first, last, mine   name -> node, of the same scope in each of the three records
        returns             the same for the outcome
        """
        nodes = {
            name: self.value(first.get(name, MISSING), node, mine.get(name, MISSING)) for name, node in last.items()
        }
        for name, node in mine.items():
            if name not in last and name not in first:
                nodes[name] = self.of_mine(node)
        rates = nodes.get("base_lrs")  # of a scheduler, which computes from them
        if self._initial and isinstance(rates, ListNode):
            kept = [self._initial.get(rate, rate) for rate in listed(rates.items)]
            nodes["base_lrs"] = replace(rates, items=kept)
        return nodes

    def _choose(self, first: Group, last: Group, mine: Group) -> Group:
        """Hyperparameters of one group of an optimizer whose node does not follow from what the training has changed.

        first, last, mine   name -> node, of each of the three records
        """
        chosen: Group = {}
        for name, before, now, ours, is_scheduled in compared(first, last, mine):
            is_rate, is_other = name == "lr" and _INITIAL in last, ours not in (before, now)
            is_of_script = self._whose == "script" or (self._whose == "auto" and not is_scheduled)
            if not is_of_script and (is_other or self._whose == "checkpoint"):
                chosen[name] = last[name]
                if is_rate:
                    chosen[_INITIAL] = self._initial[ours] = before
            elif self._whose == "script":
                chosen[name] = now * ours / before if name == "lr" and is_scheduled and before else mine[name]
                chosen |= {_INITIAL: ours} if is_rate else {}
            phrase = phrase_of(name, ours, now, _plain(chosen.get(name, mine[name])))
            if is_other and phrase not in self.differing:
                self.differing.append(phrase)
        return chosen

    def value(self, first: Node, last: Node, mine: Node) -> Node:
        """The node to restore at one place in the script, of which each record has a node.

        first, mine   MISSING if the record has nothing there

        Raises CannotRestoreError.
        """
        if not isinstance(last, AnyNode):
            is_left = first is not MISSING and not isinstance(first, AnyNode) and is_same_scalar(first, last)
            return self.of_mine(mine) if is_left and mine is not MISSING else last
        first, last, ours = self._first.resolve(first), self._last.resolve(last), self._mine.resolve(mine)
        if isinstance(last, ActivationNode):
            return last
        if isinstance(last, ShardedNode) and self._is_resized:
            return ActivationNode(last.layout[0])  # other ranks cannot use a part of it
        if isinstance(last, DataNode) and isinstance(ours, DataNode) and replace(ours, age=last.age) == last:
            return ours  # made again, e.g. by a loop that has jumped
        if self._is_ahead(last):
            if mine is MISSING:
                raise CannotRestoreError("prefetched data is in a variable that the new run has not set")
            self.pair(last, ours)
            return self.of_mine(mine)
        number = number_of(last)
        is_again = number is not None and self.outcome_of_last(number) in self.defined
        own = number_of(ours)
        # Two names of one object in one run may be two objects in the other.
        is_again = is_again or (own is not None and self.outcome_of_mine(own) in self.defined)
        if is_again or not self._are_alike(first, last, ours):
            if mine is not MISSING and self._compared.is_same(first, last):
                self.pair(last, ours)
                return self.of_mine(mine)
            if not is_again and self._are_views(first, last, ours):
                return self._moved(last, ours)
            return self.of_last(last, ours)
        self._compared.bind(first, last)
        self.pair(last, ours)
        return self._merged(first, last, ours)

    def _are_alike(self, first: Any, last: Any, mine: Any) -> bool:
        """Whether three nodes can be merged part by part."""
        if not are_of_a_kind(first, last) or not are_of_a_kind(mine, last):
            return False
        if isinstance(last, MODULES):
            is_wrapped = isinstance(mine, WrapperNode) or isinstance(last, WrapperNode)
            return is_wrapped or first.kind == last.kind == mine.kind
        shape = PARTS[type(last)]
        if not any(part not in (Part.NUMBER, Part.AGE, Part.UNORDERED) for part in shape.values()):
            return False
        if isinstance(last, DictNode) and not all(
            _is_key(key) for node in (first, last, mine) for key in listed(node.keys)
        ):
            return False
        plain = [name for name in last.__struct_fields__ if name not in shape]
        nodes: list[Any] = [  # without the positions of a generator's loops, which have advanced
            replace(node, place=node.place[:1]) if isinstance(node, SuspendedNode) else node
            for node in (first, last, mine)
        ]
        if any(getattr(nodes[0], name) != getattr(node, name) for name in plain for node in nodes[1:]):
            return False
        counts = [name for name, part in shape.items() if part in (*_IN_ORDER, Part.GROUPS)]
        return isinstance(last, DictNode) or all(
            len({len(listed(getattr(node, name))) for node in (first, last, mine)}) == 1 for name in counts
        )

    def _are_views(self, first: Node, last: Node, mine: Node) -> bool:
        """Whether three tensors are parts of small memory that the training has not changed, e.g. of a dataset."""
        nodes = (first, last, mine)
        if not all(isinstance(node, TensorNode) and isinstance(node.layout, list) for node in nodes):
            return False
        contents = [tree.contents(n) for tree, n in zip((self._first, self._last, self._mine), nodes, strict=True)]
        return contents[0] == contents[1] and all(isinstance(content, bytes) for content in contents)

    def _moved(self, last: TensorNode, mine: TensorNode) -> Node:
        """Another part of the new run's memory, which must not be overwritten by the old run's."""
        stride, offset, _ = last.layout
        size = mine.layout[2]
        reach = offset + 1 + sum((length - 1) * by for length, by in zip(last.shape, stride, strict=True))
        if reach * tensor_of(last.dtype, [0], b"").element_size() > size:
            raise CannotRestoreError("a tensor is a part of memory that is smaller in the new run")
        self.pair(last, mine)
        made = self.of_mine(mine)
        is_here = isinstance(made, TensorNode)
        return replace(made, dtype=last.dtype, shape=last.shape, layout=[stride, offset, size]) if is_here else made

    def _merged(self, first: Any, last: Any, mine: Any) -> Node:
        number = number_of(mine)
        if number is not None:
            self.define(self.outcome_of_mine(number), mine)
        if isinstance(last, MODULES):
            return self._merged_module(first, last, mine)
        if isinstance(last, DictNode):
            return self._merged_dict(first, last, mine)
        made: dict[str, Any] = {}
        if isinstance(last, SuspendedNode):
            made["place"] = mine.place  # its loops have jumped
        for name, part in PARTS[type(last)].items():
            parts = [getattr(node, name) for node in (first, last, mine)]
            if part is Part.NUMBER:
                made[name] = self.outcome_of_mine(parts[2])
            elif part is Part.NODE:
                made[name] = self.value(*parts)
            elif part in _IN_ORDER:
                made[name] = self._in_order(*map(listed, parts))
            elif part is Part.NAMED:
                made[name] = self.named(*parts)
            elif part is Part.GROUPS:
                made[name] = list(map(self.named, *parts))
                chosen = self._chosen.get(number_of(last), [])
                made[name] = [group | of_it for group, of_it in zip(made[name], chosen, strict=True)] or made[name]
        return replace(last, **made)

    def _in_order(self, first: list[Node], last: list[Node], mine: list[Node]) -> list[Node]:
        return [
            self.value(first[i] if i < len(first) else MISSING, node, mine[i] if i < len(mine) else MISSING)
            for i, node in enumerate(last)
        ]

    def _merged_dict(self, first: DictNode, last: DictNode, mine: DictNode) -> Node:
        keys: dict[bytes, Node] = {}
        values: list[dict[bytes, Node]] = []
        for node in (mine, first, last):
            names = list(map(pack, listed(node.keys)))
            keys.update(zip(names, listed(node.keys), strict=True))
            values.append(dict(zip(names, listed(node.values), strict=True)))
        made = self.named(values[1], values[2], values[0])
        attributes = self.named(first.attributes, last.attributes, mine.attributes)
        number = self.outcome_of_mine(mine.number)
        return DictNode(number, [keys[name] for name in made], list(made.values()), last.kind, attributes)

    def _merged_module(self, first: Any, last: Any, mine: Any) -> Node:
        """If one is wrapped (by DistributedDataParallel) and the other is not, merge the inner module."""
        are_wrapped = isinstance(first, WrapperNode) and isinstance(last, WrapperNode)
        inner_first = self._first.resolve(first.wrapped) if isinstance(first, WrapperNode) else first
        inner_last = self._last.resolve(last.wrapped) if isinstance(last, WrapperNode) else last
        if not isinstance(mine, WrapperNode):
            return self._merged_parts(inner_first, inner_last, mine)
        is_left = not are_wrapped or first.training == last.training
        inner = self._mine.resolve(mine.wrapped)
        number = self.outcome_of_mine(inner.number)
        if number in self.defined:
            wrapped: Node = ReferenceNode(number)
        elif self._are_alike(inner_first, inner_last, inner):
            self._compared.bind(inner_first, inner_last)
            self.pair(inner_last, inner)
            wrapped = self._merged(inner_first, inner_last, inner)
        else:
            wrapped = self.of_last(inner_last, inner)
        training = mine.training if is_left else last.training
        return WrapperNode(self.outcome_of_mine(mine.number), mine.kind, training, {}, wrapped)

    def _merged_parts(self, first: ModuleNode, last: ModuleNode, mine: ModuleNode) -> Node:
        nodes = (first, last, mine)
        described = [unpack_description(node.description) for node in nodes]
        names = [[module.modules, [path for path, _ in module.tensors]] for module in described]
        if not names[0] == names[1] == names[2]:
            if self._compared.is_same(first, last):
                return self.copied(mine, is_mine=True)
            raise CannotRestoreError("a module has other parts than in the old run, and they have changed since")
        self.pair_parts(last, mine)
        begin = len(self.blobs)
        for offset, (path, _) in enumerate(described[2].tensors):
            before, after, own = (
                tree.blobs[node.first_blob + offset]
                for tree, node in zip((self._first, self._last, self._mine), nodes, strict=True)
            )
            is_sharded = path in described[2].sharded
            if before != after and (is_sharded or len(after) != len(own)):
                what = "is sharded over the ranks, and was changed" if is_sharded else "has another shape than"
                raise CannotRestoreError(f"{path} of a module {what} in the old run")
            # Buffers in a state_dict are taken from the old run, as from a checkpoint; others are the constructor's.
            is_left = before == after and (is_sharded or path in described[2].passing or len(after) != len(own))
            self.blobs.append(own if is_left else after)
        is_changed = described[1].frozen != described[0].frozen
        scopes = [all_attributes(node, module) for node, module in zip(nodes, described, strict=True)]
        attributes = {path: self.named(*(scope.get(path, {}) for scope in scopes)) for path in described[2].attributes}
        description = replace(
            described[2],
            frozen=described[1 if is_changed else 2].frozen,
            attributes={path: {} for path in attributes},
        )
        return ModuleNode(self.outcome_of_mine(mine.number), mine.kind, pack(description), attributes, begin)

    # Prefetched data.

    def _is_ahead(self, node: AnyNode) -> bool:
        """Whether it is prefetched data, or holds some."""
        if not self._ahead:
            return False
        nodes = [node]
        if isinstance(node, ListNode | TupleNode | DictNode):
            shape = PARTS[type(node)]
            lists = [getattr(node, name) for name, part in shape.items() if part in _IN_ORDER]
            nodes += [self._last.resolve(part) for items in lists for part in listed(items)]
        digests = {self._last.digest(part) for part in nodes} & self._ahead
        self.left |= {digest for digest in digests if digest is not None}
        return bool(digests)


def optimizers_of(tree: Tree) -> list[Any]:
    """The nodes of a record's optimizers."""
    return [tree.resolve(node) for node in tree.fields.optimizers]


def compared(first: Group, last: Group, mine: Group) -> Iterator[tuple[str, Any, Any, Any, bool]]:
    """(name, value in `first`, in `last`, in `mine`, whether a schedule changes it) of hyperparameters of one group.

    first, last, mine   name -> node, or value; what is none of numbers and words is left out

    Of a scheduled learning rate the first and the third are those with which the schedule begins.
    """
    for name in sorted(first.keys() & last.keys() & mine.keys() - {_INITIAL}):
        before, now, ours = (_plain(group[name]) for group in (first, last, mine))
        is_scheduled = now != before
        if name == "lr" and _INITIAL in last and _INITIAL in mine:
            before, ours, is_scheduled = _plain(last[_INITIAL]), _plain(mine[_INITIAL]), True
        if None not in (before, now, ours):
            yield name, before, now, ours, is_scheduled


def phrase_of(name: str, ours: Any, stored: Any, used: Any) -> str:
    """What is said of a hyperparameter whose value in the script is not the checkpoint's."""
    return f"{name}: {_shown(ours)} in the script, {_shown(stored)} in the checkpoint, {_shown(used)} is used"


def _plain(node: Node) -> Any:
    """The value of a hyperparameter: a scalar, or a tuple of such; None if it is something else."""
    if isinstance(node, TupleNode):
        return tuple(map(_plain, node.items))
    return None if isinstance(node, AnyNode) else node


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _is_key(node: Node) -> bool:
    if isinstance(node, TupleNode):
        return all(map(_is_key, node.items))
    return not isinstance(node, AnyNode) or isinstance(node, PlainNode)
