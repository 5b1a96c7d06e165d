"""The nodes of a record: one type for each kind of value of the script, and what each part of it holds.

A number, str, bool or None is its own node. Objects that can be shared or changed have a number; where one is met
again, there is a `ReferenceNode`. Nodes are packed as lists that begin with a tag. The annotations say which parts are
nodes themselves (`PARTS`): who walks over a record, compares two or merges them asks there. Begin with `ListNode`.
"""

from __future__ import annotations

import enum
from typing import Any, NewType, TypeAlias, Union

import msgspec

from ttprun.protocol.reason import Reason


class AnyNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What all nodes but the scalars are."""


Number = NewType("Number", int)  # of an object


class NumberedNode(AnyNode, frozen=True, gc=False):
    """What can be shared or changed, and so be referred to."""

    number: Number


class ObjectOfKind(NumberedNode, frozen=True, gc=False):
    """An object that can be shared or changed, with the name of its type."""

    kind: str


Age: TypeAlias = int  # how many boundaries ago all of it was looked at, at most
Nodes: TypeAlias = "list[Node]"
Items: TypeAlias = "list[Node] | bytes"  # bytes: packed, see values/long_items.py
Unordered: TypeAlias = "list[Node] | bytes"
Named: TypeAlias = "dict[str, Node]"
Groups: TypeAlias = "list[dict[str, Node]]"


class Part(enum.Enum):
    """The kind of content of a node's part."""

    NUMBER = "Number"
    AGE = "Age"
    NODE = "Node"
    NODES = "Nodes"
    ITEMS = "Items"
    UNORDERED = "Unordered"
    NAMED = "Named"
    GROUPS = "Groups"


LISTS = (Part.NODES, Part.ITEMS, Part.UNORDERED)


# What is not recorded.


class SameNode(AnyNode, frozen=True, gc=False, tag="="):
    """Reproduced by the replay and compared; `what` else must be equal beside the type."""

    kind: str
    what: str


class NotProvedNode(AnyNode, frozen=True, gc=False, tag="?"):
    """Can change, and is not recorded."""

    kind: str
    why: str


class EffectNode(AnyNode, frozen=True, gc=False, tag="~"):
    """Only has effects outside; compared by type."""

    kind: str


class RefusedNode(AnyNode, frozen=True, gc=False, tag="!"):
    """Cannot be recorded.

    why    continues "it"
    about  kind of that reason
    """

    why: str = ""
    about: str = "value-not-recorded"

    def reason(self, name: str) -> Reason:
        """Why the value of this name cannot be recorded, and what to do."""
        reason = Reason(self.about, f"{name} cannot be recorded: it {self.why}")
        return reason.within(f"{reason}; {reason.cure}")


class ClosedNode(AnyNode, frozen=True, gc=False, tag="c"):
    """A file that is closed."""

    kind: str


class SaveNode(AnyNode, frozen=True, gc=False, tag="k"):
    """The future of a checkpoint that a thread saves: where, and whether it was done."""

    where: str
    is_done: bool


class ActivationNode(AnyNode, frozen=True, gc=False, tag="A"):
    """A large tensor that depends on the weights, or one whose memory is freed."""

    shape: list[int]


class DataNode(AnyNode, frozen=True, gc=False, tag="D"):
    """A large tensor or array that the replay reproduces. A dtype of numpy begins with its byte order or a bracket."""

    dtype: str
    shape: list[int]
    digest: bytes
    age: Age = 0


class DataTreeNode(ObjectOfKind, frozen=True, gc=False, tag="Y"):
    """A list or dictionary of data, and all that is in it: as many `objects`, itself the first, numbered one by one.

    outside   references to what is in it and was met before
    packed    its node, whose numbers begin at 0, and of what was met before at ~(place in `outside` << 32); or nothing
    """

    length: int
    digest: str
    objects: int
    outside: Nodes
    packed: bytes
    age: Age = 0


