"""Files that the script writes: their positions at a boundary, and how a replay leaves them alone.

A replay runs the script from the top, and would truncate the lost rank's log, overwrite a checkpoint with garbage, or
rename files again. So in a replay, writes of the user's own code are dropped: `open` for writing returns a file that
drops them; `torch.save`, safetensors' `save_file` and the calls in file_system.py do nothing. When the replacement goes
live, each file that is open for writing is truncated to its position at the boundary: what the lost rank wrote after it
is written again. Files opened for appending may be shared with other ranks and are never truncated: the
bytes that a rank has appended to a path since its newest boundary are counted in its recorder, and a replacement
skips as many. A file that the set-up reads holds in a replay what it held at first, if it is small.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import stat
import sys
import threading
import time
import weakref
from types import FrameType, ModuleType
from typing import Any

import xxhash

from ttprun.capture.effects import file_answers, file_system
from ttprun.capture.effects.file_answers import is_called_by_user
from ttprun.capture.position import user_code
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import fail_open, signal_handlers, stages
from ttprun.introspect.current_rank import Rank, current
from ttprun.protocol.board import Field, Phase

_to_skip: dict[int, int] = {}  # path's key: bytes that the lost rank has written


def key_of(path: str) -> int:
    """A number for a path, the same in every process; never 0."""
    return xxhash.xxh3_64_intdigest(os.fsencode(path)) or 1


def append(session: Rank, key: int, data: Any, write_raw: Any) -> int:
    """Append to a file, without what the lost rank has appended.

    key        of its path, as `key_of` makes it
    data       any object with the buffer protocol, in one piece
    write_raw  takes a memoryview of bytes, and returns how many it has written
    returns    bytes written or skipped
    """
    given = memoryview(data).cast("B")
    skipped = min(_to_skip.get(key, 0), len(given))
    if skipped:
        _to_skip[key] -= skipped
        if skipped == len(given):
            return skipped
    written: int = write_raw(given[skipped:])
    _count(session[Recorder], key, session.board.get(session.rank, Field.RECORDED), written)
    return skipped + written


def _count(recorder: Recorder, key: int, boundary: int, size: int) -> None:
    since, newest, before = recorder.appended(key)
    if since != boundary:
        newest, before = 0, newest if since == boundary - 1 else 0
    recorder.set_appended(key, (boundary, newest + size, before))


def resume_appends(recorder: Recorder, boundary: int) -> None:
    """A replacement goes live at a boundary: skip what the lost rank, maybe one boundary ahead, has appended since."""
    _to_skip.clear()
    for key in recorder.appended_keys():
        since, newest, before = recorder.appended(key)
        size = newest if since == boundary else newest + before if since == boundary + 1 else 0
        recorder.set_appended(key, (boundary, size, 0))
        _to_skip[key] = size


def forget_appends(session: Rank, path: str) -> None:
    """What the lost rank has appended to this file has been taken out of it."""
    key = key_of(os.path.abspath(path))
    if _to_skip.pop(key, 0):
        session[Recorder].set_appended(key, (session.board.get(session.rank, Field.RECORDED), 0, 0))


CONTENT_BYTES, ALL_CONTENTS_BYTES = 64 << 10, 1 << 20  # of a file that the script reads, kept for a replacement
open_unfollowed = builtins.open
_COARSE = 5  # Linux's CLOCK_REALTIME_COARSE, which Python has no name for
# (absolute path, file opened for writing by the user's code)
_tracked: list[tuple[str, weakref.ref[Any]]] = []
_unseen: dict[str, int] = {}  # files that a replay alone has, in memory: their descriptors
_kept_bytes = 0  # of contents


def user_modules() -> list[tuple[str, ModuleType]]:
    """The loaded modules that hold state, including the script as `__main__`."""
    modules = []
    for name in (*user_code.loaded, *user_code.loaded_by_name):
        module = sys.modules.get(name)
        if module is not None:
            modules.append((name, module))
    return modules


def wrap_open(original: Any) -> Any:
    """builtins.open: track the files that the script writes, and drop a replay's writes."""
    return lambda *args, **kwargs: _open_tracked(original, fail_open.caller(), *args, **kwargs)


