"""What a recorder gives away is all that a replay needs of it, and another one holds it just so."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import msgpack
import pytest
import torch
from msgspec import to_builtins

from tests.capture.records import record_of
from ttprun.capture.records.nodes import PlainNode
from ttprun.capture.records.packing import MalformedRecordError, Record, pack, read_head
from ttprun.capture.records.recorder import SLOTS, WORKER_ENTRY_BYTES, Recorder, RecordTooLargeError

SLOT_BYTES = 1 << 20
PLACE = (1, 0, 3, 40)


def empty() -> Recorder:
    return Recorder(Recorder.create(SLOT_BYTES), SLOT_BYTES)


def filled(up_to: int) -> Recorder:
    """Records of boundaries 1 to `up_to`, two results, a worker's state, and counts of a file."""
    recorder = empty()
    recorder.write_first(1, b"head 1", [])
    for boundary in range(1, up_to + 1):
        blobs = [torch.full((1000,), float(boundary)), torch.arange(boundary)]
        recorder.write(boundary, b"head %d" % boundary, blobs)
    recorder.append_log(b"first result")
    recorder.append_log(b"")
    recorder.append_log(b"third result")
    recorder.write_worker(PLACE, b"state of a worker")
    recorder.set_appended(12345, (6, 700, 80))
    return recorder


def written_and_killed_at_each_line(work: Callable[[Recorder], object]) -> Iterator[Recorder]:
    """A recorder as the work has left it, killed at its first line there, at its second, and so on; at last whole."""
    number, was_killed = 0, True
    while was_killed:
        number += 1
        recorder = filled(up_to=7)
        pid = os.fork()
        if not pid:
            _kill_at_line(number)
            work(recorder)
            os._exit(0)
        was_killed = os.waitpid(pid, 0)[1] == signal.SIGKILL
        yield recorder


def _kill_at_line(number: int) -> None:
    left = [number]

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename != sys.modules[Recorder.__module__].__file__:
            return None
        left[0] -= event == "line"
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def carried_over(recorder: Recorder, boundary: int) -> Recorder:
    """Another recorder that holds what this one has given away, by way of a file's bytes."""
    other = empty()
    other.restore(msgpack.unpackb(msgpack.packb(recorder.export(boundary)), strict_map_key=False))
    return other


def test_a_restored_recorder_answers_as_the_one_that_was_saved() -> None:
    saved = filled(up_to=7)

    restored = carried_over(saved, 7)

    assert [restored.read(boundary) for boundary in range(9)] == [saved.read(boundary) for boundary in range(9)]
    assert restored.read(7) is not None
    assert list(restored.read_log()) == [b"first result", b"", b"third result"]
    assert restored.read_worker(PLACE) == b"state of a worker"
    assert restored.appended(12345) == (6, 700, 80)
    assert restored.appended_keys() == [12345]


def test_a_restored_recorder_goes_on_where_the_saved_one_stood() -> None:
    restored = carried_over(filled(up_to=7), 7)

    restored.write(8, b"head 8", [torch.ones(3)])
    restored.append_log(b"fourth result")

    assert restored.read(8) is not None
    assert [boundary for boundary in range(10) if restored.read(boundary)] == [5, 6, 7, 8]
    assert list(restored.read_log())[-2:] == [b"third result", b"fourth result"]


def test_what_lies_behind_the_boundary_is_not_given_away() -> None:
    restored = carried_over(filled(up_to=7), 6)

    assert restored.read(7) is None
    assert [boundary for boundary in range(8) if restored.read(boundary)] == [4, 5, 6]


def test_the_first_boundary_has_no_records_before_it() -> None:
    restored = carried_over(filled(up_to=1), 1)

    assert [boundary for boundary in range(SLOTS + 1) if restored.read(boundary)] == [1]


@pytest.mark.parametrize("boundary", [0, 3, 8])
def test_a_boundary_without_a_record_cannot_be_given_away(boundary: int) -> None:
    with pytest.raises(KeyError):
        filled(up_to=7).export(boundary)


def test_an_empty_part_is_given_away_as_nothing_and_takes_no_memory() -> None:
    recorder = empty()
    recorder.write(1, b"head", [])

    exported = recorder.export(1)

    assert (exported["log"], exported["workers"], exported["appended"]) == ([], [], b"")
    assert len(msgpack.packb(exported)) < 200


