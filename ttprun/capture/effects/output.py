"""The script's stdout and stderr: each line is printed once, however often its rank is replaced.

The digests of the newest lines are kept in the rank's recorder, each with the boundary after which it was printed. A
replacement writes to a replay log until it goes live at a boundary. From then on it leaves out the lines that the lost
rank has printed in the same step: those of the same place in the script, as often as the lost rank was there; of
another thread, those that are equal but for the time of day. What a signal handler or a thread has printed between them
counts for itself. A line ends with \n or \r, or with its step.

Begin with `_NotedRaw.write`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import threading
from collections import Counter
from typing import Any

import xxhash

from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import signal_handlers
from ttprun.introspect.current_rank import Rank, current
from ttprun.introspect.ownership import location_key
from ttprun.protocol.board import Field
from ttprun.protocol.reason import Reason

_LAST_LINES, _LAST_BYTES = 3, 2000
_ROOM_BYTES = 64 << 10  # that a replay log may take on the disk, to begin with
_LONGEST_LINE = 4096  # what is longer counts as a line
_TIME_OF_DAY = re.compile(rb"\d\d:\d\d:\d\d(?:[.,]\d+)?")
_numbers = itertools.count(1)  # of the lines that this process prints
_left_out: Counter[tuple[int, int]] = Counter()  # (boundary, digest) of what the lost rank has printed after it


class _Begun(threading.local):
    """The line that a thread has begun.

    text      of it, so far
    boundary  after which it is printed
    is_held   it is not written yet: it may be one that is left out
    """

    text = b""
    boundary = -1
    is_held = False


class _NotedRaw(io.RawIOBase):
    """A stream to a descriptor that notes lines, and leaves out those that the lost rank has printed.

    number   distinguishes the lines of stdout from those of stderr
    """

    def __init__(self, stream: Any, number: int) -> None:
        self._stream = stream  # kept, or it would close the descriptor
        self._fd: int = stream.fileno()
        self._number = number
        self.begun = _Begun()
        self._file = _file_of(self._fd)
        self.name = getattr(stream, "name", self._fd)
        self.mode = "wb"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def is_elsewhere(self) -> bool:
        """Whether the descriptor leads to another file than when this was made."""
        return _file_of(self._fd) != self._file

    @signal_handlers.gate_from_c
    def write(self, data: Any) -> int:
        raw = bytes(data)
        session = current()
        if session is None or not session.mode.is_live or session.is_over:
            self._write_out(self._take_held() + raw)
        else:
            self._write_out(self._noted(session, raw))
        return len(raw)

    def flush(self) -> None:
        """What is held comes out at the latest when nothing is left out any more, or the script is over."""
        super().flush()
        session = current()
        if self.begun.is_held and (not _left_out or session is None or session.is_over):
            self._write_out(self._take_held())

    def _write_out(self, rest: bytes) -> None:
        while rest:
            rest = rest[signal_handlers.call_through(os.write, (self._fd, rest), {}) :]

    def _take_held(self) -> bytes:
        begun = self.begun
        text, begun.is_held = begun.text if begun.is_held else b"", False
        return text

    def _noted(self, session: Rank, raw: bytes) -> bytes:
        """Note the lines that end in it; returns what is to be written, which may have been held."""
        boundary, begun = session.board.get(session.rank, Field.RECORDED), self.begun
        out = b""
        if begun.boundary != boundary:
            if begun.text and not self._is_left_out(session, begun.boundary, begun.text):
                out = self._take_held()
            begun.text, begun.boundary, begun.is_held = b"", boundary, False
            for old in [*_left_out]:  # a copy: other threads print, too
                if old[0] < boundary:
                    del _left_out[old]
        begun.is_held = begun.is_held or (bool(_left_out) and not begun.text)
        *lines, rest = [*(begun.text + raw).splitlines(keepends=True), b""]
        if lines and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < _LONGEST_LINE:
            rest = lines.pop()
        are_new = b"".join([line for line in lines if not self._is_left_out(session, boundary, line)])
        begun.text, is_held = rest, begun.is_held
        begun.is_held = is_held and bool(rest)
        return out + (are_new if is_held else raw)

    def _is_left_out(self, session: Rank, boundary: int, line: bytes) -> bool:
        """Whether the lost rank has printed this line; else it is noted.

        A line of the main thread is known by the place in the script where it is printed: it may show a duration, or
        what a file system was asked that has changed since.
        """
        place = location_key() if threading.current_thread() is threading.main_thread() else ""
        known_by = place.encode() if place else _TIME_OF_DAY.sub(b"", line)
        digest = xxhash.xxh3_64_intdigest(known_by, self._number)
        if _left_out and self.begun.is_held and (times := _left_out[boundary, digest]):
            _left_out[boundary, digest] = times - 1
            if times == 1:
                del _left_out[boundary, digest]
            return True
        session[Recorder].note_printed(next(_numbers), boundary, digest)
        return False


def _file_of(fd: int) -> tuple[int, int]:
    """(device, inode) of an open file; (0, 0) if there is none."""
    try:
        status = os.fstat(fd)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


_streams: dict[str, _NotedRaw] = {}


def note_lines() -> None:
    """Replace sys.stdout and sys.stderr by streams that note lines."""
    for number, name in enumerate(("stdout", "stderr")):
        old = getattr(sys, name)
        try:
            old.flush()
            raw = _NotedRaw(old, number)
        except (AttributeError, OSError, ValueError):
            continue
        _streams[name] = raw
        new: Any = io.TextIOWrapper(
            raw, old.encoding, old.errors, line_buffering=old.line_buffering, write_through=True
        )
        new.mode = "w"
        setattr(sys, name, new)


def why_not_noted() -> Reason:
    """Why lines would be lost or printed twice if this rank were replaced; "" if they would not."""
    for name, stream in _streams.items():
        if stream.is_elsewhere():
            return Reason(
                "output-redirected", f"the script has redirected {name} (os.dup2 to descriptor {stream.fileno()})"
            )
    return Reason()


def resume_from(recorder: Recorder, boundary: int) -> None:
    """A replacement goes live at a boundary: what the lost rank has printed since is left out."""
    global _numbers
    printed = recorder.printed()
    _numbers = itertools.count(max(printed, default=(0,))[0] + 1)
    _left_out.clear()
    _left_out.update((after, digest) for _, after, digest in printed if after >= boundary)
    for stream in _streams.values():
        stream.begun = _Begun()


def end() -> None:
    """The script has come to its end: nothing is left out any more."""
    _left_out.clear()
    for stream in _streams.values():
        stream.flush()


class Diverted:
    """Redirects descriptors 1 and 2 to a replay log until `end`, also for C++ code and child processes.

    The log is in memory, and lost afterwards, if the run's directory cannot be written.
    """

    def __init__(self, session: Rank) -> None:
        self._log = os.path.join(session.run_dir, "logs", f"replay-rank{session.rank}-gen{session.generation}.log")
        try:
            target = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            size = os.fstat(target).st_size
            os.write(target, bytes(_ROOM_BYTES))  # a full disk says so only now
            os.ftruncate(target, size)
        except OSError:
            self._log, target = "/proc/self/fd/1", os.memfd_create("ttprun-replay-log")
        self._saved = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(target, fd)
        os.close(target)

    def last_words(self) -> str:
        """The last lines that the script has printed; "" if it has printed none."""
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(OSError), open(self._log, "rb") as log:
            log.seek(max(0, os.path.getsize(self._log) - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
            return " | ".join([line.strip() for line in lines if line.strip()][-_LAST_LINES:])
        return ""

    def end(self) -> None:
        """Restore the output."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
