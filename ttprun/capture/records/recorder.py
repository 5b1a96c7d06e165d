"""The recorder: one rank's records, in shared memory outside its process.

A memfd that the agent makes for each rank and keeps across replacements. It holds the records of the newest four
boundaries (a recovery needs the newest or the one before it, and a replay begins one or two boundaries earlier), the
run's first record (a resume on other ranks needs what has changed since), a log of the results of small collectives, by
which a replay answers its calls, the evidence of the current step (evidence.py), a ring of the random states of
DataLoader workers, a ring of the lines printed (effects/output.py), and the bytes appended to each file.

A record becomes valid when its header is written, last; a rank killed while it writes leaves the older ones. Records
and entries of the log have digests: after a stray write of the rank's process they are not there, instead of wrong.

Which of the records a replay needs, and why some cannot be replayed, says `records_up_to`: for the rank that replays,
and before that for the agent, so that it plans no replay that the rank would refuse.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash

from ttprun.capture.records.evidence import REGION_BYTES, Evidence
from ttprun.capture.records.packing import BoundaryRecord, Record
from ttprun.protocol.reason import Reason

SLOTS = 4
FIRST = SLOTS  # the slot after those of the newest boundaries
HEADER_BYTES = 4096
LOG_BYTES = 16 << 20
WORKER_ITERATORS, WORKERS, WORKER_BATCHES = 4, 16, 32  # ring: iterators x workers x newest batches of each
WORKER_EPOCHS = 2  # whose first and newest states are kept: when one ends, persistent workers begin the next at once
_RING = WORKER_EPOCHS * (1 + WORKER_BATCHES)
WORKER_ENTRY_BYTES = 16 << 10
WORKER_BYTES = WORKER_ITERATORS * WORKERS * _RING * WORKER_ENTRY_BYTES
_WORKER = struct.Struct("<iiiii")  # iterator, epoch, worker, batch, bytes
APPENDED_FILES = 1024
_APPENDED = struct.Struct("<Qqqq")  # path's key, boundary, bytes since, bytes between the boundary before and it
APPENDED_BYTES = APPENDED_FILES * _APPENDED.size
PRINTED_LINES = 16 << 10
_PRINTED = struct.Struct("<qqQ")  # number of the line, from 1; the boundary after which it was printed; digest
PRINTED_BYTES = PRINTED_LINES * _PRINTED.size
_SLOT_CELLS = 4  # of the header: boundary, bytes of the head, bytes of the blobs, digest of both
_LOG = struct.Struct("<q")  # bytes used
_ENTRY = struct.Struct("<iI")  # bytes of one log entry, digest
_LOG_AT = HEADER_BYTES - 64
NO_BOUNDARY = -1


class RecordTooLargeError(RuntimeError):
    """A record does not fit; the message names the setting to raise."""


class Recorder:
    """One rank's shared record.

    fd              the memfd
    slot_bytes      room for one record
    """

    def __init__(self, fd: int, slot_bytes: int) -> None:
        self.fd = fd
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(fd, self.size_bytes(slot_bytes))
        self._view = memoryview(self._map)
        self._cells = self._view[:HEADER_BYTES].cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._changed: deque[tuple[int, int]] | None = None  # (offset, bytes) of what was written since `take_changes`
        self._worker_heads: dict[int, bytes] = {}
        evidence_at = HEADER_BYTES + (SLOTS + 1) * slot_bytes
        self.evidence = Evidence(self._view[evidence_at : evidence_at + REGION_BYTES])
        self._printed_start = evidence_at + REGION_BYTES
        self._log_start = self._printed_start + PRINTED_BYTES

    @staticmethod
    def size_bytes(slot_bytes: int) -> int:
        """Address space of a recorder; memory is used only for what is written."""
        after_slots = REGION_BYTES + PRINTED_BYTES + LOG_BYTES + WORKER_BYTES + APPENDED_BYTES
        return HEADER_BYTES + (SLOTS + 1) * slot_bytes + after_slots

    @classmethod
    def create(cls, slot_bytes: int) -> int:
        """Make an empty recorder in a memfd; returns its fd."""
        fd = os.memfd_create("ttprun-record", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.size_bytes(slot_bytes))
        cls(fd, slot_bytes).clear()
        return fd

    def copied(self) -> int:
        """Another recorder with all that this one holds; returns its fd."""
        fd = self.create(self.slot_bytes)
        for at, part in self._written_parts(0, self.size_bytes(self.slot_bytes)):
            os.pwrite(fd, part, at)
        return fd

    def clear(self) -> None:
        """Forget all records and the log."""
        for slot in range(SLOTS + 1):
            self._cells[slot * _SLOT_CELLS] = NO_BOUNDARY
        _LOG.pack_into(self._map, _LOG_AT, 0)
        self.evidence.clear()

    def write(self, boundary: int, head: bytes, blobs: Sequence[torch.Tensor]) -> None:
        """Write the record of a boundary over the oldest one.

        head    the packed plain part
        blobs   tensors as `plain` of tensor_bytes.py returns them, written one after the other

        Raises RecordTooLargeError, with the older records untouched.
        """
        self._write(boundary % SLOTS, boundary, head, blobs)

    def write_first(self, boundary: int, head: bytes, blobs: Sequence[torch.Tensor]) -> None:
        """Keep the record of a boundary for good, beside the newest ones; arguments and errors as those of `write`."""
        self._write(FIRST, boundary, head, blobs)

    def _write(self, slot: int, boundary: int, head: bytes, blobs: Sequence[torch.Tensor]) -> None:
        head_bytes, room = len(head), self.slot_bytes
        start = HEADER_BYTES + slot * room
        blob_bytes = 0
        for blob in blobs:
            blob_bytes += blob.nbytes
        if head_bytes + blob_bytes > room:
            raise RecordTooLargeError(
                f"the record of a boundary takes {(head_bytes + blob_bytes) >> 20} MiB: raise record_limit_mib, now "
                f"{room >> 20}"
            )
        cells, cell = self._cells, slot * _SLOT_CELLS
        cells[cell] = NO_BOUNDARY
        end = start + head_bytes
        self._map[start:end] = head
        at = self._address + end
        for blob in blobs:
            size = blob.nbytes
            ctypes.memmove(at, blob.data_ptr(), size)
            at += size
        cells[cell + 1] = head_bytes
        cells[cell + 2] = blob_bytes
        cells[cell + 3] = self._digest(start, end + blob_bytes, boundary)
        cells[cell] = boundary
        if self._changed is not None:
            self._changed += ((start, head_bytes + blob_bytes), (cell * 8, _SLOT_CELLS * 8))

    def read(self, boundary: int) -> tuple[bytes, bytes] | None:
        """Copies of (head, blobs) of a boundary's record, None if it is not there."""
        record = self._read(boundary % SLOTS)
        return record[1:] if record is not None and record[0] == boundary else None

    def read_head(self, boundary: int) -> bytes:
        """A copy of a record's packed part. Raises KeyError if it is not there."""
        cell = boundary % SLOTS * _SLOT_CELLS
        recorded, head_bytes, *_ = self._cells[cell : cell + _SLOT_CELLS]
        if recorded != boundary or not 0 <= head_bytes <= self.slot_bytes:
            raise KeyError(boundary)
        at = HEADER_BYTES + boundary % SLOTS * self.slot_bytes
        return bytes(self._view[at : at + head_bytes])

    def read_first(self) -> tuple[int, bytes, bytes] | None:
        """Copies of (boundary, head, blobs) of the record that is kept for good, None if there is none."""
        return self._read(FIRST)

    def _read(self, slot: int) -> tuple[int, bytes, bytes] | None:
        cell = slot * _SLOT_CELLS
        boundary, head_bytes, blob_bytes, digest = self._cells[cell : cell + _SLOT_CELLS]
        if boundary == NO_BOUNDARY or head_bytes < 0 or not 0 <= head_bytes + blob_bytes <= self.slot_bytes:
            return None
        at = HEADER_BYTES + slot * self.slot_bytes
        middle, end = at + head_bytes, at + head_bytes + blob_bytes
        if middle > end or digest != self._digest(at, end, boundary):
            return None
        return boundary, bytes(self._view[at:middle]), bytes(self._view[middle:end])

    def _digest(self, start: int, end: int, boundary: int) -> int:
        """Of a part of the memory, as a signed cell; of each boundary another one."""
        seed = boundary & 0xFFFFFFFF
        digest: int = xxhash.xxh3_64_intdigest(self._view[start:end], seed)
        return digest - (1 << 63)

    def export(self, boundary: int) -> dict[str, Any]:
        """All that a replay up to `boundary` needs, for `restore`. Raises KeyError if it is not recorded."""
        start = self.size_bytes(self.slot_bytes) - APPENDED_BYTES
        records = [
            [number, *record] for number in range(boundary - SLOTS + 1, boundary + 1) if (record := self.read(number))
        ]
        if not records or records[-1][0] != boundary:
            raise KeyError(boundary)
        return {
            "first": self.read_first(),
            "records": records,
            "log": list(self.read_log()),
            "printed": [line for line in self.printed() if line[1] >= boundary],
            "workers": list(self._written_parts(start - WORKER_BYTES, start)),
            "appended": bytes(self._view[start : start + APPENDED_BYTES]) if self.appended_keys() else b"",
        }

    @property
    def newest(self) -> int:
        """The newest boundary of which there is a record; NO_BOUNDARY if there is none."""
        boundaries = [self._cells[slot * _SLOT_CELLS] for slot in range(SLOTS)]
        return max((at for slot, at in enumerate(boundaries) if at % SLOTS == slot and at >= 0), default=NO_BOUNDARY)

    def take_changes(self, all_of_it: bool) -> list[tuple[int, bytes]]:
        """(offset, bytes) of what was written since the last call, but for the evidence.

        all_of_it   of all that was ever written; from now on it is noted what is written

        A copy in which they are written at these offsets holds the same.
        """
        if all_of_it or self._changed is None:
            self._changed, self._worker_heads = deque(), {}
            end = self.size_bytes(self.slot_bytes)
            evidence_at = self._printed_start - REGION_BYTES
            list(self._workers_parts())  # they are known from now on
            printed = self._written_parts(self._printed_start, end)
            return [*self._written_parts(0, evidence_at), *((self._printed_start + at, part) for at, part in printed)]
        parts = list(self._workers_parts())
        while self._changed:
            at, size = self._changed.popleft()
            parts.append((at, bytes(self._view[at : at + size])))
        return parts

    def _workers_parts(self) -> Iterator[tuple[int, bytes]]:
        """What DataLoader workers, which are processes of their own, have written since this was called last."""
        start = at = self._log_start + LOG_BYTES
        while at < start + WORKER_BYTES:
            try:
                at = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing follows
                return
            at -= (at - start) % WORKER_ENTRY_BYTES
            if at >= start + WORKER_BYTES:
                return
            head = bytes(self._view[at : at + _WORKER.size])
            if head != self._worker_heads.get(at):
                self._worker_heads[at] = head
                size = min(max(0, _WORKER.unpack(head)[-1]), WORKER_ENTRY_BYTES - _WORKER.size)
                yield at, bytes(self._view[at : at + _WORKER.size + size])
            at += WORKER_ENTRY_BYTES

    def _written_parts(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """(offset from `start`, bytes) of what was written in a part; reading the rest would allocate memory."""
        at = start
        while at < end:
            try:
                at = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing follows
                return
            hole = min(os.lseek(self.fd, at, os.SEEK_HOLE), end)
            if at < hole:
                yield at - start, os.pread(self.fd, hole - at, at)
            at = hole

    def restore(self, exported: dict[str, Any]) -> None:
        """Fill an empty recorder with what `export` returned. Raises RecordTooLargeError."""
        start = self.size_bytes(self.slot_bytes) - APPENDED_BYTES
        newest = [(record[0] % SLOTS, record) for record in exported["records"]]
        for slot, (boundary, head, blobs) in [(FIRST, exported["first"]), *newest]:
            self._write(slot, boundary, head, [torch.frombuffer(bytearray(blobs), dtype=torch.uint8)] if blobs else [])
        for entry in exported["log"]:
            self.append_log(entry)
        for line in exported.get("printed", ()):  # older checkpoints have none
            self.note_printed(*line)
        for offset, part in exported["workers"]:
            self._view[start - WORKER_BYTES + offset :][: len(part)] = part
        if exported["appended"]:
            self._view[start:] = exported["appended"]

    def append_log(self, entry: bytes, share: int = 1) -> bool:
        """Append an entry to the log of results; False when it is full, or that part of it (2: the half)."""
        (used,) = _LOG.unpack_from(self._map, _LOG_AT)
        need = _ENTRY.size + len(entry)
        if not 0 <= used <= LOG_BYTES // share - need:
            return False
        at = self._log_start + used
        _ENTRY.pack_into(self._map, at, len(entry), xxhash.xxh32_intdigest(entry))
        self._map[at + _ENTRY.size : at + need] = entry
        _LOG.pack_into(self._map, _LOG_AT, used + need)
        if self._changed is not None:
            self._changed += ((at, need), (_LOG_AT, _LOG.size))
        return True

    def read_log(self) -> Iterator[bytes]:
        """The log's entries, oldest first, up to one that is damaged."""
        (used,) = _LOG.unpack_from(self._map, _LOG_AT)
        at = self._log_start
        end = at + min(used, LOG_BYTES)
        while at + _ENTRY.size <= end:
            size, digest = _ENTRY.unpack_from(self._map, at)
            at += _ENTRY.size
            entry = bytes(self._view[at : at + size]) if 0 <= size <= end - at else b""
            if len(entry) != size or xxhash.xxh32_intdigest(entry) != digest:
                return
            yield entry
            at += size

    def _worker_at(self, place: tuple[int, int, int, int]) -> int:
        iterator, epoch, worker, batch = place
        ring = (iterator % WORKER_ITERATORS) * WORKERS + worker % WORKERS
        of_epoch = epoch % WORKER_EPOCHS * (1 + WORKER_BATCHES)  # its first one stays: a stream is read again from it
        entry = ring * _RING + of_epoch + (1 + batch % WORKER_BATCHES if batch else 0)
        return self._log_start + LOG_BYTES + entry * WORKER_ENTRY_BYTES

    def write_worker(self, place: tuple[int, int, int, int], state: bytes) -> None:
        """Keep a worker's random states; `place` is (iterator, epoch, worker, batch of this worker)."""
        if len(state) + _WORKER.size > WORKER_ENTRY_BYTES:
            return
        at = self._worker_at(place)
        _WORKER.pack_into(self._map, at, *place, 0)
        self._map[at + _WORKER.size : at + _WORKER.size + len(state)] = state
        _WORKER.pack_into(self._map, at, *place, len(state))

    def read_worker(self, place: tuple[int, int, int, int]) -> bytes | None:
        """The states kept for this place, None if they were overwritten."""
        at = self._worker_at(place)
        *key, size = _WORKER.unpack_from(self._map, at)
        return bytes(self._view[at + _WORKER.size : at + _WORKER.size + size]) if tuple(key) == place and size else None

    def worker_states(self, iterator: int, worker: int) -> dict[tuple[int, int], bytes]:
        """All that is kept of one worker: the states by (epoch, batch of this worker), oldest first."""
        at = self._worker_at((iterator, 0, worker, 0))
        heads = [_WORKER.unpack_from(self._map, at + number * WORKER_ENTRY_BYTES) for number in range(_RING)]
        places = [tuple(head[:4]) for head in heads if head[0] == iterator and head[2] == worker]
        by_time = {(place[1], place[3]): self.read_worker(place) for place in sorted(places)}
        return {when: states for when, states in by_time.items() if states is not None}

    def note_printed(self, number: int, boundary: int, digest: int) -> None:
        """Note a line in the ring: its number, from 1; the boundary after which it is printed; its digest."""
        at = self._printed_start + number % PRINTED_LINES * _PRINTED.size
        _PRINTED.pack_into(self._map, at, number, boundary, digest)
        if self._changed is not None:
            self._changed.append((at, _PRINTED.size))

    def printed(self) -> list[tuple[int, int, int]]:
        """(number, boundary, digest) of the newest lines printed, in no order."""
        ring = bytes(self._view[self._printed_start : self._log_start])
        return [line for line in _PRINTED.iter_unpack(ring) if line[0]]

    def _appended_at(self, key: int) -> int | None:
        """The offset of a path's entry, or of a free one; None if the table is full."""
        start = self.size_bytes(self.slot_bytes) - APPENDED_BYTES
        for number in range(APPENDED_FILES):
            at = start + (key + number) % APPENDED_FILES * _APPENDED.size
            if _APPENDED.unpack_from(self._map, at)[0] in (0, key):
                return at
        return None

    def appended(self, key: int) -> tuple[int, int, int]:
        """(boundary, bytes appended since, bytes in the step before it) of a path; zeros if unknown."""
        at = self._appended_at(key)
        _, since, newest, before = (0, 0, 0, 0) if at is None else _APPENDED.unpack_from(self._map, at)
        return since, newest, before

    def set_appended(self, key: int, counts: tuple[int, int, int]) -> None:
        """Note the counts of a path, unless the table already has APPENDED_FILES others."""
        at = self._appended_at(key)
        if at is not None:
            _APPENDED.pack_into(self._map, at, key, *counts)
            if self._changed is not None:
                self._changed.append((at, _APPENDED.size))

    def appended_keys(self) -> list[int]:
        """The paths that have counts."""
        start = self.size_bytes(self.slot_bytes) - APPENDED_BYTES
        keys = (_APPENDED.unpack_from(self._map, start + n * _APPENDED.size)[0] for n in range(APPENDED_FILES))
        return [key for key in keys if key]


def read_record(recorder: Recorder, number: int) -> Record:
    """A boundary's record. Raises KeyError if the recorder does not hold it, MalformedRecordError."""
    parts = recorder.read(number)
    if parts is None:
        raise KeyError(number)
    return Record.of(*parts)


def records_up_to(recorder: Recorder, number: int) -> list[Record]:
    """The records from the boundary at which a replay begins to the one that it must reach. Raises KeyError."""
    target = read_record(recorder, number)
    before = _record_to_begin_at(recorder, target)
    first = before.fields.boundary if before else number
    return [read_record(recorder, earlier) for earlier in range(first, number)] + [target]


def _record_to_begin_at(recorder: Recorder, target: Record) -> Record | None:
    """The newest earlier boundary of the same optimizer at the same place, else the one before; None at the first one.

    A run's first record after a change of its ranks is `is_straight`: a replay goes directly to it, and nothing earlier
    is used. A replay cannot begin at a boundary after which batches of an ended loader are trained on: they are lost.
    """
    number = target.fields.boundary
    if target.fields.is_straight:
        return target
    others = []
    for earlier in range(number - 1, max(0, number - SLOTS + 1), -1):
        record = read_record(recorder, earlier)
        if not record.fields.is_draining:
            if (record.fields.place, record.fields.stepping) == (target.fields.place, target.fields.stepping):
                return record
            others.append(record)
        if record.fields.is_straight:
            break
    if others:
        return others[0]
    return read_record(recorder, number - 1) if number > 1 else None


def why_never(record: BoundaryRecord) -> Reason:
    """Why no replay can reach the place of a record; "" if one may."""
    return Reason(record.unfollowed_kind, record.unfollowed)


def why_other_numbers(record: BoundaryRecord) -> Reason:
    """Why the step before a record cannot be run again; "" if it can."""
    return (
        Reason("random-draws", "the script draws from os.urandom in its steps, which gives other numbers each time")
        if record.entropy
        else Reason()
    )


def why_not_replayable(records: Sequence[Record]) -> Reason:
    """Why a replay over these records would be refused; "" if they contain no reason."""
    fields = [record.fields for record in records]
    first, target = fields[0], fields[-1]
    reasons = [why_never(first), why_never(target)]
    reasons += [why_other_numbers(record) for record in fields if record is not first or record is target]
    return next(filter(None, reasons), Reason())