class LongNode(ObjectOfKind, frozen=True, gc=False, tag="L"):
    """A container too long to record; `first` is the number of the first of the `objects` in it."""

    length: int
    digest: str
    first: Number
    objects: int
    age: Age = 0


class ReferenceNode(AnyNode, frozen=True, gc=False, tag="r"):
    """An object seen before."""

    number: int


class IdNode(AnyNode, frozen=True, gc=False, tag="#"):
    """The id of an object, as a key of a dict or in a set: another number in each process."""

    referent: Node


class PlainNode(AnyNode, frozen=True, gc=False, tag="p"):
    """An immutable value; its parts are scalars, bytes, or such nodes again: see values/plain.py."""

    kind: str
    parts: list[Any]


class FixedNode(AnyNode, frozen=True, gc=False, tag="."):
    """The packed nodes of a scope that are the same at each boundary."""

    packed: bytes


class ValueObjectNode(AnyNode, frozen=True, gc=False, tag="v"):
    """A frozen dataclass."""

    kind: str
    attributes: Named


class MethodNode(AnyNode, frozen=True, gc=False, tag="M"):
    """A bound method."""

    owner: Node
    name: str


class WeakNode(AnyNode, frozen=True, gc=False, tag="W"):
    """weakref.ref; None if what it refers to is gone."""

    referent: Node


# Containers. `kind` and `attributes` are those of a subclass.


class ListNode(NumberedNode, frozen=True, gc=False, tag="l"):
    """list."""

    items: Items
    kind: str | None = None
    attributes: Named = {}
    age: Age = 0


class TupleNode(AnyNode, frozen=True, gc=False, tag="t"):
    """tuple."""

    items: Nodes
    kind: str | None = None
    attributes: Named = {}


class SetNode(NumberedNode, frozen=True, gc=False, tag="s"):
    """set."""

    items: Unordered
    kind: str | None = None
    attributes: Named = {}
    age: Age = 0


class FrozensetNode(AnyNode, frozen=True, gc=False, tag="f"):
    """frozenset."""

    items: Unordered
    kind: str | None = None
    attributes: Named = {}


class DequeNode(NumberedNode, frozen=True, gc=False, tag="q"):
    """collections.deque."""

    items: Items
    kind: str
    attributes: Named
    max_length: int | None
    age: Age = 0


class DictNode(NumberedNode, frozen=True, gc=False, tag="d"):
    """dict: keys and values, in order."""

    keys: Items
    values: Items
    kind: str | None = None
    attributes: Named = {}
    age: Age = 0


class ObjectNode(ObjectOfKind, frozen=True, gc=False, tag="o"):
    """An object, by its attributes."""

    attributes: Named


class StateNode(ObjectOfKind, frozen=True, gc=False, tag="S"):
    """An object's packed state from an adapter: see values/adapters.py."""

    state: bytes
    attributes: Named


class ClassNode(NumberedNode, frozen=True, gc=False, tag="C"):
    """A class of the user's."""

    name: str
    attributes: Named


class FunctionNode(NumberedNode, frozen=True, gc=False, tag="F"):
    """A function with state: its free variables, attributes and default values."""

    where: str
    cells: Named
    attributes: Named
    defaults: Nodes


class PartialNode(NumberedNode, frozen=True, gc=False, tag="P"):
    """functools.partial."""

    function: Node
    arguments: Node
    keywords: Node


class FileNode(ObjectOfKind, frozen=True, gc=False, tag="R"):
    """A file that is read, or one in memory."""

    position: Any  # an int; that of a text file may have more than 64 bits


class IteratorNode(ObjectOfKind, frozen=True, gc=False, tag="i"):
    """One of Python's own: the type called with the arguments, and set to the state, gives it."""

    arguments: Nodes
    state: Node


