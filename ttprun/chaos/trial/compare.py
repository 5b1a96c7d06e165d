"""What differs between two runs: files that they left, lines that ranks printed, and what was noted in them.

A file of torch.save is compared by what is in it, since two archives of the same tensors differ in their bytes. Nothing
is unpickled but what torch loads with weights_only. Begin with `compare_runs`,
and with `compare` for runs that were observed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ttprun.chaos.trial.twins import Twin
from ttprun.errors import ConfigError
from ttprun.observe.run_directory import Links, Trace, read_trace

WITHOUT_LOSS = ("reconnect", "rerun", "replace")
_CHUNK_BYTES = 1 << 20
_SHOWN = 120
Kinds = tuple[str, str]
Moment = tuple[str, int]  # phase, step
Output = Mapping[int, Sequence[str]]
TWINS: Kinds = ("disturbed", "undisturbed")


@dataclass(frozen=True)
class OutputComparison:
    """One thing that was compared.

    what    a file's name, or "output of rank 1"
    how     "tensors", "bytes" or "lines"
    detail  the digest, or how it differs
    """

    what: str
    how: str
    is_identical: bool
    detail: str


def compare_runs(
    names: Iterable[str], folders: tuple[Path, Path], outputs: tuple[Output, Output], kinds: Kinds = TWINS
) -> list[OutputComparison]:
    """Compare what two runs have left, the disturbed one, if one is, first.

    names     of files in both folders
    outputs   by rank, the lines that it printed; {}: they are not compared
    kinds     what both runs are called in a sentence
    """
    comparisons = [compare_files(name, *folders, kinds) for name in names]
    for rank in sorted(outputs[0].keys() | outputs[1].keys()):
        comparisons.append(compare_lines(rank, outputs[0].get(rank, []), outputs[1].get(rank, []), kinds))
    return comparisons


def compare_files(name: str, disturbed: Path, undisturbed: Path, kinds: Kinds = TWINS) -> OutputComparison:
    """Compare one file of both twins, or of two other runs.

    name                     relative to each run's folder
    disturbed, undisturbed   these folders
    kinds                    what both runs are called in a sentence, in this order
    """
    paths = (disturbed / name, undisturbed / name)
    missing = [kind for kind, path in zip(kinds, paths, strict=True) if not path.is_file()]
    if missing:
        return OutputComparison(name, "bytes", False, f"the {' and the '.join(missing)} run did not write it")
    digests = [digest_of(path) for path in paths]
    (how, first), (other_how, second) = digests
    if how != other_how:
        return OutputComparison(name, "bytes", False, "one is a file of torch.save, the other is not")
    if first == second:
        return OutputComparison(name, how, True, first[:16])
    return OutputComparison(name, how, False, f"{first[:16]} {kinds[0]}, {second[:16]} {kinds[1]}")


def digest_of(path: Path) -> tuple[str, str]:
    """How a file is compared, and the SHA-256: of its tensors if torch can load it safely, else of its bytes."""
    if zipfile.is_zipfile(path):
        import torch

        from ttprun.chaos.step_digests import feed

        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # not torch's, or holding more than weights_only lets in
            pass
        else:
            digest = hashlib.sha256()
            feed(digest, content)
            return "tensors", digest.hexdigest()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return "bytes", digest.hexdigest()


def compare_lines(
    rank: int, disturbed: Iterable[str], undisturbed: Iterable[str], kinds: Kinds = TWINS
) -> OutputComparison:
    """Compare what one rank printed, line by line, up to the first line that differs.

    disturbed, undisturbed   its lines in both runs
    kinds                    what both runs are called in a sentence, in this order
    """
    what = f"output of rank {rank}"
    number = 0
    for number, (got, expected) in enumerate(zip_longest(disturbed, undisturbed), 1):
        if got != expected:
            detail = f"line {number}: {_describe(got)}, {kinds[1]} {_describe(expected)}"
            return OutputComparison(what, "lines", False, detail)
    return OutputComparison(what, "lines", True, f"{number} lines")


def _describe(line: str | None) -> str:
    return "no line" if line is None else repr(line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "...")


# What the ranks of a checked run have noted (chaos/strikes.py), and where two runs differ in it.


_NUMBER = re.compile(r"[0-9a-f]*\d[0-9a-f]*")
_DIGEST = re.compile(r" ?[0-9a-f]{32}$")
STATE = {"weights or optimizer state": "pw", "random numbers": "o"}  # what counts -> its links
TRACE = "trace"  # the file of it among a run's notes


@dataclass
class OfRank:
    """What one rank has noted.

    moments   that it has come to
    links     step -> digests of it, see LINKS
    record    the last one, (head, blobs); None if it has not come to its last step, or is not recorded
    values    of each step: what its optimizer works with, by words for it (plain_observer)
    """

    moments: set[Moment] = field(default_factory=set)
    links: dict[int, Links] = field(default_factory=dict)
    record: tuple[bytes, bytes] | None = None
    values: list[dict[str, str]] = field(default_factory=list)


Notes = dict[int, OfRank]


def read_notes(folder: Path) -> Notes:
    """All ranks' notes; of a step that a rank has taken twice, the later ones."""
    notes: Notes = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        rank = OfRank()
        for line in path.read_text(encoding="utf-8").splitlines():
            note: dict[str, Any] = json.loads(line)
            rank.moments.add((note["moment"], note["step"]))
        head, blobs = path.with_suffix(".head"), path.with_suffix(".blobs")
        if head.exists() and blobs.exists():
            rank.record = head.read_bytes(), blobs.read_bytes()
        notes[int(path.stem.removeprefix("rank"))] = rank
    with contextlib.suppress(ConfigError):  # no rank has taken a step
        for number, links in read_trace(folder / TRACE).steps.items():
            notes.setdefault(number, OfRank()).links = links
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
        traces = Trace({rank: expected.links}), Trace({rank: got.links})
        for what, letters in STATE.items():
            first = min((each.step for each in trace_differences(*traces, letters)), default=None)
            if first is not None:
                chain = trace_differences(*traces)[0]
                detail = f"after step {first - 1} (in step {chain.step}: {chain.why})"
                differences.append(RunDifference(first, f"{what} of rank {rank}", detail))
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
    from ttprun.capture.records.packing import Record
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


