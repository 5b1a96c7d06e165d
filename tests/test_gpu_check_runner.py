"""The runner of gpu_check: order, limits, a report after each row, and parts that fail. No torch in it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHECK = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check"
sys.path.insert(0, str(CHECK))

from parts import NotDoneError, Part, Place, Row, Task  # noqa: E402
from report import Report  # noqa: E402
from runner import Runner  # noqa: E402

LONG_S = 60.0


class Checked:
    """A check of some parts, in a folder; `run` returns its rows as the JSON has them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "report.md"
        self.place = Place("cpu", (), False, 2, folder)
        self.report = Report(self.path, {"device": "CPU"})
        self._ends_s = time.monotonic() + LONG_S

    def run(self, *parts: Part, beside: int = 1) -> list[dict[str, Any]]:
        Runner(self.report, self.place, self._ends_s, beside).run(parts)
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        return json.loads(self.path.with_suffix(".json").read_text())["rows"]


@pytest.fixture
def checked(tmp_path: Path) -> Checked:
    return Checked(tmp_path)


def part(letter: str, *tasks: Task, limit_s: float = LONG_S, is_alone: bool = False) -> Part:
    return Part(letter, f"part {letter}", limit_s, is_alone, lambda place: list(tasks))


def task(name: str, verdict: Any = "ok", limit_s: float = LONG_S) -> Task:
    return Task(name, limit_s, lambda _: [Row(name, verdict, "it was tried")])


def test_parts_run_in_their_order_whatever_becomes_of_one(checked: Checked) -> None:
    def raises(_: float) -> Iterator[Row]:
        yield Row("first half", "ok", "well")
        raise ValueError("the second half is broken")

    def refused(_: float) -> Iterator[Row]:
        raise NotDoneError("under torchrun: exit code 1", ("rank 0: ValueError: no such layout",))
        yield

    def broken(place: Place) -> list[Task]:
        raise OSError("no such file")

    rows = checked.run(
        part("A", Task("breaks", LONG_S, raises), Task("refused", LONG_S, refused), task("next")),
        Part("B", "broken", LONG_S, False, broken),
        Part("C", "graphs", LONG_S, False, lambda place: "graphs need a GPU"),
        part("D", task("last"), is_alone=True),
    )

    assert [(row["verdict"], row["found"]) for row in rows] == [
        ("FAILED", "could not be begun: OSError: no such file"),
        ("left out", "graphs need a GPU"),
        ("ok", "well"),
        ("FAILED", "ValueError: the second half is broken"),
        ("FAILED", "under torchrun: exit code 1"),
        ("ok", "it was tried"),
        ("ok", "it was tried"),
    ]
    assert rows[4]["details"] == ["rank 0: ValueError: no such layout"]
    assert checked.report.finish() == 1
