"""Files that are read and queues that are filled: data comes from them once, and a replacement takes what is next."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import logging.handlers
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capture import user_values
from tests.capture.values.carrying import carry, is_refused, not_proved
from ttprun.capture.position import iterables, loops
from ttprun.capture.values import CannotRestoreError, Restore, Snapshot, pack, process_objects, unpack_named

LINES = [f"line {number}\n" for number in range(5000)]  # more than a buffer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("".join(LINES))
    with gzip.open(tmp_path / "text.gz", "wt") as packed:
        packed.writelines(LINES)
    return path


OPENED: dict[str, Callable[[Path], Any]] = {
    "text": lambda path: path.open(),
    "bytes": lambda path: path.open("rb"),
    "unbuffered": lambda path: path.open("rb", buffering=0),
    "compressed": lambda path: gzip.open(path.with_suffix(".gz"), "rt"),  # noqa: SIM115 - the test closes it
}


@pytest.mark.parametrize("kind", OPENED)
@pytest.mark.parametrize("read", [0, 3, 3000])
def test_a_file_is_read_on_where_the_lost_rank_had_read_to(text: Path, kind: str, read: int) -> None:
    with OPENED[kind](text) as lost, OPENED[kind](text) as here:
        for _ in range(read):
            lost.readline()
        here.readline()

        mismatches = carry({"data": lost}, {"data": here})

        assert mismatches == []
        assert here.readline() == lost.readline()


@pytest.mark.parametrize("read", [csv.reader, csv.DictReader])
def test_a_file_below_a_table_that_a_loop_reads_is_named_by_the_loop(text: Path, read: Callable[[Any], Any]) -> None:
    with text.open() as lost, text.open() as here:
        tables = [read(lost), read(here)]
        loop = loops.Loop(loops.Site("key", loops.Extent((7, 0), (7, 9), (8, 4), (8, 8))), None, tables[0])
        for table in tables:
            next(table)
        snapshot = Snapshot({}, iterables.followed([loop]))
        recorded = unpack_named(pack(snapshot.variables({"rows": tables[0], "file": lost})))
        restore = Restore([], is_comparing=True)

        restore.module({"rows": tables[1], "file": here}, recorded, "")

        assert restore.doubts == []


def test_two_names_for_one_file_stay_two_names_for_one_file(text: Path) -> None:
    with text.open() as lost, text.open() as one, text.open() as other:
        lost.readline()
        here = {"a": one, "b": other}

        assert carry({"a": lost, "b": lost}, here) == []
        assert here["a"] is here["b"]
        assert here["a"].readline() == LINES[1]


def test_a_file_whose_place_is_hidden_by_next_is_refused(text: Path) -> None:
    with text.open() as lost, text.open() as here:
        next(lost)
        next(here)

        assert is_refused({"data": lost}, {"data": here})


@pytest.mark.parametrize(
    "make",
    [lambda: csv.reader(io.StringIO("a\nb\n")), lambda: csv.DictReader(io.StringIO("a\nb\n"))],
    ids=["reader", "DictReader"],
)
def test_a_table_that_is_read_line_by_line_outside_of_a_loop_is_refused(make: Callable[[], Iterator[Any]]) -> None:
    lost, here = make(), make()
    next(lost)

    assert is_refused({"table": lost}, {"table": here})


def test_a_file_that_is_written_is_left_to_who_sees_to_those(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as lost, (tmp_path / "other").open("w") as here:
        lost.write("something")

        assert carry({"log": lost}, {"log": here}) == []


@pytest.mark.parametrize(("make", "text"), [(io.StringIO, "abc"), (io.BytesIO, b"abc")])
def test_a_file_in_memory_is_compared_by_what_it_holds_and_by_its_position(make: Any, text: Any) -> None:
    written, read = make(), make(text)
    written.write(text)
    read.read(1)

    assert carry({"report": make(text)}, {"report": make(text)}) == []
    assert is_refused({"report": written}, {"report": make()})
    assert is_refused({"report": read}, {"report": make(text)})


def test_a_file_in_memory_that_is_closed_holds_nothing() -> None:
    lost, here = io.BytesIO(b"abc"), io.BytesIO()
    lost.close()
    here.close()

    assert carry({"report": lost}, {"report": here}) == []


@pytest.fixture
def feeder() -> Iterator[None]:
    """A thread of the user's code lives."""
    is_over = threading.Event()
    thread = threading.Thread(target=user_values.wait_for, args=(is_over,), name="feeder")
    thread.start()
    yield
    is_over.set()
    thread.join()