@dataclass(frozen=True)
class Trial:
    """A launch that has ended.

    kept      where its copy of the working folder is now
    changed   names of the files that it has written there
    as_users  turns paths of the copy in a message into the user's own
    """

    twin: Twin
    notes: Notes
    kept: Path
    changed: list[str]
    as_users: Callable[[str], str]

    @property
    def protection(self) -> str:
        """As in the status; "" if there is none."""
        return self.twin.status.protection if self.twin.status is not None else ""

    @property
    def protection_kind(self) -> str:
        """The kind of the reason for it; "" if there is none."""
        return self.twin.status.protection_kind if self.twin.status is not None else ""

    def says(self, text: str) -> bool:
        """Whether its status says this of its protection, or of what is not proved."""
        status = self.twin.status
        return status is not None and any(text in said for said in (status.protection, *status.not_proved))


def compare(disturbed: Trial, undisturbed: Trial) -> list[RunDifference]:
    """How all that two trials have left differs; a run that was begun again has said and written things twice."""
    by_step = differences_by_step(disturbed.notes, undisturbed.notes)
    status = disturbed.twin.status
    is_whole = disturbed.twin.exit_code == 0 and status is not None
    if not is_whole or status is None or any(incident.rung not in WITHOUT_LOSS for incident in status.incidents):
        return by_step
    variables = differing_variables(disturbed.notes, undisturbed.notes)
    at_end = [replace(difference, detail=undisturbed.as_users(difference.detail)) for difference in variables]
    return by_step + at_end + _compare_what_is_left(disturbed, undisturbed)


