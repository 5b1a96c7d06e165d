"""Gaps of a record: what can be neither restored nor compared, each named by its path, with what to do.

An object that is not proved can change, and a replacement has it as the script's set-up has made it; it is named before
a fault and with each incident (`names_of`). An object that is refused cannot be restored at all (`refusals`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ttprun.capture.position.judgement import DEAD, judge
from ttprun.capture.records.nodes import EffectNode, Node, NotProvedNode, RefusedNode
from ttprun.capture.records.packing import MISSING, BoundaryRecord, name_of
from ttprun.capture.values.kept import TOO_DEAR, Price
from ttprun.capture.values.restore import Restore, unlike
from ttprun.capture.values.snapshot import Snapshot, with_fixed
from ttprun.capture.values.trees import walk
from ttprun.introspect.safe_reads import is_a
from ttprun.protocol.reason import Reason

# What is trained, and where its data is: never left alone, nor what holds it.
_TRAINED = (
    torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler,
    torch.amp.grad_scaler.GradScaler, torch.utils.data.DataLoader, torch.utils.data.Sampler,
)  # fmt: skip
# By the name of its type, what the walk over a variable that is left alone has taken: one digit, alike in most ranks.
taken_ms: dict[str, float] = {}


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


_MOST_NAMES = 20
_MOST_LETTERS = 100
_LEFT_ALONE = " ms a step to record; not recorded"
_known: tuple[list[str], list[Reason]] = ([], [])


def forget() -> None:
    """The run of the script is over."""
    global _known
    _known = ([], [])


def names_of(snapshot: Snapshot, scopes: Mapping[str, Mapping[str, Node]]) -> list[Reason]:
    """The parts of these variables that are not proved: "cache (sqlite3.Connection): it is in a file", in their order.

    snapshot   that has made the nodes
    scopes     by place ("train" for a function, "" for the script itself), nodes by variable
    """
    global _known
    if not snapshot.not_proved:
        return []
    if snapshot.not_proved != _known[0]:
        names = [
            shown
            for where, scope in scopes.items()
            for name, node in scope.items()
            for shown in _named(node, f"{where}: {name}" if where else name)
        ]
        names.sort(key=lambda name: name.kind != "dear-to-record")
        _known = (snapshot.not_proved, list(dict.fromkeys(names))[:_MOST_NAMES])
    return _known[1]


def _named(node: Node, name: str) -> Iterable[Reason]:
    for inner, where in walk(node, name):
        if isinstance(inner, NotProvedNode):
            where = where if len(where) <= _MOST_LETTERS else f"{where[:40]}...{where[-40:]}"
            about, why = "hidden-state", inner.why
            if why == TOO_DEAR:
                about, why = "dear-to-record", f"about {taken_ms[inner.kind]:g}{_LEFT_ALONE}"
            yield Reason(about, f"{where} ({inner.kind.removeprefix('builtins:').replace(':', '.')}): {why}")


MARK_OF_REFUSED = b"\x93\xa1!"  # a RefusedNode as `pack` packs it; a str of the user's may look alike


def refusals(record: BoundaryRecord) -> Iterator[tuple[Reason, bool]]:
    """Of each node of a record: (why its value cannot be restored, none if it can; whether it must be)."""
    for place, scope, dead in record.frames():
        for name, node in with_fixed(scope).items():
            if judge(node, name in dead) is not DEAD:
                yield from _below(node, f"{place[1]}: {name}", False)
    for module, scope in record.modules.items():
        for name, node in with_fixed(scope).items():
            yield from _below(node, f"{module}: {name}", False)
    for number, loop in enumerate(loop for of_frame in record.loops for loop in of_frame):
        yield from _below(loop.over, f"the iterable of loop {number + 1} around the step", True)
    for number, optimizer in enumerate(record.optimizers):
        yield from _below(optimizer, f"optimizer {number}", True)
    yield from _below(record.returned, "the closure's result", True)


def _below(node: Node, name: str, is_needed: bool) -> Iterator[tuple[Reason, bool]]:
    for part, where in walk(node, name):
        yield part.reason(where) if isinstance(part, RefusedNode) else Reason(), is_needed
