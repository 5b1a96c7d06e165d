"""What is written at a boundary, how it becomes bytes, and how these are read: nothing that is read is unpickled.

Nothing here can make another process run code: types and functions are recorded by name, and a name is only looked up
among what the process has loaded by itself.

A record's head is one `BoundaryRecord`, packed; the bytes of tensors follow it as blobs. Whatever is read is checked
against the types here. Fields with a default are not in older checkpoints. Begin with
`BoundaryRecord`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import msgpack
import msgspec

from ttprun.capture.records.nodes import AnyNode, FrozensetNode, Named, Node, PlainNode, TupleNode
from ttprun.introspect.safe_reads import (
    dictionary_of,
    dictionary_of_class,
    is_a,
    module_of_class,
    qualified_name_of_class,
)
from ttprun.protocol.reason import Reason

MAX_DEPTH = 100  # msgpack itself gives up at 511 lists in each other


class CannotRestoreError(RuntimeError):
    """The replacement's variables do not match the record; the message names the variable."""


MISSING = type("Missing", (), {"__repr__": lambda self: "<not set>"})()
SETTLED = frozenset({float, int, bool, str, type(None)})  # values that are their own nodes


def is_settled(node: Node) -> bool:
    """Whether a node is of a value that can never change, so that the same object always has the same node."""
    if not isinstance(node, AnyNode):
        return True
    if isinstance(node, TupleNode | FrozensetNode):
        return node.kind is None and all(map(is_settled, node.items))
    return isinstance(node, PlainNode) and node.kind != "class"  # one of the user's may be given attributes


def name_of(kind: Any) -> str:
    """A type's or function's name for `look_up`: "module:qualified name"."""
    if issubclass(type(kind), type):
        return f"{module_of_class(kind)}:{qualified_name_of_class(kind)}"
    return f"{kind.__module__}:{kind.__qualname__}"


def short_name(name: str) -> str:
    """The part of a name for messages."""
    return name.rpartition(":")[2]


def look_up(name: str) -> Any:
    """The object of a name from `name_of` in this process, MISSING if it is not loaded."""
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module, MISSING)
    for part in path.split("."):
        if is_a(value, type):
            value = dictionary_of_class(value).get(part, MISSING)
        else:
            value = (dictionary_of(value) or {}).get(part, MISSING)
        if value is MISSING:
            return MISSING
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
    return value


def _look_up_in_classes(name: str) -> Any:
    """A type that a class made in its body and that does not know it: `Item = NamedTuple("Item", ...)`."""
    module, _, own = name.partition(":")
    values = list(vars(sys.modules[module]).values()) if module in sys.modules else []
    matches = (
        dictionary_of_class(value).get(own)
        for value in values
        if is_a(value, type) and module_of_class(value) == module
    )
    return next((value for value in matches if is_a(value, type) and name_of(value) == name), MISSING)


def look_up_type(name: str, base: type) -> type | None:
    """A type that this process has loaded, if it is a subclass of `base`."""
    value = look_up(name)
    if value is MISSING:
        value = _look_up_in_classes(name)
    return value if isinstance(value, type) and issubclass(value, base) else None


class ModuleDescription(msgspec.Struct, frozen=True, gc=False):
    """What hardly ever changes of a module.

    modules     [path, type] of each part
    tensors     [path, shape] of each that no optimizer updates
    sharded     paths of those that are sharded
    frozen      of each parameter, whether it is learnt
    hooks       how many there are on each part, by kind, and on each parameter
    passing     paths of buffers that are not in a state_dict
    attributes  the settled ones, by the path of the part
    """

    modules: list[list[str]]
    tensors: list[tuple[str, list[int]]]
    sharded: list[str]
    frozen: list[bool]
    hooks: list[int]
    passing: list[str]
    attributes: dict[str, dict[str, Node]]


class MalformedRecordError(ValueError):
    """What was read is not what `pack` packs."""


_T = TypeVar("_T")
_RAW = (bytes, bytearray, memoryview)  # packed as they are; msgspec would make text of them
_node: msgspec.msgpack.Decoder[Node] = msgspec.msgpack.Decoder(Node)
_named = msgspec.msgpack.Decoder(dict[str, Node])
_description = msgspec.msgpack.Decoder(ModuleDescription)


