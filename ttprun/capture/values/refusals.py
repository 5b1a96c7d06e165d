"""The variables of a record that cannot be restored: each by its path, with what it is and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from ttprun.capture.position.judgement import DEAD, judge
from ttprun.capture.records.boundary_record import BoundaryRecord
from ttprun.capture.records.nodes import Node, RefusedNode
from ttprun.capture.values.snapshot import with_fixed
from ttprun.capture.values.trees import walk
from ttprun.protocol.reasons import not_recorded

MARK_OF_REFUSED = b"\x92\xa1!"  # a RefusedNode as `pack` packs it; a str of the user's may look alike


def refusals(record: BoundaryRecord) -> Iterator[tuple[str, bool]]:
    """Of each node of a record: (a sentence if its value cannot be restored, else ""; whether it must be)."""
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


def _below(node: Node, name: str, is_needed: bool) -> Iterator[tuple[str, bool]]:
    for part, where in walk(node, name):
        yield (not_recorded(where, part.why) if isinstance(part, RefusedNode) else ""), is_needed