class SuspendedNode(NumberedNode, frozen=True, gc=False, tag="G"):
    """A generator: its instruction and the positions of its loops, its variables, what it yields from.

    overs   of each of its active loops: what it runs over, if its position does not determine that
    """

    where: str
    place: list[int]
    variables: Named
    inner: Node
    overs: Nodes = []


class ExpressionNode(NumberedNode, frozen=True, gc=False, tag="e"):
    """A generator expression with one loop, which no loop runs over: its iterator says how far it has come."""

    where: str
    first: Node


class RandomNode(ObjectOfKind, frozen=True, gc=False, tag="g"):
    """torch's or Python's random generator: the state is in our form of it."""

    state: Any


class NumpyRandomNode(NumberedNode, frozen=True, gc=False, tag="h"):
    """numpy's random generator."""

    state: Node


# Tensors and what holds them.


class TensorNode(NumberedNode, frozen=True, gc=False, tag="T"):
    """A small tensor: see values/tensors.py."""

    dtype: str
    shape: list[int]
    layout: Any  # [stride, offset, bytes of the storage], None: all of its storage, False: a small part of a large one
    contents: bytes | list[int] | int  # or [index of a blob], or the number of the tensor that came with the storage
    flags: int
    device: str
    place: list[Any] | None = None
    gradient: bytes | bool | None = None  # of a leaf; False: it has another form


class WeightNode(AnyNode, frozen=True, gc=False, tag="w"):
    """What an optimizer updates."""

    index: int
    dtype: str
    shape: list[int]
    stride: list[int]
    offset: int | None
    is_itself: bool
    is_computed: bool


class ChangedDataNode(NumberedNode, frozen=True, gc=False, tag="E"):
    """A large tensor or array that was changed since the boundary before: see values/large.py."""

    dtype: str
    shape: list[int]
    blob: int
    first: Number


class ShardedNode(NumberedNode, frozen=True, gc=False, tag="x"):
    """A tensor that is sharded over the ranks: see values/tensors.py."""

    local: Node
    layout: list[Any]
    is_computed: bool


class ArrayNode(NumberedNode, frozen=True, gc=False, tag="n"):
    """A small numpy array: see values/arrays.py."""

    dtype: str
    shape: list[int]
    content: bytes
    order: str
    base: Node
    place: list[Any] | None


class ObjectArrayNode(NumberedNode, frozen=True, gc=False, tag="a"):
    """A numpy array of objects."""

    shape: list[int]
    items: Nodes


class ModuleNode(ObjectOfKind, frozen=True, gc=False, tag="m"):
    """A module with all its parts: see values/modules.py."""

    description: bytes  # a packed ModuleDescription
    attributes: dict[str, Named]  # those that move, by the path of the part
    first_blob: int


class WrapperNode(ObjectOfKind, frozen=True, gc=False, tag="X"):
    """A module that wraps another one for the time of the run, with `training` and what else it holds."""

    training: bool
    own: dict[str, Node]  # the replay's
    wrapped: Node


class OptimizerNode(ObjectOfKind, frozen=True, gc=False, tag="O"):
    """Hyper-parameters of each group, how many parameters it is shown of each (None: not the group), and attributes."""

    groups: Groups
    shown: list[int | None]
    attributes: Named


def _kinds(base: type[AnyNode]) -> list[type[AnyNode]]:
    return [kind for derived in base.__subclasses__() for kind in _kinds(derived) or [derived]]


# msgspec allows one type like a str in a union: bytes are a `PlainNode`.
Node: TypeAlias = Union[(bool, int, float, str, *_kinds(AnyNode), None)]  # type: ignore[valid-type]
_PARTS = {part.value: part for part in Part}
PARTS: dict[type[AnyNode], dict[str, Part]] = {
    kind: {
        name: _PARTS[what]
        for base in reversed(kind.__mro__)
        for name, what in vars(base).get("__annotations__", {}).items()
        if what in _PARTS
    }
    for kind in _kinds(AnyNode)
}
