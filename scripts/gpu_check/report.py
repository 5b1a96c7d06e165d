"""The report of a check: what is printed as it happens, and one file in Markdown at the end. Begin with `Report`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from error_texts import Text
from runs import print_table
from styles import Device, Result

from ttprun import __version__


class Report:
    """What was found so far.

    measured  what was measured, and the figure; a list of two texts each
    """

    def __init__(self) -> None:
        self.measured: list[list[str]] = []
        self._said: list[str] = []
        self._results: list[Result] = []
        self._texts: list[Text] = []
        self._passed: list[bool] = []

    def say(self, line: str) -> None:
        """Print a line, which the report holds too."""
        print(line, flush=True)
        self._said.append(line)

    def add(self, result: Result) -> None:
        """A style that was broken."""
        self._results.append(result)
        took = "" if result.took_s is None else f" in {result.took_s:.2f} s"
        same = "weights identical" if result.identical else "WEIGHTS NOT IDENTICAL"
        self.judge(str(result.trial), result.has_passed, f"{result.rung or 'no recovery'}{took}; {same}")
        for note in result.notes:
            self.say(f"        {note}")

    def add_text(self, text: Text) -> None:
        """An error that was caused."""
        self._texts.append(text)
        self.judge(text.cause, text.is_known, f"{text.text or 'no error'} -> {text.fault or 'not of the device'}")

    def leave_out(self, what: str, why: str) -> None:
        """Something was not tried."""
        self.say(f"-       {what}: left out, {why}")

    def judge(self, what: str, has_passed: bool, how: str) -> None:
        """Something was tried, and this came of it."""
        self._passed.append(has_passed)
        self.say(f"{'ok' if has_passed else 'FAILED':7} {what}: {how}")

    def finish(self, path: Path, device: Device) -> int:
        """Write the file; returns the exit code. With nothing tried nothing has passed."""
        if self.measured:
            print_table(self.measured)
        failed = self._passed.count(False)
        is_well = bool(self._passed) and not failed
        self.say("all well" if is_well else f"{failed} of {len(self._passed)} checks failed")
        tables = (
            ["broken ranks", "style | ranks | over | fault | answer | seconds | weights", *map(_row_of, self._results)],
            ["times", "what | median (least-greatest)", *map(" | ".join, self.measured)],
            ["errors", "cause | text | what ttprun takes it for", *map(_row_of_text, self._texts)],
        )
        lines = ["# ttprun on a device", "", *(f"* {name}: {value}" for name, value in _facts(device).items())]
        for title, head, *rows in tables:
            if rows:
                rule = " | ".join("---" for _ in head.split(" | "))
                lines += ["", f"## {title.capitalize()}", "", *(f"| {row} |" for row in (head, rule, *rows))]
        lines += ["", "## As it was printed", "", *(f"    {line}" for line in self._said), ""]
        path.write_text("\n".join(lines), encoding="utf-8")
        print(f"the report: {path}")
        return int(not is_well)


def _row_of(result: Result) -> str:
    trial = result.trial
    took = "-" if result.took_s is None else f"{result.took_s:.2f}"
    same = "identical" if result.identical else "not identical"
    cells = (trial.style, str(trial.ranks), trial.backend, trial.fault, result.rung or "-", took, same)
    return " | ".join(cells)


def _row_of_text(text: Text) -> str:
    shown = text.text.replace("|", "\\|") or "none was raised"
    return f"{text.cause} | {shown} | {text.fault or 'not an error of the device'}"


def _facts(device: Device) -> dict[str, str]:
    """When and where, with the versions of all that had a part in it."""
    import torch

    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": ", ".join(device.names) or "CPU",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "NCCL": nccl,
        "Python": sys.version.split()[0],
        "ttprun": __version__,
    }
