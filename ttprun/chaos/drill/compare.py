"""What differs between two runs: the files that they left, and the lines that their ranks printed.

A file of torch.save is compared by what is in it, since two archives of the same tensors differ in their bytes. Nothing
is unpickled but what torch loads with weights_only. Begin with `compare_runs`.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

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
    found = [compare_files(name, *folders, kinds) for name in names]
    for rank in sorted(outputs[0].keys() | outputs[1].keys()):
        found.append(compare_lines(rank, outputs[0].get(rank, []), outputs[1].get(rank, []), kinds))
    return found


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
