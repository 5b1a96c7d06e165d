"""Where the script stands in a replay, compared with a record: code, loops, batches and optimizers."""

from __future__ import annotations

import gc
from types import FrameType
from typing import Any

from ttprun.capture.data import loaders
from ttprun.capture.host import Optimizers
from ttprun.capture.position import loops
from ttprun.capture.records.boundary_record import BoundaryRecord
from ttprun.introspect.frames import place, user_frames


def difference_of_place(record: BoundaryRecord, frame: FrameType, is_before_target: bool = False) -> str:
    """How the positions of the code and its loops differ from a record's, "" if they are the same.

    is_before_target   do not compare items of iterators that are about to be restored, such as a counting generator
    """
    frames = user_frames(frame)
    here = place(frames)
    if here != record.place:
        return f"it is at {_shown(here)}, the lost rank was at {_shown(record.place)}"
    for user_frame, recorded in zip(frames, record.loops, strict=True):
        active = loops.of_frame(user_frame)
        positions = [[loop.site.key, loop.position, loop.current] for loop in active]
        expected = [[loop.site, loop.position, loop.current] for loop in recorded]
        if is_before_target and len(active) == len(recorded):
            for at, loop in enumerate(recorded):
                if loop.over is not None:
                    expected[at][2] = positions[at][2]
        if positions != expected:
            return f"its loops are at {positions}, the lost rank's at {expected}"
    return ""


def difference_of_stepping(record: BoundaryRecord, number: int | None) -> str:
    """Another optimizer than in a record is about to step at the same place: e.g. several do in a hook of the backward.

    number   of the one that is about to step; None: it is not known
    """
    if None in (number, record.stepping) or number == record.stepping:
        return ""
    return f"optimizer {number} steps there, in the lost rank it was optimizer {record.stepping}"


def _shown(where: list[list[Any]]) -> str:
    return " > ".join(f"{function}:{line}" for _, function, line in where) or "(no user code)"


def difference_of_batches(record: BoundaryRecord, before: BoundaryRecord | None, is_target: bool) -> str:
    """How what the DataLoaders have yielded differs from a record, "" if it does not.

    before      where the replay began; None: from the top
    is_target   compare the batches, too, of loaders that were used since
    """
    mine, lost = _by_name(loaders.records()), _by_name(record.loaders)
    if len(mine) > len(lost):
        gc.collect()  # one that the script has dropped may be part of a cycle, which the lost rank had collected
        mine = _by_name(loaders.records())
    yielded, expected = ([[it["name"], it["yielded"]] for it in records] for records in (mine, lost))
    if [count for _, count in yielded] != [count for _, count in expected]:
        return f"its DataLoaders have yielded {yielded}, the lost rank's {expected}"
    used = {tuple(it["name"]): it["yielded"] for it in before.loaders} if before else {}
    if is_target and any(
        here["batch"] != there["batch"] and there["yielded"] != used.get(tuple(there["name"]))
        for here, there in zip(mine, lost, strict=True)
    ):
        return "a DataLoader has yielded another batch than in the lost rank"
    return ""


def difference_of_optimizers(record: BoundaryRecord, optimizers: Optimizers) -> str:
    """How the script's optimizers differ from a record's in their parameters, "" if they do not."""
    counts = [parameters for parameters, _ in optimizers.counts_now()]
    before = [parameters for parameters, _ in record.stepped]
    if len(counts) != len(before):
        return f"the script has made {len(counts)} optimizers in the replay, {len(before)} before"
    for index, (here, lost) in enumerate(zip(counts, before, strict=True)):
        if here != lost:
            return (
                f"optimizer {index} has {lost} parameters in the lost rank and {here} in the replay, which skips "
                "earlier steps: add parameters (add_param_group) before the first step"
            )
    return ""


def _by_name(iterators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted, independent of the order in which they were made."""
    return sorted(iterators, key=lambda it: (it["name"], it["yielded"]))
