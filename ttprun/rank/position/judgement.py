"""The kinds of nodes of a record, and the order in which a variable is judged: this one place has it.

`ttprun explain` prints ORDER. Begin with `judge`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Tag(enum.StrEnum):
    """Kinds of nodes."""

    SAME = "="  # reproduced by the replay and compared: [tag, type, what else must be equal]
    NOT_PROVED = "?"  # can change, and is not recorded: [tag, type, why]; see not_proved.py
    EFFECT = "~"  # only has effects outside; compared by type: [tag, type]
    REFUSED = "!"  # cannot be recorded: [tag, why]
    REFERENCE = "r"  # an object seen before: [tag, number]
    PLAIN = "p"  # an immutable value: [tag, kind, ...]; see plain.py
    LIST = "l"  # [tag, number, items], of other types than list also [..., type, attributes]
    TUPLE = "t"  # [tag, items], of other types than tuple also [..., type, attributes]
    SET = "s"  # [tag, number, items, type or None, attributes]
    FROZENSET = "f"  # as TUPLE
    DEQUE = "q"  # [tag, number, items, type, attributes, maximal length]
    DICT = "d"  # [tag, number, keys, values], of other types than dict also [..., type, attributes]
    STATE = "S"  # an object's state from an adapter: [tag, number, type, packed state, {attribute: node}]
    BYTES = "b"  # bytearray and array.array: [tag, number, type code, bytes]
    BUFFER = "B"  # io.StringIO, io.BytesIO: [tag, number, content, position]
    LONG = "L"  # a container too long to record: [tag, type, length, digest, number of the first object in it]
    CLOSED = "c"  # a file that is closed: [tag, type]
    FILE = "R"  # a file that is read: [tag, number, type, position]
    OBJECT = "o"  # [tag, number, type, {attribute: node}]
    VALUE_OBJECT = "v"  # a frozen dataclass: [tag, type, {field: node}]
    CLASS = "C"  # a class of the user's: [tag, number, name, {attribute: node}]
    FUNCTION = "F"  # with state: [tag, number, name, {free variable: node}, {attribute: node}, defaults]
    METHOD = "M"  # [tag, object, name]
    WEAK = "W"  # weakref.ref: [tag, node of what it refers to; None if that is gone]
    PARTIAL = "P"  # functools.partial: [tag, number, function, arguments, keywords]
    TENSOR = "T"  # see tensors.py
    WEIGHT = "w"  # what an optimizer updates: [tag, index, dtype, shape, stride, offset, is the parameter itself]
    DATA = "D"  # a large tensor or array that the replay reproduces: see large_data.py
    CHANGED_DATA = "E"  # one that was changed since the boundary before
    ACTIVATION = "A"  # a large tensor that depends on the weights: [tag, shape]
    SHARDED = "x"  # a tensor that is sharded over the ranks: see shards.py
    MODULE = "m"  # see modules.py
    ARRAY = "n"  # see arrays.py
    OBJECT_ARRAY = "a"
    RANDOM = "g"  # a random generator's state: [tag, number, kind, state]
    OPTIMIZER = "O"  # [tag, number, type, [{hyper-parameter: node}...], {attribute: node}]
    ITERATOR = "i"  # [tag, number, type, [arguments], state]
    SUSPENDED = "G"  # a generator: [tag, number, function, place, {variable: node}, yields from]


@dataclass(frozen=True)
class Judgement:
    """One way to judge a variable, or a part of one.

    holds   whether it is judged so, of its node, and whether it is dead, if none before this one holds
    """

    name: str
    when: str
    follows: str
    holds: Callable[[list[Any], bool], bool]


DEAD = Judgement(
    "dead",
    "the function sets it before it reads it, on every way from the step (a function that calls locals() has none)",
    "left as it is, and never a reason to refuse",
    lambda node, is_dead: is_dead,
)
UNCHANGED = Judgement(
    "unchanged",
    "large data, very long containers, and objects whose content shows only in a digest: the replay makes them again",
    "compared by digest; one that differs is named with the incident, and refused where no loss would show it",
    lambda node, is_dead: node[0] in (Tag.DATA, Tag.LONG) or (node[0] == Tag.SAME and bool(node[2])),
)
NO_STATE = Judgement(
    "no state by nature",
    "loggers, progress bars, locks, parsers, data that is read by index: they only have effects, or do not change",
    "only the type is compared",
    lambda node, is_dead: node[0] in (Tag.SAME, Tag.EFFECT, Tag.CLOSED),
)
NAMED = Judgement(
    "not recordable",
    "what can change, and hides its state: generators of libraries, compressors, work of other threads, activations",
    "named at the first step, in the status and with each incident; refused where no loss would show a difference",
    lambda node, is_dead: node[0] in (Tag.NOT_PROVED, Tag.REFUSED, Tag.ACTIVATION),
)
RECORDED = Judgement(
    "recorded",
    "everything else: numbers, text, containers, objects, small tensors and arrays, iterators, generators, buffers",
    "written into the replacement; weights and optimizer state come from a rank that holds the same",
    lambda node, is_dead: True,
)
ORDER = (DEAD, UNCHANGED, NO_STATE, NAMED, RECORDED)


def judge(node: Any, is_dead: bool = False) -> Judgement:
    """How a value is judged, by its node; a scalar is its own node."""
    if node.__class__ is not list:
        return DEAD if is_dead else RECORDED
    return next(one for one in ORDER if one.holds(node, is_dead))