def compare_with_torchrun(trial: Trial, by_torchrun: Trial) -> list[RunDifference]:
    """Whatever an undisturbed trial has other than one under torchrun, the earliest first."""
    differences = differing_values(trial.notes, by_torchrun.notes)
    codes = trial.twin.exit_code, by_torchrun.twin.exit_code
    if codes[0] != codes[1]:
        return [*differences, RunDifference(AT_END, "the exit code", f"at the end: {codes[0]} instead of {codes[1]}")]
    return differences + _compare_what_is_left(trial, by_torchrun, ("ttprun", "torchrun"))


def unlike(differences: Iterable[RunDifference], by_itself: Iterable[RunDifference]) -> list[RunDifference]:
    """The differences that a script does not have by itself. Names may hold a time or a pid, other ones each time.

    differences   between two runs that are to be alike
    by_itself     between two runs of the same kind, without faults
    """
    names = {_NUMBER.sub("", difference.what) for difference in by_itself}
    return [difference for difference in differences if _NUMBER.sub("", difference.what) not in names]


def _compare_what_is_left(trial: Trial, other: Trial, kinds: Kinds = TWINS) -> list[RunDifference]:
    """How files and output differ."""
    names = sorted({*trial.changed, *other.changed})
    compared = compare_runs(names, (trial.kept, other.kept), (trial.twin.output, other.twin.output), kinds)
    return [
        RunDifference(AT_END, output.what if output.how == "lines" else f"file {output.what}", output.detail)
        for output in compared
        if not output.is_identical
    ]


# Traces (chaos/step_digests.py): the first link of the chain of digests at which two runs differ, and of which kind.


# Letter of a link -> what follows if it is the first that differs; in the order in which the links come to be.
LINKS = {
    "o": "other random numbers than before: something draws more or fewer of them after the loss of step {before}",
    "p": "same gradients, other weights or optimizer state after step {before}: the optimizer's kernel or device",
    "n": "{here} batches/losses instead of {there}: {counted}",
    "q": "other random numbers {when}: an evaluation with dropout draws them, or another kind of sampler",
    "x": "other samples in the batch: {samples}",
    "b": "another batch{same}: the data, its augmentation, or the workers that load it",
    "w": "same weights after step {before}, other ones now: something else than the optimizer has changed them",
    "l": "same {batch}random numbers and weights, another loss ({loss}): {by_hand}kernel, device, or the model itself",
    "i": "same loss, other gradient{parts} before ranks reduce it: kernel or device",
    "g": "same loss, other gradient{parts} after the backward pass: kernel or device{reduction}",
    "c": "same gradients after the backward pass, other ones when the optimizer takes them: clipping or scaling",
    "h": "same gradients, other settings of the optimizer: learning rate, weight decay or the like",
}
_OWN_OF_RUN = ("parameters", "untouched")
_AT_FIRST = {
    "p": "other weights from the start: the seed by which they are made, or another checkpoint",
    "o": "other random numbers from the start: the seed",
    "w": "other weights from the start: the seed by which they are made, or another checkpoint",
}


@dataclass(frozen=True, order=True)
class LinkDifference:
    """Where the chain of a rank is another one for the first time.

    link   its place in LINKS
    why    what differs, and what it may come from
    """

    step: int
    link: int
    rank: int
    why: str = field(default="", compare=False)


def aligned(first: Trace, other: Trace) -> tuple[Trace, int]:
    """The second trace with the first one's numbers of steps, and by how many they are higher now.

    A script that resumes by itself counts from 0: its first step has the weights of a later one of the other run.
    """
    rank = min(first.steps.keys() & other.steps.keys(), default=None)
    if rank is None:
        return other, 0
    (here, begins), (there, expected) = (next(iter(trace.steps[rank].items())) for trace in (other, first))
    if here == there and begins.get("w") != expected.get("w"):
        at = next((step for step, links in first.steps[rank].items() if links.get("w") == begins.get("w")), here)
        return (other.later(at - here), at - here) if "w" in begins else (other, 0)
    return other, 0


