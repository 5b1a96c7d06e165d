"""Files that the script writes: their positions at a boundary, and how a replay leaves them alone.

A replay runs the script from the top, and would truncate the lost rank's log, overwrite a checkpoint with garbage, or
rename files again. So in a replay, writes of the user's own code are dropped: `open` for writing returns a file that
drops them; `torch.save`, safetensors' `save_file` and the calls in MUTED do nothing. When the replacement goes live,
each file that is open for writing is truncated to its position at the boundary: what the lost rank wrote after it is
written again. Files opened for appending may be shared with other ranks and are never truncated: see
`append_dedup.py`.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
import threading
import time
import weakref
from types import FrameType, ModuleType
from typing import Any

from ttprun.protocol.board import Phase
from ttprun.rank import fail_open, moments, signal_handlers
from ttprun.rank.effects import append_dedup
from ttprun.rank.position import ast_transform
from ttprun.rank.position.whose import has_muted_effects
from ttprun.rank.session import Session, current

MUTED = {
    os: (
        *("remove", "unlink", "rename", "replace", "rmdir", "removedirs", "truncate", "symlink", "link"),
        *("chmod", "chown", "utime"),
    ),
    shutil: ("rmtree", "move", "copy", "copy2", "copyfile", "copytree"),
}
# Modules that open and remove files for their caller.
_ON_BEHALF_OF_OTHERS = frozenset(
    {
        *("pathlib", "pathlib._local", "pathlib._abc", "codecs", "gzip", "bz2", "lzma", "zipfile", "tarfile", "shelve"),
        *("logging", "logging.handlers", "numpy.lib.npyio", "numpy.lib._npyio_impl", "numpy.lib._datasource"),
        *("numpy._core.memmap", "numpy.core.memmap", "numpy.lib._format_impl", "numpy.lib.format"),
        *("pandas.io.common", "PIL.Image", "torchvision.utils"),
    }
)
open_unfollowed = builtins.open
_COARSE = 5  # Linux's CLOCK_REALTIME_COARSE, which Python has no name for
# (absolute path, file opened for writing by the user's code)
_tracked: list[tuple[str, weakref.ref[Any]]] = []


def user_modules() -> list[tuple[str, ModuleType]]:
    """The loaded modules that hold state, including the script as `__main__`."""
    found = []
    for name in (*ast_transform.loaded, *ast_transform.loaded_by_name):
        module = sys.modules.get(name)
        if module is not None:
            found.append((name, module))
    return found


def _acts_for_others(module: str) -> bool:
    return module in _ON_BEHALF_OF_OTHERS or module.startswith("fsspec.")


def _is_called_by_user(caller: FrameType) -> bool:
    frame: FrameType | None = caller
    while frame is not None and _acts_for_others(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
    return frame is not None and has_muted_effects(frame.f_code.co_filename)


def wrap_open(original: Any) -> Any:
    """builtins.open: track the files that the script writes, and drop a replay's writes."""
    return lambda *args, **kwargs: _open_tracked(original, fail_open.caller(), *args, **kwargs)


def _open_tracked(original: Any, caller: FrameType, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
    session = current()
    writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
    if session is None or not writes or not isinstance(file, str | os.PathLike) or not _is_called_by_user(caller):
        return original(file, mode, *args, **kwargs)
    path = os.path.abspath(os.fspath(file))
    if session.replay is not None and not session.replay.is_alone and not os.path.exists(path):
        open_unfollowed(path, "a").close()  # a new file, which no rank of the old run had
    is_muted = session.replay is not None and os.path.isfile(path)
    if is_muted or "a" in mode:
        opened = _open_followed(original, session, file, is_muted, mode, *args, **kwargs)
    else:
        opened = original(file, mode, *args, **kwargs)
    _tracked[:] = [(path, weakref.ref(opened)) for path, opened in (*_open_files(), (path, opened))]
    return opened


def _open_files() -> list[tuple[str, Any]]:
    found = [(path, known()) for path, known in _tracked]
    return [(path, opened) for path, opened in found if opened is not None and not opened.closed]


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
        if not self.key or session is None or session.replay is not None:
            return super().write(data)
        return append_dedup.write(session, self.key, data, super().write)

    def truncate(self, size: int | None = None) -> int:
        return self.tell() if self.is_muted else super().truncate(size)


def _open_followed(
    original: Any,
    session: Session,
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
        raw.key = append_dedup.key_of(os.path.abspath(os.fspath(file)))
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


def positions() -> list[list[Any]]:
    """[path, bytes written] of each file that is open for writing; flushes them."""
    found = []
    for path, opened in _open_files():
        try:
            opened.flush()
            found.append([path, os.lseek(opened.fileno(), 0, os.SEEK_CUR)])
        except (OSError, ValueError):
            continue
    return found


def positions_again(recorded: list[list[Any]]) -> list[list[Any]]:
    """The same while another run's files are muted: their recorded positions, and the ends of all other files."""
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


def is_to_be_written_again(session: Session, path: Any) -> bool:
    """Whether the lost rank wrote this file in the step in which it was lost, which is run again now."""
    if session.replay is not None or session.applied != _Gap.boundary:
        return False
    try:
        return _Gap.began_ns <= os.stat(path).st_mtime_ns <= _Gap.ended_ns
    except (OSError, TypeError, ValueError):  # it is not there, or elsewhere than on a disk
        return False


def unmute(session: Session, recorded: list[list[Any]], boundary: int, at_ns: int) -> None:
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
    append_dedup.resume_from(session.recorder, boundary)


def wrap_save(original: Any) -> Any:
    """torch.save and the like: nothing in a replay, from any caller; else the board shows that the rank is saving."""

    def save(*args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None and session.replay is not None:
            return None
        moments.reached("checkpoint")
        if session is None or threading.current_thread() is not threading.main_thread():
            return original(*args, **kwargs)
        session.touch(Phase.SAVING)
        try:
            return original(*args, **kwargs)
        finally:
            session.touch(Phase.COMPUTING if session.applied else Phase.SETUP)

    return save


_is_muted = False


def mute_all() -> None:
    """Make the functions that change files do nothing in a replay; once per process."""
    global _is_muted
    if _is_muted:
        return
    _is_muted = True
    for module, names in MUTED.items():
        for name in names:
            setattr(module, name, mute_in_replay(getattr(module, name)))
    for name in ("mkdir", "makedirs"):
        setattr(os, name, make_directory_in_replay(getattr(os, name)))


def mute_in_replay(original: Any) -> Any:
    """A function that changes files: nothing if the user's own code calls it in a replay."""

    def call(*args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None and session.replay is not None and _is_called_by_user(sys._getframe(1)):
            return None
        return original(*args, **kwargs)

    call.__name__ = getattr(original, "__name__", "call")
    return call


def leave_out_in_replay(original: Any) -> Any:
    """A method of a framework that only writes: nothing in a replay, whoever calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        session = current()
        return None if session is not None and session.replay is not None else original(*args, **kwargs)

    return call


def make_directory_in_replay(original: Any) -> Any:
    """os.mkdir and os.makedirs: in a replay the directory may exist."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except FileExistsError:
            session = current()
            if session is None or session.replay is None:
                raise
            return None

    return call