def _plain(value: Any) -> Any:
    """A text or number of a subclass, which msgspec does not know."""
    for base, plain in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if issubclass(type(value), base):
            return plain(value)
    raise TypeError(f"a {type(value).__qualname__} cannot be packed")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def pack(record: Any) -> bytes:
    """A record or a part of one as bytes, also with integers beyond 64 bits and str with lone surrogates."""
    try:
        return _encoder.encode(record)
    except (UnicodeEncodeError, OverflowError):
        plain = _without_big(msgspec.to_builtins(record, builtin_types=_RAW, enc_hook=_plain))
        packed: bytes = msgpack.packb(plain, unicode_errors="surrogatepass")
        return packed


def unpack_as(decoder: msgspec.msgpack.Decoder[_T], packed: bytes | bytearray | memoryview) -> _T:
    """What `pack` has packed, checked against a decoder's type. Raises MalformedRecordError."""
    try:
        try:
            return decoder.decode(packed)
        except UnicodeDecodeError:
            unpacked = msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")
            return msgspec.convert(unpacked, decoder.type, builtin_types=(bytes,))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise MalformedRecordError(f"a record is not what ttprun writes: {error}") from None


def unpack_node(packed: bytes) -> Node:
    """One node. Raises MalformedRecordError."""
    return unpack_as(_node, packed)


def unpack_named(packed: bytes) -> Named:
    """Nodes by name. Raises MalformedRecordError."""
    return unpack_as(_named, packed)


def unpack_description(packed: bytes) -> ModuleDescription:
    """A module's. Raises MalformedRecordError."""
    return unpack_as(_description, packed)


def listed(items: list[Node] | bytes) -> list[Node]:
    """A container's nodes, which may be packed one after the other. Raises MalformedRecordError."""
    if isinstance(items, list):
        return items
    unpacker = msgpack.Unpacker(
        strict_map_key=False, unicode_errors="surrogatepass", max_buffer_size=max(1, len(items))
    )
    unpacker.feed(items)
    try:
        return msgspec.convert(list(unpacker), list[Node], builtin_types=(bytes,))
    except (msgspec.MsgspecError, ValueError) as error:
        raise MalformedRecordError(f"a record is not what ttprun writes: {error}") from None


def _without_big(node: Any) -> Any:
    if node.__class__ is int:
        return node if -(1 << 63) <= node < 1 << 64 else ["p", "int", [hex(node)]]  # a PlainNode
    if isinstance(node, list | tuple):
        return [_without_big(item) for item in node]
    if isinstance(node, dict):
        return {key: _without_big(item) for key, item in node.items()}
    return node


RngState = dict[str, Any]
Scope = dict[str, Node]  # name -> node


class LoopRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An active followed loop.

    site        its place in the script: file:line:column
    position    items yielded so far
    lead        items yielded before the first boundary inside was reached; 0 before that
    began_with  states of the random generators before what it runs over was evaluated
    item_rng    the same when the current item was yielded, if it is around another loop
    current     the item, if it is plain
    bounds      (start, stop, step) if it runs over a range
    is_inside   the step is taken while the next item is made
    over        what it runs over, if its position does not determine that
    earlier     see position/loops.py
    """

    site: str
    position: int
    lead: int
    began_with: RngState | None
    item_rng: RngState | None
    current: Any
    bounds: list[int] | None
    is_inside: bool
    over: Node = None
    earlier: int = 0


class PassRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a pass of a `while` loop began in which the script has made an optimizer: a replay begins with that pass.

    site    of the loop: file:line:column
    state   the ScriptState there, packed
    blobs   its blobs
    rng     states of the global random generators there
    """

    site: str
    state: bytes
    blobs: list[bytes]
    rng: RngState


class ScriptState(msgspec.Struct, frozen=True, kw_only=True):
    """The variables of the script, at a boundary or between two.

    place       [file, function, line] of each of the user's frames, outermost first
    variables   of each of these frames
    loops       of each of these frames, its active loops, outermost first
    modules     the variables of each module of the user's, but for those among the frames
    optimizers  their nodes, in the order in which they were made
    stepped     of each optimizer: numbers of its parameters and of its state tensors
    blobs       bytes of each
    returned    the result of the step's closure
    dead        of each frame: names of its variables that are set before they are read
    """

    place: list[list[Any]]
    variables: list[Scope]
    loops: list[list[LoopRecord]]
    modules: dict[str, Scope]
    optimizers: list[Node]
    stepped: list[list[int]]
    blobs: list[int]
    returned: Node = None
    dead: list[list[str]] = []

    def frames(self) -> Iterator[tuple[list[Any], Scope, list[str]]]:
        """(place, variables, names of the dead ones) of each of the user's frames, outermost first."""
        return zip(self.place, self.variables, self.dead or [[]] * len(self.place), strict=True)