def test_states_of_workers_are_given_away_without_the_room_between_them() -> None:
    recorder = filled(up_to=1)
    far = (3, 9, 15, 31)
    recorder.write_worker(far, b"state of the last worker")

    exported = recorder.export(1)

    assert sum(len(part) for _, part in exported["workers"]) <= 4 * WORKER_ENTRY_BYTES
    assert carried_over(recorder, 1).read_worker(far) == b"state of the last worker"


def test_a_record_that_does_not_fit_where_it_is_to_be_restored_is_refused() -> None:
    saved = empty()
    saved.write_first(1, b"head", [torch.zeros(SLOT_BYTES // 8)])
    saved.write(1, b"head", [torch.zeros(SLOT_BYTES // 8)])
    small = Recorder(Recorder.create(SLOT_BYTES // 4), SLOT_BYTES // 4)

    with pytest.raises(RecordTooLargeError, match="record_limit_mib"):
        small.restore(saved.export(1))


def test_the_first_record_is_kept_whatever_comes_after_it_and_is_given_away_too() -> None:
    recorder = empty()
    recorder.write_first(1, b"the first head", [torch.arange(3)])
    for boundary in range(1, 12):
        recorder.write(boundary, b"another", [torch.ones(5)])

    restored = carried_over(recorder, 11)

    expected = (1, b"the first head", torch.arange(3).numpy().tobytes())
    assert recorder.read_first() == restored.read_first() == expected
    assert [boundary for boundary in range(12) if restored.read(boundary)] == [8, 9, 10, 11]


def test_killed_at_any_line_of_a_record_it_is_whole_or_not_there_and_the_newest_ones_before_it_stay() -> None:
    blobs = [torch.full((1000,), 8.0), torch.arange(8)]
    before = filled(up_to=7)
    whole = filled(up_to=8).read(8)

    found = []
    for left in written_and_killed_at_each_line(lambda recorder: recorder.write(8, b"head 8", blobs)):
        assert [left.read(boundary) for boundary in (5, 6, 7)] == [before.read(boundary) for boundary in (5, 6, 7)]
        assert left.read(4) in (None, before.read(4))
        found.append((left.newest, left.read(8)))

    assert {*found} == {(7, None), (8, whole)}
    assert len(found) > 15


def test_killed_at_any_line_of_an_entry_of_the_log_those_before_it_stay() -> None:
    before = list(filled(up_to=7).read_log())

    logs = [list(left.read_log()) for left in written_and_killed_at_each_line(lambda one: one.append_log(b"fourth"))]

    assert all(log in (before, [*before, b"fourth"]) for log in logs)
    assert (logs[0], logs[-1]) == (before, [*before, b"fourth"])


def test_killed_at_any_line_of_a_worker_s_state_it_is_whole_or_not_there() -> None:
    states = [
        left.read_worker(PLACE)
        for left in written_and_killed_at_each_line(lambda recorder: recorder.write_worker(PLACE, b"newer state"))
    ]

    assert {*states} == {b"state of a worker", None, b"newer state"}


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"\xc1", "malformed"),
        (b"\x81\xa5place", "truncated"),
        (msgpack.packb({"boundary": 3}), "missing required field `place`"),
        (msgpack.packb(to_builtins(record_of(3)) | {"files": "two"}), r"Expected `array`, got `str` - at `\$\.files`"),
        (msgpack.packb([1, 2]), "Expected `object`, got `array`"),
    ],
)
def test_a_record_of_another_shape_than_ours_is_refused_in_one_line(head: bytes, why: str) -> None:
    with pytest.raises(MalformedRecordError, match=why) as refused:
        Record.of(head, b"")

    assert "\n" not in str(refused.value)


def test_a_record_with_names_and_numbers_that_msgpack_does_not_know_comes_back_as_it_was() -> None:
    record = record_of(3, files=[["not utf-8 \udcff", 7]], variables=[{"text": "\ud800"}])

    assert read_head(pack(record)) == record
    assert read_head(pack(record_of(3, variables=[{"big": 1 << 70}]))).variables == [
        {"big": PlainNode("int", [hex(1 << 70)])}
    ]


def test_texts_and_numbers_of_subclasses_are_packed_as_what_they_are() -> None:
    kinds: list[Any] = [type("Text", (str,), {})("a"), type("Count", (int,), {})(3), type("Share", (float,), {})(0.5)]

    assert read_head(pack(record_of(3, files=[kinds]))).files == [["a", 3, 0.5]]
