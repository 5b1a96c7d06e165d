"""What differs between two runs: the files that they left, and the lines that their ranks printed.

A file of torch.save is compared by what is in it, since two archives of the same tensors differ in their bytes. Nothing
is unpickled but what torch loads with weights_only. Begin with `compare_runs`.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ttprun.chaos.faults import WITHOUT_INCIDENT

_CHUNK_BYTES = 1 << 20
_SHOWN = 120
Kinds = tuple[str, str]
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

        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # not torch's, or holding more than weights_only lets in
            pass
        else:
            digest = hashlib.sha256()
            _feed(digest, content)
            return "tensors", digest.hexdigest()
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return "bytes", digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Feed a value to the digest: types, shapes and elements, containers in their order."""
    import torch

    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {list(value.shape)} {value.layout}".encode())
        if value.layout is not torch.strided or value.is_quantized:
            _feed(digest, [value.to_dense() if not value.is_quantized else value.int_repr()])
            return
        flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        if flat.numel():
            elements: Any = flat.view(torch.uint8).numpy()
            digest.update(elements)
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)}".encode())
        for key, item in value.items():
            _feed(digest, key)
            _feed(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(f"{type(value).__name__} {value!r}".encode())


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


# Which fault came to what: each injection of a run's event log, paired with the incident that it caused.
#
# Pure. Times are those of the machine's monotonic clock, which ranks and agent share.


# What a fault without an incident comes to.
EFFECTS = {
    "standby-kill": "another standby was started",
    "stall": "the agent was late",
    "slow": "training went on, slower",
    "leave": "the rank left",
    "agent-kill": "the run ended",
    "preempt": "the run ended",
}
# A fault that only delays a rank has no effect if it is over before the rank is missed.
PASSING = ("stop", "sleep", "deadlock", "busy", "silent", "cut-off")
# Either end of a broken link may be the one that is missed.
_OF_LINKS = ("reset", "silent", "cut-off", "link")
# An incident is opened so soon, at most, after what opens it was written down.
_NEAR_S = 2.0


@dataclass(frozen=True)
class Injection:
    """One fault and what it came to.

    phase, step  where it struck; None for a signal from outside
    at_s         monotonic
    failure      why it was not caused, "" if it was
    effect       what it came to, in words, where that is no incident of its own
    incident     number of the incident that it opened, or into which it fell
    detect_s     from the strike until the agent knew
    recover_s    from the incident's first death to its end
    """

    number: int | None
    fault: str
    kind: str
    rank: int | None
    phase: str | None = None
    step: int | None = None
    at_s: float | None = None
    failure: str = ""
    effect: str = ""
    incident: int | None = None
    rung: str | None = None
    outcome: str | None = None
    detect_s: float | None = None
    recover_s: float | None = None

    @property
    def is_accounted_for(self) -> bool:
        """Whether it struck, and came to an incident or to what its kind comes to."""
        return not self.failure and (self.incident is not None or bool(self.effect))


def pair(events: Iterable[dict[str, Any]]) -> list[Injection]:
    """All injections of an event log, in their order, those that never struck at the end."""
    log = list(events)
    injections: list[Injection] = []
    armed: dict[int, dict[str, Any]] = {}
    for event in log:
        name = event["event"]
        if name == "fault_armed":
            armed[event["number"]] = event
        elif name == "fault_failed":
            armed.pop(event["number"], None)
            kind = event.get("kind") or str(event["fault"]).partition(":")[0]
            injections.append(Injection(event["number"], event["fault"], kind, event["rank"], failure=event["reason"]))
        elif name == "fault_injected":
            armed.pop(event["number"], None)
            injections.append(_follow(event, log))
    for event in armed.values():
        kind = str(event["fault"]).partition(":")[0]
        failure = "its moment never came"
        injections.append(Injection(event["number"], event["fault"], kind, event["rank"], failure=failure))
    return injections


def _follow(event: dict[str, Any], log: list[dict[str, Any]]) -> Injection:
    """What a strike came to: its process was lost or found to hang, a connection was found broken, or no incident."""
    kind, at_s = event["kind"], event["at_s"]
    struck = Injection(
        event["number"], event["fault"], kind, event["rank"], event["phase"], event["step"], event["at_s"]
    )
    if kind in WITHOUT_INCIDENT:
        return replace(struck, effect=EFFECTS[kind])
    after = [other for other in log if other.get("at_s", 0.0) >= at_s]
    noticed = _broken_link(event, after) if kind in _OF_LINKS else None
    if noticed is None:
        noticed = next((other for other in after if _is_loss(other) and other["pid"] == event["pid"]), None)
    if noticed is None and kind == "nan":
        named = (other for other in after if other["event"] == "nan_found" and other["rank"] in (event["rank"], None))
        noticed = next(named, None)
        effect = "" if noticed is None else f"reported in step {noticed['step']}; it reached the weights"
        return replace(struck, effect=effect, detect_s=None if noticed is None else noticed["at_s"] - at_s)
    incident = None if noticed is None else _incident_at(log, noticed)
    if noticed is None or incident is None:
        has_passed = kind in PASSING and "seconds=" in event["fault"]
        return replace(struck, effect="it ended before any rank was missed" if has_passed else "")
    return replace(
        struck,
        incident=incident["id"],
        rung=incident["rung"],
        outcome=incident["outcome"],
        detect_s=noticed["at_s"] - at_s,
        recover_s=incident["total_s"],
    )


def _is_loss(event: dict[str, Any]) -> bool:
    is_bad_exit = event["event"] == "rank_exited" and event["code"] != 0
    return is_bad_exit or event["event"] in ("rank_faulted", "rank_hung", "rank_killed")


def _broken_link(event: dict[str, Any], after: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The first sign of trouble after a link was broken and before the next fault: either of its ends may show it."""
    for other in after:
        if other["event"] == "fault_injected" and other["number"] != event["number"]:
            return None
        if _is_loss(other) or other["event"] in ("connection_broken", "stalled"):
            return other
    return None


def _incident_at(log: Sequence[dict[str, Any]], noticed: dict[str, Any]) -> dict[str, Any] | None:
    """The last word on the incident that was open when something was noticed, or was opened by it."""
    newest: dict[int, dict[str, Any]] = {}
    for event in log:
        if event["event"] == "incident":
            newest[event["id"]] = event
    for incident in newest.values():
        ends_s = float("inf") if incident["outcome"] == "open" else incident["at_s"]
        if incident["opened_at_s"] - _NEAR_S <= noticed["at_s"] <= ends_s:
            return incident
    return None
