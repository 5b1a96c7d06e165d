"""Run the parts of a check in their order, side by side where nothing is measured, each within its limit.

The main thread alone keeps the report, so a row is in the file as soon as it is known. A task that fails, or does not
come back, costs itself. Begin with `Runner.run`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from parts import NotDoneError, Part, Place, Row, Task
from report import Report

OVERTIME_S = 15.0  # a task ends what it has started after its limit: so long is that waited for


@dataclass
class _Running:
    """A part at work.

    ends_s   monotonic; None until its first task begins
    """

    part: Part
    waiting: deque[Task]
    ends_s: float | None = None
    left: int = 0


@dataclass
class _Told:
    """What a thread says of its task: a row, or that the task is over (row None)."""

    running: _Running
    task: Task
    row: Row | None
    took_s: float = 0.0
    is_late: bool = field(default=False)


class Runner:
    """All parts.

    ends_s  monotonic: nothing runs longer
    beside  tasks that may run at once
    """

    def __init__(self, report: Report, place: Place, ends_s: float, beside: int) -> None:
        self._report, self._place, self._ends_s, self._beside = report, place, ends_s, beside
        self._told: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        self._open: dict[int, tuple[_Running, Task, float]] = {}

    def run(self, parts: Sequence[Part]) -> None:
        """Run all of them; what fails is in the report. Blocks until `ends_s` and some seconds at most."""
        for _, together in groupby(enumerate(parts), key=lambda item: item[0] if item[1].is_alone else "beside"):
            self._run_group([self._begin(part) for _, part in together])

    def _begin(self, part: Part) -> _Running:
        self._report.begin(part)
        try:
            tasks = part.tasks(self._place)
        except Exception as error:
            self._report.add(part, Row(part.title, "FAILED", f"could not be begun: {type(error).__name__}: {error}"))
            tasks = []
        if isinstance(tasks, str):
            self._report.add(part, Row(part.title, "left out", tasks))
            tasks = []
        return _Running(part, deque(tasks), left=len(tasks))

    def _run_group(self, group: list[_Running]) -> None:
        at_once = 1 if group[0].part.is_alone else self._beside
        while any(running.left for running in group):
            while len(self._open) < at_once and self._start_next(group):
                pass
            self._give_up_late_ones()
            if not self._open:
                continue
            try:
                self._hear(self._told.get(timeout=0.5))
            except queue.Empty:
                continue
            self._hear_all()

    def _start_next(self, group: list[_Running]) -> bool:
        """Start the next task of the first part that has one; False if none has."""
        running = next((candidate for candidate in group if candidate.waiting), None)
        if running is None:
            return False
        task, now_s = running.waiting.popleft(), time.monotonic()
        if running.ends_s is None:
            running.ends_s = now_s + running.part.limit_s * self._place.patience
        end_s = min(running.ends_s, self._ends_s)
        if now_s >= end_s:
            which = "the check's time" if self._ends_s <= running.ends_s else "the time of its part"
            self._report.add(running.part, Row(task.name, "FAILED", f"not begun: {which} is over"))
            self._end(running)
            return True
        limit_s = min(task.limit_s * self._place.patience, end_s - now_s)
        self._open[id(task)] = (running, task, now_s + limit_s + OVERTIME_S)
        threading.Thread(target=self._do, args=(running, task, limit_s), daemon=True).start()
        return True

    def _do(self, running: _Running, task: Task, limit_s: float) -> None:
        """In a thread of the task's own."""
        began_s = time.monotonic()
        try:
            for row in _rows(task, limit_s):
                self._told.put(_Told(running, task, row, time.monotonic() - began_s))
        finally:
            self._told.put(_Told(running, task, None))

    def _hear_all(self) -> None:
        while not self._told.empty():
            self._hear(self._told.get())

    def _hear(self, told: _Told) -> None:
        if id(told.task) not in self._open:
            return  # it was given up
        if told.row is not None:
            self._report.add(told.running.part, told.row, told.took_s)
            return
        del self._open[id(told.task)]
        self._end(told.running)

    def _give_up_late_ones(self) -> None:
        for key, (running, task, end_s) in list(self._open.items()):
            if time.monotonic() > end_s:
                del self._open[key]
                self._report.add(running.part, Row(task.name, "FAILED", "it did not end within its limit"))
                self._end(running)

    def _end(self, running: _Running) -> None:
        running.left -= 1
        if not running.left:
            self._report.end(running.part)


def _rows(task: Task, limit_s: float) -> Iterator[Row]:
    """The rows of a task; that it could not be done is one."""
    try:
        rows: Iterable[Row] = task.do(limit_s)
        yield from rows
    except NotDoneError as error:
        yield Row(task.name, "FAILED", str(error), error.details)
    except Exception as error:
        yield Row(task.name, "FAILED", f"{type(error).__name__}: {error}")
