"""The script's stdout and stderr: each line is printed once, however often its rank is replaced.

The board counts the lines that a rank's processes have printed, and each record holds the count at its boundary. A
replacement writes to a replay log until it goes live at the boundary, and then skips the lines that were printed after
that.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from ttprun.capture.host import Host, current
from ttprun.introspect import signal_handlers
from ttprun.protocol.board import Field

_LAST_LINES, _LAST_BYTES = 3, 2000
_ROOM_BYTES = 64 << 10  # that a replay log may take on the disk, to begin with
_FIELDS = {"stdout": Field.LINES_OUT, "stderr": Field.LINES_ERR}


class _CountedRaw(io.RawIOBase):
    """A stream to a descriptor that counts lines and can skip some."""

    def __init__(self, stream: Any, field: int) -> None:
        self._stream = stream  # kept, or it would close the descriptor
        self._fd: int = stream.fileno()
        self._field = field
        self.skip_lines = 0
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
        raw = rest = bytes(data)
        session = current()
        while self.skip_lines and rest:
            _line, end, rest = rest.partition(b"\n")
            if not end:
                return len(raw)
            self.skip_lines -= 1
        if session is not None and session.mode.is_live and not session.is_over:
            cell = session.rank
            session.board.set(cell, self._field, session.board.get(cell, self._field) + rest.count(b"\n"))
        while rest:
            rest = rest[signal_handlers.call_through(os.write, (self._fd, rest), {}) :]
        return len(raw)


def _file_of(fd: int) -> tuple[int, int]:
    """(device, inode) of an open file; (0, 0) if there is none."""
    try:
        status = os.fstat(fd)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


_streams: dict[str, _CountedRaw] = {}


def count_lines() -> None:
    """Replace sys.stdout and sys.stderr by counting streams."""
    for name, field in _FIELDS.items():
        old = getattr(sys, name)
        try:
            old.flush()
            raw = _CountedRaw(old, field)
        except (AttributeError, OSError, ValueError):
            continue
        _streams[name] = raw
        new: Any = io.TextIOWrapper(
            raw, old.encoding, old.errors, line_buffering=old.line_buffering, write_through=True
        )
        new.mode = "w"
        setattr(sys, name, new)


def lines_printed(session: Host) -> list[int]:
    """Lines that the script has printed so far to stdout and to stderr; those still to be skipped are not counted."""
    out, err = _streams.get("stdout"), _streams.get("stderr")
    return [
        session.row[Field.LINES_OUT] - (0 if out is None else out.skip_lines),
        session.row[Field.LINES_ERR] - (0 if err is None else err.skip_lines),
    ]


def why_not_counted() -> str:
    """Why lines would be lost or printed twice if this rank were replaced; "" if they would not."""
    for name, stream in _streams.items():
        if stream.is_elsewhere():
            return f"the script has redirected {name} (os.dup2 to descriptor {stream.fileno()})"
    return ""


def skip_lines(skip_out: int, skip_err: int) -> None:
    """Skip the next lines: the lost rank has printed them."""
    for name, lines in (("stdout", skip_out), ("stderr", skip_err)):
        if name in _streams:
            _streams[name].skip_lines = lines


class Diverted:
    """Redirects descriptors 1 and 2 to a replay log until `end`, also for C++ code and child processes.

    The log is in memory, and lost afterwards, if the run's directory cannot be written.
    """

    def __init__(self, session: Host) -> None:
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

    def end(self, skip_out: int, skip_err: int) -> None:
        """Restore the output, and skip the lines that the lost rank has printed.

        skip_out, skip_err   lines of stdout and of stderr
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for fd, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
        skip_lines(skip_out, skip_err)
