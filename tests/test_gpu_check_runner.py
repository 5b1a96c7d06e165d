"""The runner of gpu_check: order, limits, a report after each row, and parts that fail. No torch in it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
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

    def __init__(self, folder: Path, minutes: float = 1.0) -> None:
        self.path = folder / "report.md"
        self.place = Place("cpu", (), False, 2, folder)
        self.report = Report(self.path, {"device": "CPU"})
        self._ends_s = time.monotonic() + minutes * 60

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


def test_parts_run_in_their_order_and_all_of_them_are_in_the_report(checked: Checked) -> None:
    rows = checked.run(
        part("A", task("one"), task("two")), part("B", task("three"), is_alone=True), part("C", task("four"))
    )

    assert [row["what"] for row in rows] == ["one", "two", "three", "four"]
    assert checked.report.finish() == 0
    text = checked.path.read_text()
    assert text.index("## A. part A") < text.index("## B. part B") < text.index("## C. part C")
    assert "* all well: 0 failed, 4 passed, 0 facts and figures" in text


def test_a_task_that_raises_fails_and_the_others_are_still_tried(checked: Checked) -> None:
    def raises(_: float) -> Iterator[Row]:
        yield Row("first half", "ok", "well")
        raise ValueError("the second half is broken")

    rows = checked.run(part("A", Task("breaks", LONG_S, raises), task("next")), part("B", task("last")))

    assert [row["verdict"] for row in rows] == ["ok", "FAILED", "ok", "ok"]
    assert rows[1]["found"] == "ValueError: the second half is broken"
    assert checked.report.finish() == 1


def test_a_task_that_cannot_be_done_says_why_and_with_which_details(checked: Checked) -> None:
    def refused(_: float) -> Iterator[Row]:
        raise NotDoneError("under torchrun: exit code 1", ("rank 0: ValueError: no such layout",))
        yield

    (row,) = checked.run(part("A", Task("refused", LONG_S, refused)))

    assert (row["verdict"], row["found"]) == ("FAILED", "under torchrun: exit code 1")
    assert row["details"] == ["rank 0: ValueError: no such layout"]


def test_a_part_that_cannot_be_begun_fails_and_one_that_makes_no_sense_is_left_out(checked: Checked) -> None:
    def broken(place: Place) -> list[Task]:
        raise OSError("no such file")

    absent = Part("B", "graphs", LONG_S, False, lambda place: "graphs need a GPU")

    rows = checked.run(Part("A", "broken", LONG_S, False, broken), absent, part("C", task("last")))

    assert [(row["verdict"], row["found"]) for row in rows] == [
        ("FAILED", "could not be begun: OSError: no such file"),
        ("left out", "graphs need a GPU"),
        ("ok", "it was tried"),
    ]


def test_the_files_have_each_row_while_the_task_after_it_still_runs(checked: Checked) -> None:
    seen: list[int] = []

    def looks(_: float) -> Iterable[Row]:
        seen.append(len(checked.rows()))
        assert "| ok | one | it was tried |" in checked.path.read_text()
        return [Row("two", "ok", "it has looked")]

    checked.run(part("A", task("one")), part("B", Task("two", LONG_S, looks), is_alone=True))

    assert seen == [1]
    assert checked.rows()[1]["found"] == "it has looked"


def test_a_task_that_does_not_come_back_is_given_up_and_the_next_part_begins(
    checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.OVERTIME_S", 0.2)
    never = threading.Event()

    def hangs(_: float) -> Iterable[Row]:
        never.wait(LONG_S)
        return [Row("hangs", "ok", "too late")]

    rows = checked.run(part("A", Task("hangs", 0.1, hangs), task("one")), part("B", task("two")))
    never.set()

    assert [(row["what"], row["verdict"]) for row in rows] == [("hangs", "FAILED"), ("one", "ok"), ("two", "ok")]
    assert rows[0]["found"] == "it did not end within its limit"


def test_what_a_part_has_not_begun_in_its_time_has_failed(checked: Checked) -> None:
    def takes_long(limit_s: float) -> Iterable[Row]:
        time.sleep(limit_s)
        return [Row("one", "ok", f"had {limit_s:.1f} s")]

    rows = checked.run(part("A", Task("one", LONG_S, takes_long), task("two"), limit_s=0.3), part("B", task("three")))

    assert rows[0]["found"] == "had 0.3 s"
    assert (rows[1]["verdict"], rows[1]["found"]) == ("FAILED", "not begun: the time of its part is over")
    assert rows[2]["verdict"] == "ok"


def test_what_is_not_begun_when_all_time_is_over_has_failed(tmp_path: Path) -> None:
    checked = Checked(tmp_path, minutes=0.0)

    rows = checked.run(part("A", task("one")), part("B", task("two"), is_alone=True))

    assert {row["found"] for row in rows} == {"not begun: the check's time is over"}
    assert checked.report.finish() == 1


def test_parts_run_side_by_side_but_one_that_measures_times_runs_alone(checked: Checked) -> None:
    both_here = threading.Barrier(2, timeout=LONG_S)
    running: list[str] = []

    def meets(name: str) -> Task:
        def act(_: float) -> Iterable[Row]:
            running.append(name)
            both_here.wait()
            running.remove(name)
            return [Row(name, "ok", "both were at work")]

        return Task(name, LONG_S, act)

    alone = Task("alone", LONG_S, lambda _: [Row("alone", "ok", str(running))])

    rows = checked.run(part("A", meets("one")), part("B", meets("two")), part("C", alone, is_alone=True), beside=4)

    assert {row["found"] for row in rows[:2]} == {"both were at work"}
    assert rows[2]["found"] == "[]"


HANGING = """
import sys, time
sys.path[:0] = [{check!r}, {repository!r}]
import check
from parts import Part, Row, Task

def hangs(limit_s):
    yield Row("before it", "ok", "was seen")
    time.sleep(limit_s)

check.PARTS = (Part("A", "hangs", 60, False, lambda place: [Task("hangs", 60, hangs)]),)
sys.exit(check.main())
"""


def test_a_check_that_is_ended_leaves_a_report_of_what_was_seen(tmp_path: Path) -> None:
    path = tmp_path / "further" / "report.md"
    program = HANGING.format(check=str(CHECK), repository=str(CHECK.parents[1]))
    words = [sys.executable, "-c", program, "--device=cpu", "--report", str(path)]

    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("before it" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == 143

    assert "| ok | before it | was seen |" in path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["verdict"] == "not finished"
