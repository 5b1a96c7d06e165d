"""The order in which a variable is judged: this one place has it.

`ttprun explain` prints ORDER. Begin with `judge`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ttprun.capture.records.nodes import (
    ActivationNode,
    AnyNode,
    ClosedNode,
    DataNode,
    DataTreeNode,
    EffectNode,
    LongNode,
    Node,
    NotProvedNode,
    RefusedNode,
    SameNode,
)


@dataclass(frozen=True)
class Judgement:
    """One way to judge a variable, or a part of one.

    holds   whether it is judged so, of its node, and whether it is dead, if none before this one holds
    """

    name: str
    when: str
    follows: str
    holds: Callable[[AnyNode, bool], bool]


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
    lambda node, is_dead: (
        isinstance(node, DataNode | DataTreeNode | LongNode) or (isinstance(node, SameNode) and bool(node.what))
    ),
)
NO_STATE = Judgement(
    "no state by nature",
    "loggers, progress bars, locks, parsers, data that is read by index: they only have effects, or do not change",
    "only the type is compared; one that the replacement has not made is named with the incident",
    lambda node, is_dead: isinstance(node, SameNode | EffectNode | ClosedNode),
)
NAMED = Judgement(
    "not recordable",
    "what can change, and hides its state: generators of libraries, compressors, work of other threads, activations",
    "named at the first step, in the status and with each incident; refused where no loss would show a difference",
    lambda node, is_dead: isinstance(node, NotProvedNode | RefusedNode | ActivationNode),
)
RECORDED = Judgement(
    "recorded",
    "everything else: numbers, text, containers, objects, small tensors and arrays, iterators, generators, buffers",
    "written into the replacement; weights and optimizer state come from a rank that holds the same",
    lambda node, is_dead: True,
)
ORDER = (DEAD, UNCHANGED, NO_STATE, NAMED, RECORDED)


def judge(node: Node, is_dead: bool = False) -> Judgement:
    """How a value is judged, by its node; a scalar is its own node."""
    if not isinstance(node, AnyNode):
        return DEAD if is_dead else RECORDED
    return next(judgement for judgement in ORDER if judgement.holds(node, is_dead))