class BoundaryRecord(ScriptState, frozen=True, kw_only=True):
    """All that is written at a boundary, beside the blobs.

    boundary         its number
    unfollowed       why no replay can come here, and the kind of that reason; "" if one may
    generator_loops  active loops in suspended generators of the user's
    rng              states of the global random generators
    loaders          of each iterator over a DataLoader in use: see data/loaders.py
    loaders_made     how many loaders were made at each place of the script
    groups_made      how many process groups of each name and ranks were made
    results          of the small collectives of the step that ends here: see groups/results.py
    rebuilt          of each wrapped model, whether it has rebuilt its buckets
    files            [path, bytes written] of each file that is open for writing
    at_ns            the time, as the kernel notes it in files
    has_steps        the loops inside of which a step was ever taken
    weights          a hash of samples of the weights; b"" if they are sharded
    held             the same of what may differ between ranks, see tensors/holdings.py
    kept             copies of the weights are made after each step
    entropy          how often the script has drawn from os.urandom in the step
    is_straight      a replay goes directly here: nothing earlier is used
    named            what can change and is not recorded
    is_draining      batches of an ended loader are trained on
    stepping         number of the optimizer that is about to step; None: it is not known
    is_before_step   the optimizer communicates inside step(): the boundary lies before the step, not after it
    passes           of the `while` loops around the step whose passes make optimizers, outermost first
    """

    boundary: int
    unfollowed: str
    unfollowed_kind: str = "loop-not-followed"
    generator_loops: list[LoopRecord]
    rng: RngState
    loaders: list[dict[str, Any]]
    results: list[tuple[int, str, list[bytes]]]
    rebuilt: list[bool]
    files: list[list[Any]]
    at_ns: int
    has_steps: list[str]
    weights: bytes
    kept: bool
    entropy: int
    is_straight: bool = False
    named: list[Reason] = []
    loaders_made: dict[str, int] = {}
    groups_made: dict[str, int] = {}
    held: bytes = b""
    is_draining: bool = False
    stepping: int | None = None
    is_before_step: bool = False
    passes: list[PassRecord] = []

    def active(self) -> list[LoopRecord]:
        """All active loops, those of suspended generators last."""
        return [*(loop for of_frame in self.loops for loop in of_frame), *self.generator_loops]


class Outline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What the agent reads of a record; that of a framework has random states alone, and none of these."""

    weights: bytes = b""
    held: bytes = b""
    stepped: list[list[int]] = []


class Record(NamedTuple):
    """A record that was read from a recorder or a checkpoint.

    blobs   bytes of each
    """

    fields: BoundaryRecord
    blobs: list[memoryview]

    @classmethod
    def of(cls, head: bytes, blobs: bytes) -> Record:
        """Unpack a record as a recorder returns it.

        head    the packed plain part
        blobs   all of them, one after the other

        Raises MalformedRecordError.
        """
        fields = read_head(head)
        parts, at = [], 0
        for size in fields.blobs:
            parts.append(memoryview(blobs)[at : at + size])
            at += size
        return cls(fields, parts)


_decoder = msgspec.msgpack.Decoder(BoundaryRecord)
_decoder_of_outline = msgspec.msgpack.Decoder(Outline)
_decoder_of_state = msgspec.msgpack.Decoder(ScriptState)


def read_outline(head: bytes) -> Outline:
    """Of a record's packed part. Raises MalformedRecordError."""
    return unpack_as(_decoder_of_outline, head)


def read_head(head: bytes) -> BoundaryRecord:
    """The fields of a record's packed part. Raises MalformedRecordError."""
    return unpack_as(_decoder, head)


def read_state(packed: bytes) -> ScriptState:
    """The variables alone of what was packed, a record or a look between two. Raises MalformedRecordError."""
    return unpack_as(_decoder_of_state, packed)