@pytest.fixture
def known_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rank, where the table of patches is applied."""
    monkeypatch.setattr(queue.Queue, "get", process_objects.wrap_get(queue.Queue.get))
    monkeypatch.setattr(queue.Queue, "put", process_objects.wrap_put(queue.Queue.put))


def _used(writer: user_values.EventWriter) -> user_values.EventWriter:
    writer.add(("loss", 0.5))
    while not writer.thread.written:
        time.sleep(0.001)
    return writer


@pytest.mark.usefixtures("known_queues")
def test_a_thread_that_writes_what_it_is_given_is_an_effect() -> None:
    lost, here = _used(user_values.EventWriter()), _used(user_values.EventWriter())
    try:
        lost.add(("loss", object()))  # no other process could be sent it

        assert carry({"writer": lost, "step": 1}, {"writer": here, "step": 0}) == []

        assert not_proved({"writer": lost}) == []
        here.add("more")
        assert here.thread.is_alive()
    finally:
        lost.close()
        here.close()
    assert here.thread.lines == [("loss", 0.5), "more"]


@pytest.mark.usefixtures("known_queues")
def test_a_queue_from_which_the_main_thread_takes_what_a_thread_gives_is_refused() -> None:
    answers: queue.Queue[Any] = queue.Queue()
    lost = user_values.EventWriter(answers)
    try:
        lost.add(1)
        assert answers.get(timeout=60) == 1

        assert is_refused({"answers": answers}, {"answers": queue.Queue()})
        (named,) = not_proved({"thread": lost.thread})
        assert "it runs beside the main thread" in named
    finally:
        lost.close()


@pytest.mark.usefixtures("known_queues")
def test_the_queue_of_a_listener_of_logging_is_an_effect() -> None:
    records: queue.Queue[Any] = queue.Queue()
    listener = logging.handlers.QueueListener(records)
    listener.start()
    try:
        records.put(logging.makeLogRecord({"msg": "a"}))
        while not process_objects.goes_out(records):
            time.sleep(0.001)

        assert carry({"records": records, "listener": listener}, {"records": records, "listener": listener}) == []
    finally:
        listener.stop()


@pytest.mark.usefixtures("feeder")
@pytest.mark.parametrize("make", [queue.Queue, queue.LifoQueue, multiprocessing.Queue, multiprocessing.SimpleQueue])
def test_a_queue_is_refused_while_a_thread_of_the_script_may_fill_it(make: Callable[[], Any]) -> None:
    with pytest.raises(CannotRestoreError, match="ahead cannot be recorded: it is shared with the thread 'feeder'"):
        carry({"ahead": make()}, {"ahead": make()})


@pytest.mark.parametrize("is_worker", [False, True], ids=["of the script", "of a data loader"])
def test_a_queue_is_refused_while_a_process_of_the_script_may_fill_it_and_not_for_a_loaders_worker(
    is_worker: bool,
) -> None:
    is_over = multiprocessing.Event()
    process = multiprocessing.Process(target=user_values.wait_for, args=(is_over,), name="feeder")
    process.start()
    if is_worker:
        process_objects.is_worker(process)
    refused = pytest.raises(CannotRestoreError, match="shared with the process 'feeder'")
    try:
        with contextlib.nullcontext() if is_worker else refused:
            assert carry({"ahead": multiprocessing.Queue()}, {"ahead": multiprocessing.Queue()}) == []
    finally:
        is_over.set()
        process.join()


def test_threads_of_libraries_fill_no_queue_of_the_scripts() -> None:
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        assert carry({"own": queue.Queue()}, {"own": queue.Queue()}) == []
    finally:
        is_over.set()
        thread.join()
