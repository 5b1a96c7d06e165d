"""Objects that can change, and can neither be recorded nor compared: named before a fault and with each incident.

A replacement has such an object as the script's setup has made it. named.py finds the names.
"""

from __future__ import annotations

from typing import Any

import torch

from ttprun.capture.records.nodes import EffectNode, NotProvedNode
from ttprun.capture.values.kept import Price
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.type_names import MISSING, name_of
from ttprun.introspect.looks import is_a

UNTOLD = "it can change, and does not show its state"
# What is trained, and where its data is: never left alone, nor what holds it.
_TRAINED = (
    torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    torch.amp.grad_scaler.GradScaler, torch.utils.data.DataLoader, torch.utils.data.Sampler,
)  # fmt: skip
# By the name of its type, what the walk over a variable that is left alone has taken: one digit, alike in most ranks.
taken_ms: dict[str, float] = {}


def record_not_proved(snapshot: Snapshot, value: Any, why: str = UNTOLD) -> NotProvedNode:
    """The node of an object of which only the type is known.

    why   completes the variable's name in a sentence: "it is nested too deep"
    """
    kind = name_of(type(value))
    snapshot.not_proved.append(kind)
    return NotProvedNode(kind, why)


def restore_by_type(restore: Restore, live: Any, node: NotProvedNode | EffectNode, name: str) -> Any:
    """Keep what the replay has made, if it has the same type."""
    if isinstance(node, EffectNode) and (live is MISSING or live is None):
        return restore.leave_out(live, node, name)
    if live is MISSING or name_of(type(live)) != node.kind:
        return restore.refuse(live, unlike(name, node.kind, live))
    return live


def leave_dearest(prices: list[Price], above_ns: int, least_ns: int) -> None:
    """Leave out of later records the variables, or attributes, that take most, until as much is saved.

    prices      of one walk
    above_ns    what it took too much
    least_ns    what takes less is recorded all the same
    """
    untrained, at = [], len(prices) - 1
    while at >= 0:
        price = prices[at]
        if is_a(price.value, _TRAINED) or any(is_a(met, _TRAINED) for met in price.met):
            at -= 1  # the next one is within it, if there is any
        else:
            untrained.append(price)
            at = price.first - 1
    for price in sorted(untrained, key=lambda price: -price.taken_ns):
        if above_ns <= 0 or price.taken_ns < least_ns:
            break
        above_ns -= price.taken_ns
        price.names.leave(price.name, type(price.value))
        taken_ms[name_of(type(price.value))] = float(f"{price.taken_ns / 1e6:.0e}")