def _open_tracked(original: Any, caller: FrameType, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
    session = current()
    is_plain = session is not None and isinstance(mode, str) and isinstance(file, str | os.PathLike)
    if session is None or not is_plain or not is_called_by_user(caller):
        return original(file, mode, *args, **kwargs)
    if not any(letter in mode for letter in "wax+"):
        return _open_for_reading(original, caller, file, mode, *args, **kwargs)
    if "x" in mode:
        mode = _mode_again(original, caller, file, mode)
    path = os.path.abspath(os.fspath(file))
    if not session.mode.is_live and not os.path.exists(path) and "r" not in mode:
        if session.mode.is_alone and not session.address:
            return _open_unseen(original, path, mode.replace("x", "w"), *args, **kwargs)
        if not session.mode.is_alone:
            open_unfollowed(path, "a").close()  # a new file, which no rank of the old run had
    is_muted = not session.mode.is_live and os.path.isfile(path)
    if is_muted or "a" in mode:
        opened = _open_followed(original, session, file, is_muted, mode, *args, **kwargs)
    else:
        opened = original(file, mode, *args, **kwargs)
    _tracked[:] = [(path, weakref.ref(opened)) for path, opened in (*_open_files(), (path, opened))]
    return opened


def _mode_again(original: Any, caller: FrameType, file: Any, mode: str) -> str:
    """The mode in which a file that must be new is opened: the lost rank may have made it."""
    place = file_answers.place_of("new file", file, caller)
    answer = file_answers.MISSING if place is None else file_answers.find(place)
    if answer is not file_answers.MISSING:
        if answer[0]:
            raise fail_open.meant(FileExistsError(answer[0], os.strerror(answer[0]), file))
        return mode.replace("x", "w")
    if place is not None:
        file_answers.note(place, [errno.EEXIST if os.path.lexists(file) else 0])
    return mode


def _open_unseen(original: Any, path: str, mode: str, *args: Any, **kwargs: Any) -> Any:
    """In a replay, open for writing a file which the lost rank has made, and removed or renamed since: in memory."""
    if path not in _unseen:
        _unseen[path] = os.memfd_create("ttprun-unseen")
    return original(path, mode, *args, **kwargs, opener=_opener_of(_unseen[path]))


def _opener_of(descriptor: int) -> Any:
    return lambda _, flags: os.open(f"/proc/self/fd/{descriptor}", flags & ~(os.O_CREAT | os.O_EXCL))


def _open_for_reading(original: Any, caller: FrameType, file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
    """Open a file that the script reads; a replacement reads in it what its rank has read."""
    path = os.path.abspath(os.fspath(file))
    if path in _unseen:
        return original(file, mode, *args, **kwargs, opener=_opener_of(_unseen[path]))
    place = file_answers.place_of("read", file, caller)
    answer = file_answers.MISSING if place is None else file_answers.find(place)
    if place is None or kwargs.get("opener") is not None:
        return original(file, mode, *args, **kwargs)
    if answer is file_answers.MISSING:
        return _note_read(original, place, file, mode, *args, **kwargs)
    if len(answer) == 1:
        raise fail_open.meant(OSError(answer[0], os.strerror(answer[0]), file))
    stamp, content = answer
    if stamp == _stamp_of(path):
        return original(file, mode, *args, **kwargs)
    if content is None:
        file_system.note_changed(path)
        return original(file, mode, *args, **kwargs)
    descriptor = os.memfd_create("ttprun-read")
    try:
        os.write(descriptor, content)
        return original(file, mode, *args, **kwargs, opener=_opener_of(descriptor))
    finally:
        os.close(descriptor)


def _note_read(original: Any, place: file_answers.Question, file: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
    global _kept_bytes
    try:
        opened = original(file, mode, *args, **kwargs)
    except OSError as error:
        if error.errno is not None:
            file_answers.note(place, [error.errno])
        raise
    stamp = _stamp_of(file)
    content = None
    if stamp and stamp[0] <= min(CONTENT_BYTES, ALL_CONTENTS_BYTES - _kept_bytes):
        with open_unfollowed(file, "rb") as again:
            content = again.read(CONTENT_BYTES)
        _kept_bytes += len(content)
    file_answers.note(place, [stamp, content])
    return opened


def _stamp_of(path: Any) -> list[int]:
    """What changes when a regular file is written or replaced; [] of others."""
    try:
        status = os.stat(path)
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns, status.st_ino] if stat.S_ISREG(status.st_mode) else []


def _open_files() -> list[tuple[str, Any]]:
    files = [(path, reference()) for path, reference in _tracked]
    return [(path, opened) for path, opened in files if opened is not None and not opened.closed]


class _FollowedFile(io.FileIO):
    """A file whose writes are dropped in a replay, and counted if they append to it.

    key   of the path, if the file is opened for appending, else 0
    """

    is_muted = False
    key = 0

    @signal_handlers.gate_from_c
    def write(self, data: Any) -> int:
        if self.is_muted:
            return memoryview(data).nbytes
        session = current()
        if not self.key or session is None or not session.mode.is_live:
            return super().write(data)
        return append(session, self.key, data, super().write)

    def truncate(self, size: int | None = None) -> int:
        return self.tell() if self.is_muted else super().truncate(size)


def _open_followed(
    original: Any,
    session: Rank,
    file: Any,
    is_muted: bool,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """As open(), with a _FollowedFile below; invalid or unusual calls go to open() itself."""
    is_text = "b" not in mode
    is_wrong = not is_text and (encoding, errors, newline) != (None, None, None)
    is_plain = opener is None and closefd and set(mode) <= set("arwxbt+U") and len(set(mode) & set("arwx")) == 1
    if is_wrong or not is_plain or ("t" in mode and not is_text) or (is_text and buffering == 0):
        return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
    kind = "a" if "a" in mode else "r"
    try:
        raw = _FollowedFile(file, kind + ("+" if "+" in mode or kind == "r" else ""))
    except OSError as error:
        raise fail_open.meant(error) from None
    raw.is_muted = is_muted
    if kind == "a":
        raw.key = key_of(os.path.abspath(os.fspath(file)))
    if buffering == 0:
        return raw
    size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
    binary = io.BufferedRandom(raw, size) if "+" in mode else io.BufferedWriter(raw, size)
    if not is_text:
        return binary
    text = io.TextIOWrapper(binary, encoding, errors, newline, line_buffering=buffering == 1)
    text.mode = mode  # type: ignore[misc]
    return text


def forget() -> None:
    """Close the files: nothing of this run of the script may be written later."""
    for _, opened in _open_files():
        with contextlib.suppress(OSError, ValueError):
            opened.close()
    _tracked.clear()
    _drop_unseen()


def positions() -> list[list[Any]]:
    """[path, bytes written] of each file that is open for writing; flushes them."""
    rows = []
    for path, opened in _open_files():
        try:
            opened.flush()
            rows.append([path, os.lseek(opened.fileno(), 0, os.SEEK_CUR)])
        except (OSError, ValueError):
            continue
    return rows


def positions_again(recorded: list[list[Any]]) -> list[list[Any]]:
    """Positions of open files while another run's are muted: as recorded of those, and the ends of all others."""
    where = dict(map(tuple, recorded))
    return [[path, where.get(path, os.path.getsize(path))] for path, opened in _open_files()]


def clock_ns() -> int:
    """The time as the kernel notes it in files: it may be some milliseconds late."""
    return time.clock_gettime_ns(_COARSE)


class _Gap:
    """From a boundary to the moment when this process went live at it: what was written then was the lost rank's."""

    boundary = -1
    began_ns = 0
    ended_ns = 0


def is_to_be_written_again(session: Rank, path: Any) -> bool:
    """Whether the lost rank wrote this file in the step in which it was lost, which is run again now."""
    if not session.mode.is_live or session.applied != _Gap.boundary:
        return False
    try:
        return _Gap.began_ns <= os.stat(path).st_mtime_ns <= _Gap.ended_ns
    except (OSError, TypeError, ValueError):  # it is not there, or elsewhere than on a disk
        return False


def _is_of_gap(path: Any) -> bool:
    session = current()
    return session is not None and is_to_be_written_again(session, path)


def unmute(session: Rank, recorded: list[list[Any]], boundary: int, at_ns: int) -> None:
    """The replay is over: set each file to its position at the boundary.

    at_ns   when the lost rank was at the boundary, by `clock_ns`
    """
    _Gap.boundary, _Gap.began_ns, _Gap.ended_ns = boundary, at_ns, clock_ns()
    where = dict(map(tuple, recorded))
    for path, opened in _open_files():
        raw = getattr(getattr(opened, "buffer", opened), "raw", opened)
        if not isinstance(raw, _FollowedFile) or not raw.is_muted:
            continue
        opened.flush()
        raw.is_muted = False
        if not raw.key and path in where:
            opened.seek(where[path])
            opened.truncate()
        else:
            opened.seek(0, os.SEEK_END)
    _drop_unseen()
    resume_appends(session[Recorder], boundary)


def _drop_unseen() -> None:
    while _unseen:
        os.close(_unseen.popitem()[1])


def wrap_save(original: Any) -> Any:
    """torch.save and the like: nothing in a replay, from any caller; else the board shows that the rank is saving."""

    def save(*args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None and not session.mode.is_live:
            return None
        stages.reached("checkpoint")
        if session is None or threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        session.touch(Phase.SAVING)
        try:
            return original(*args, **kwargs)
        finally:
            session.touch(Phase.COMPUTING if session.applied else Phase.SETUP)

    return save


def leave_out_in_replay(original: Any) -> Any:
    """A method of a framework that only writes: nothing in a replay, whoever calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        session = current()
        return None if session is not None and not session.mode.is_live else original(*args, **kwargs)

    return call


file_system.was_written_in_gap = _is_of_gap
