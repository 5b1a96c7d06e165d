"""What the ranks of a checked run have noted (chaos/observer.py), and where two runs differ in it.

Begin with `read_notes`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttprun.chaos.check.plan import Moment

_DIGEST = re.compile(r" ?[0-9a-f]{32}$")
WEIGHTS, RANDOM = "weights or optimizer state", "random numbers"


@dataclass
class OfRank:
    """What one rank has noted.

    moments   that it has come to
    digests   boundary -> digests of what is trained, and of the random generators
    record    the last one, (head, blobs); None if it has not come to its last step, or is not recorded
    values    of each step: what its optimizer works with, by words for it (plain_observer)
    """

    moments: set[Moment] = field(default_factory=set)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    record: tuple[bytes, bytes] | None = None
    values: list[dict[str, str]] = field(default_factory=list)


Notes = dict[int, OfRank]


def read_notes(folder: Path) -> Notes:
    """All ranks' notes; of a boundary that a rank has passed twice, the later ones."""
    notes: Notes = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        rank = OfRank()
        for line in path.read_text(encoding="utf-8").splitlines():
            note: dict[str, Any] = json.loads(line)
            if "moment" in note:
                rank.moments.add((note["moment"], note["step"]))
            else:
                rank.digests[note["boundary"]] = {WEIGHTS: note["trained"], RANDOM: note["random"]}
        head, blobs = path.with_suffix(".head"), path.with_suffix(".blobs")
        if head.exists() and blobs.exists():
            rank.record = head.read_bytes(), blobs.read_bytes()
        notes[int(path.stem.removeprefix("rank"))] = rank
    for path in sorted(folder.glob("plain*.jsonl")):
        lines = path.read_text(encoding="utf-8").splitlines()
        notes.setdefault(int(path.stem.removeprefix("plain")), OfRank()).values = list(map(json.loads, lines))
    return notes


@dataclass(frozen=True, order=True)
class RunDifference:
    """Something that is not as in the undisturbed run.

    boundary   at which it was seen first; a large number: it was seen at the end
    what       "weights or optimizer state of rank 1", "file out/log.txt", "variable loss of train.py", ...
    """

    boundary: int
    what: str
    detail: str = field(default="", compare=False)


AT_END = 1 << 62


def differences_by_step(disturbed: Notes, undisturbed: Notes) -> list[RunDifference]:
    """The first boundary of each rank at which what it trains, or its random numbers, differ."""
    differences = []
    for rank, expected in undisturbed.items():
        got = disturbed.get(rank, OfRank())
        for what in (WEIGHTS, RANDOM):
            both = sorted(got.digests.keys() & expected.digests.keys())
            first = next((at for at in both if got.digests[at][what] != expected.digests[at][what]), None)
            if first is not None:
                differences.append(RunDifference(first, f"{what} of rank {rank}", f"after step {first - 1}"))
    return sorted(differences)


def differing_values(notes: Notes, by_torchrun: Notes) -> list[RunDifference]:
    """The first value in each rank that is another one than under torchrun, by the step after which it was noted."""
    differences = []
    for rank, expected in by_torchrun.items():
        for step, (here, there) in enumerate(zip(notes.get(rank, OfRank()).values, expected.values, strict=False)):
            what = next((what for what in {**there, **here} if here.get(what) != there.get(what)), None)
            if what is not None:
                detail = f"after step {step}: {_beside(here.get(what), there.get(what))}"
                differences.append(RunDifference(step + 1, f"{what} in rank {rank}", detail))
                break
    return sorted(differences)


def _beside(value: str | None, expected: str | None) -> str:
    """A noted value and torchrun's, for people: the digest of a tensor's elements means nothing to them."""
    shown, other = ("nothing" if text is None else _DIGEST.sub("", text) for text in (value, expected))
    return "other elements" if shown == other else f"{shown} instead of {other}"


def differing_variables(disturbed: Notes, undisturbed: Notes) -> list[RunDifference]:
    """The user's variables whose values differ in the ranks' last records."""
    from ttprun.capture.records.boundary_record import Record
    from ttprun.capture.values.trees import Comparison, Tree, is_by_history

    differences = []
    for rank, expected in undisturbed.items():
        got = disturbed.get(rank, OfRank())
        if expected.record is None or got.record is None:
            continue
        first, last = (Record.of(*record) for record in (expected.record, got.record))
        tree, twin = Tree(first.fields, first.blobs), Tree(last.fields, last.blobs)
        if first.fields.place != last.fields.place:
            differences.append(RunDifference(AT_END, f"place in the script of rank {rank}"))
            continue
        compared = Comparison(tree, twin)
        for (file, function, line), here, there in zip(first.fields.place, tree.variables, twin.variables, strict=True):
            for name in sorted(here.keys() | there.keys()):
                if is_by_history(here.get(name)) or is_by_history(there.get(name)):
                    continue
                if name not in here or name not in there or not compared.is_same(here[name], there[name]):
                    where = f"{file}:{line}" + ("" if function == "<module>" else f", {function}()")
                    differences.append(RunDifference(AT_END, f"variable '{name}' of rank {rank}", where))
    return differences
