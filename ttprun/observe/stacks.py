"""Python stacks of all ranks of a node, for `ttprun stacks` and the page; the agent writes them to `stacks.json`.

Ranks that stand at the same place are one group, as people sort the output of py-spy by hand. Begin with `groups_of`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankStack:
    """Where one rank stands.

    step         steps that it has applied
    doing        what its main thread does, as far as the hooks know: computing, collective, waiting, ...
    operation    the newest collective; "none" before the first
    main         stack of the main thread, innermost frame first, without ttprun's own frames; "" if it was not had
    all_threads  as the interpreter wrote it
    """

    rank: int
    pid: int
    step: int
    doing: str
    operation: str
    main: str
    all_threads: str


@dataclass(frozen=True)
class StackReport:
    """The stacks of a node's ranks at one moment.

    number   counts the reports of a run
    at       when they were asked for, ISO 8601
    """

    number: int
    at: str
    ranks: tuple[RankStack, ...]

    def to_json(self) -> str:
        """One JSON document on one line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Group:
    """Ranks that stand at the same place.

    place   "step 12, waiting in allreduce"
    main    their stack; "" if it was not had
    """

    ranks: tuple[int, ...]
    place: str
    main: str


def groups_of(stacks: Iterable[RankStack]) -> tuple[Group, ...]:
    """Ranks by equal places, the likeliest cause first: who does not wait for the others, then the smallest group."""
    members: dict[tuple[bool, str, str], list[int]] = {}
    for stack in stacks:
        waits = stack.doing in ("collective", "waiting", "connecting")
        place = f"step {stack.step}, {stack.doing}" + (f" in {stack.operation}" if waits else "")
        members.setdefault((waits, place, stack.main), []).append(stack.rank)
    in_order = sorted(
        (waits, len(ranks), sorted(ranks), place, main) for (waits, place, main), ranks in members.items()
    )
    return tuple(Group(tuple(ranks), place, main) for _, _, ranks, place, main in in_order)


def read_stacks(path: Path) -> StackReport:
    """What was written last. Raises OSError if there is no such file, ValueError if it is something else."""
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return StackReport(raw["number"], raw["at"], tuple(RankStack(**rank) for rank in raw["ranks"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no stacks: {error}") from error
