"""The report of a check: printed as it comes, and kept in a file in Markdown and one in JSON, which grow with it.

Both files are complete after each row, so a check that is ended, or a machine that is taken away, leaves what was seen.
Begin with `Report`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from parts import Part, Row

from ttprun import __version__


class Report:
    """What was found so far.

    path    of the Markdown; the JSON lies beside it
    facts   of the machine and its software, by name
    """

    def __init__(self, path: Path, facts: dict[str, str]) -> None:
        self._path, self._facts = path, facts
        self._began_s = time.monotonic()
        self._parts: dict[str, dict[str, Any]] = {}
        self._rows: list[tuple[Part, Row, float]] = []
        self._verdict = "not finished"
        for name, fact in facts.items():
            self.say(f"{name}: {fact}")

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, flush=True)

    def begin(self, part: Part) -> None:
        """A part begins."""
        self._parts[part.letter] = {"title": part.title, "began_s": self._now_s(), "ended_s": None}
        self._write()

    def end(self, part: Part) -> None:
        """All of a part's tasks are over."""
        self._parts[part.letter]["ended_s"] = self._now_s()
        self.say(f"-- {part.letter} {part.title}: over after {self._now_s():.0f} s of the check")
        self._write()

    def add(self, part: Part, row: Row, took_s: float = 0.0) -> None:
        """Something was tried or measured, and this came of it.

        took_s  since its task began
        """
        self._rows.append((part, row, took_s))
        self._write()  # before it is printed: who reads it may take the machine away
        self.say(f"{row.verdict:8} {part.letter} {row.what}: {row.found}")
        if row.verdict == "FAILED":
            for line in row.details:
                self.say(f"           {line}")

    def finish(self) -> int:
        """The end of it; returns the exit code. If nothing was tried, nothing has passed."""
        verdicts = [row.verdict for _, row, _ in self._rows]
        failed, passed, seen = (verdicts.count(verdict) for verdict in ("FAILED", "ok", "seen"))
        is_well = not failed and passed + seen > 0
        self._verdict = f"{'all well: ' if is_well else ''}{failed} failed, {passed} passed, {seen} facts and figures"
        self.say(self._verdict)
        self._write()
        self.say(f"the report: {self._path} and {self._path.with_suffix('.json')}")
        return int(not is_well)

    def _now_s(self) -> float:
        return round(time.monotonic() - self._began_s, 1)

    def _write(self) -> None:
        _replace(self._path, self._markdown())
        _replace(self._path.with_suffix(".json"), json.dumps(self._json(), indent=1, default=str) + "\n")

    def _markdown(self) -> str:
        lines = ["# ttprun on a device", "", f"* {self._verdict}, after {self._now_s():.0f} s"]
        lines += [f"* {name}: {fact}" for name, fact in self._facts.items()]
        for letter, times in self._parts.items():
            took = "" if times["ended_s"] is None else f" ({times['began_s']:.0f} to {times['ended_s']:.0f} s)"
            lines += ["", f"## {letter}. {times['title']}{took}", ""]
            rows = [(row, took_s) for part, row, took_s in self._rows if part.letter == letter]
            if rows:
                lines += ["| | what | found | s |", "| --- | --- | --- | --- |"]
            lines += [
                f"| {row.verdict} | {_cell(row.what)} | {_cell(row.found)} | {took_s:.0f} |" for row, took_s in rows
            ]
            for row, _ in rows:
                if row.details:
                    lines += ["", f"{row.what}:", "", *(f"    {line}" for line in row.details)]
        return "\n".join([*lines, ""])

    def _json(self) -> dict[str, Any]:
        rows = [
            {
                "part": part.letter,
                "what": row.what,
                "verdict": row.verdict,
                "found": row.found,
                "took_s": round(took_s, 1),
            }
            | {"details": row.details, "values": row.values}
            for part, row, took_s in self._rows
        ]
        return {"verdict": self._verdict, "facts": self._facts, "parts": self._parts, "rows": rows}


def facts_of(names: tuple[str, ...]) -> dict[str, str]:
    """When and where, with the versions of all that had a part in it.

    names   of the devices
    """
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "device": ", ".join(names) or "CPU",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": nccl,
        "Python": sys.version.split()[0],
        "ttprun": __version__,
    }


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never a part of it."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
