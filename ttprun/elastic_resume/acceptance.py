"""A checkpoint of other ranks or other arguments: whether this run can resume from it, and what the user must know.

What the old ranks' records show is refused here, before anything is started; the ranks find the rest
(`ttprun.elastic_resume.adapted`). Begin with `adapted`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ttprun.agent.base.stored_states import Stored
from ttprun.capture.data.rest_of_epoch import CannotDistributeError, rest_of
from ttprun.capture.records.nodes import ActivationNode
from ttprun.capture.records.packing import BoundaryRecord, MalformedRecordError, Record
from ttprun.capture.values import Tree
from ttprun.capture.values.trees import Comparison
from ttprun.errors import ConfigError
from ttprun.state.files import InvalidCheckpointError

logger = logging.getLogger("ttprun")

_MOST_NAMES = 12


def adapted(stored: Stored, paths: Sequence[str], world_size: int, what_differs: str) -> Stored:
    """The checkpoint for a run of other ranks or arguments; warns about the differences from an uninterrupted run.

    paths         of the old ranks' own parts
    world_size    ranks of the new run
    what_differs  a phrase for the user

    Raises ConfigError if no rank could resume from it, and InvalidCheckpointError.
    """
    parts = [stored.rank_part(rank) for rank in range(len(paths))]
    firsts = [Tree(*_record(part["first"])) for part in parts]
    records = [_record(part["records"][-1]) for part in parts]
    lasts = [Tree(*record) for record in records]
    why_not = _why_not(records[0].fields)
    if why_not:
        raise ConfigError(
            f"checkpoint '{stored.place}' {what_differs}, and it cannot be adapted: {why_not}",
            "start as many ranks with the same arguments, or give --resume off to start anew",
        )
    names = sorted(
        {name for first, last in zip(firsts, lasts, strict=True) for name in _that_differ(first, last, lasts[0])}
    )
    logger.warning("%s", _warning(stored, len(paths), world_size, what_differs, names))
    return replace(stored, of_others=tuple(paths))


def _record(stored: Sequence[Any]) -> Record:
    _, head, blobs = stored
    try:
        return Record.of(head, blobs)
    except MalformedRecordError as error:
        raise InvalidCheckpointError(str(error)) from None


def _why_not(last: BoundaryRecord) -> str:
    if last.unfollowed:
        return "a loop around the optimizer step was not followed"
    for iterator in last.loaders:
        try:
            rest_of(iterator)
        except CannotDistributeError as error:
            where = iterator["name"][0].rpartition("|")[2].rpartition("/")[2]
            return f"the DataLoader of {where}: {error}"
    return ""


def _that_differ(first: Tree, last: Tree, other: Tree) -> Iterator[str]:
    """Variables that have changed in a rank since its first step, and differ from another rank's."""
    changes, difference = Comparison(first, last), Comparison(other, last)
    scopes = [*zip(first.variables, last.variables, other.variables, strict=False)]
    scopes += [
        (first.modules.get(name, {}), scope, other.modules.get(name, {})) for name, scope in last.modules.items()
    ]
    for of_first, of_last, of_other in scopes:
        for name, node in of_last.items():
            if name == "_" or name not in of_other or (name in of_first and changes.is_same(of_first[name], node)):
                continue
            if not difference.is_same(of_other[name], node) and not isinstance(node, ActivationNode):
                yield name


def _warning(stored: Stored, old: int, new: int, what_differs: str, names: Sequence[str]) -> str:
    parts = [
        f"checkpoint '{stored.place}' {what_differs}: all ranks run the set-up as it is now; weights, optimizer state, "
        "scheduler (with its learning rate), random states and data position come from the checkpoint"
    ]
    if old != new:
        parts.append(f"resumed on {new} rank{'s' * (new > 1)} from {old}: sums are rounded otherwise, so not bit-exact")
        parts.append(
            f"each rank takes the variables of the old rank that was like it at first, else of rank r mod {old}"
        )
        shown = ", ".join(names[:_MOST_NAMES]) + ("" if len(names) <= _MOST_NAMES else ", ...")
        if names:
            parts.append(f"which differed between the ranks in: {shown}")
    if new > old:
        parts.append(
            f"ranks {old} and above draw random numbers that are derived from those"
            if new > old + 1
            else f"rank {old} draws random numbers that are derived from those"
        )
    return "; ".join(parts)