def trace_differences(first: Trace, other: Trace, letters: Iterable[str] = LINKS) -> list[LinkDifference]:
    """The first link of each rank, of those with these letters, that is another one in `other`, the earliest first."""
    differences = []
    for rank in first.steps.keys() & other.steps.keys():
        expected, got = first.steps[rank], other.steps[rank]
        start = max(min(expected, default=0), min(got, default=0))
        for step in sorted(expected.keys() & got.keys()):
            if letter := _first_link(got[step], expected[step], step == start, letters):
                why = _why(letter, first, other, rank, step, step == start)
                differences.append(LinkDifference(step, [*LINKS].index(letter), rank, why))
                break
    return sorted(differences)


def _first_link(here: Links, there: Links, is_start: bool, letters: Iterable[str]) -> str:
    """The letter of the first link that differs, "" if none does.

    At the start another sampler, or another place in the data, comes before the random numbers that it draws.
    """
    differing = [each for each in letters if each in here and each in there and here[each] != there[each]]
    return "x" if is_start and differing[:1] == ["q"] and "x" in differing else "".join(differing[:1])


def _why(letter: str, first: Trace, other: Trace, rank: int, step: int, is_start: bool) -> str:
    """What has led to another link, as far as the traces show."""
    here, there = other.steps[rank][step], first.steps[rank][step]
    following = first.steps[rank].get(step + 1, {})
    samples = "the sampler: its kind, its seed or its epoch"
    if here.get("x") == following.get("x"):
        samples = f"those of step {step + 1}: a batch was left out"
    elif is_start and step:
        samples = "the order of the data after a resume"
    losses = [each.get("n", "/").rpartition("/")[2] for each in (here, there)]
    counted = "a batch was skipped, or an evaluation has another length" if losses[0] == losses[1] else "accumulation"
    names = first.settings_at(rank, step).get("parameters", [])
    parts = [there.get("G", "")[at : at + 4] != here.get("G", "")[at : at + 4] for at in range(0, 4 * len(names), 4)]
    differing = [name for name, differs in zip(names, parts, strict=True) if differs]
    text = (_AT_FIRST if is_start and letter in _AT_FIRST else LINKS)[letter].format(
        before=step - 1,
        here=here.get(letter),
        there=there.get(letter),
        counted=counted,
        samples=samples,
        when="before the batch is loaded" if "x" in here else "before the backward pass",
        same=" of the same samples" if "x" in here else "",
        batch="batch, " if "b" in here else "",
        by_hand="" if "b" in here else "a batch that no DataLoader has made, ",
        reduction=", or their reduction" if len(first.steps) > 1 else "",
        loss=f"{here.get('v')} instead of {there.get('v')}",
        parts=f" of {', '.join(differing)}" if differing else "",
    )
    return "; ".join([text, *differing_settings(first, other, rank, step)])


def differing_settings(first: Trace, other: Trace, rank: int, step: int) -> list[str]:
    """What was set otherwise in a step, "threads of torch: 4 instead of 1"."""
    there, here = first.settings_at(rank, step), other.settings_at(rank, step)
    both = [name for name in there if name in here and name not in _OWN_OF_RUN and there[name] != here[name]]
    return [f"{name}: {here[name]} instead of {there[name]}" for name in both]


def differing_samples(first: Trace, other: Trace) -> int | None:
    """Of traces of different numbers of ranks: the first step in which all ranks together train on other samples."""

    def together(trace: Trace, step: int) -> int:
        return sum(int(taken.get(step, {}).get("u", "0"), 16) for taken in trace.steps.values()) % (1 << 32)

    both = sorted({*first.steps[min(first.steps)]} & {*other.steps[min(other.steps)]})
    return next((step for step in both if together(first, step) != together(other, step)), None)
