"""The functions of `os` and `shutil` by which the script looks at the file system and changes it.

What the script is answered is kept for a replacement (file_answers.py), and answered again there. Everything else goes
through these: os.path, glob, pathlib, os.walk, fsspec. Changes are dropped in a replay, as the lost rank has made them;
in a step that is run again they are made again, and a change that cannot be made twice is answered as it was at first.
Begin with `watch`.

Standard library only: a script may look at files before it imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from ttprun.capture.effects import file_answers
from ttprun.capture.effects.file_answers import MISSING, Question, is_called_by_user
from ttprun.introspect import fail_open
from ttprun.introspect.signal_handlers import call_through, gate
from ttprun.protocol.reason import pointer

ASKING = ("stat", "lstat", "access", "readlink", "listdir", "scandir")
MOST_NAMES, MOST_WITH_SIZES = 2_000, 256  # of a folder that is listed
# Changes: what a replay drops, also where the lost rank was not asked to note it.
CHANGING = {
    os: (
        *("remove", "unlink", "rename", "replace", "rmdir", "removedirs", "truncate", "symlink", "link"),
        *("chmod", "chown", "utime"),
    ),
    shutil: ("rmtree", "move", "copy", "copy2", "copyfile", "copytree"),
}
# Of these, and of what they call, the answer's kind of file is used alone.
_KIND_ALONE = frozenset({"exists", "lexists", "isfile", "isdir", "islink", "is_file", "is_dir", "is_symlink"})
_THROUGH = frozenset({"stat", "lstat"})
_PATHS = frozenset({"genericpath", "posixpath", "pathlib", "pathlib._local", "pathlib._abc"})
_LISTING_NAMES = frozenset({"glob", "os", "shutil"} | _PATHS)
_EXCLUSIVE = os.O_CREAT | os.O_EXCL
_SIZES = ("st_mode", "st_ino", "st_dev", "st_nlink", "st_uid", "st_gid", "st_size")
_TIMES = ("st_mtime_ns", "st_ctime_ns", "st_blksize", "st_blocks", "st_rdev")

Function = Callable[..., Any]
was_written_in_gap: Callable[[Any], bool] | None = None  # of script_files.py, which needs torch
_is_inside = False  # a call that is noted: what it calls is not
_is_watching = False


def watch() -> None:
    """Replace the functions; once per process."""
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    for name in ASKING:
        _replace(os, name, _ask)
    for module, names in CHANGING.items():
        for name in names:
            _replace(module, name, _change)
    _replace(os, "mkdir", _make_directory)
    _replace(os, "open", _open)
    for kept in (getattr(glob, "_StringGlobber", None), getattr(glob, "_Globber", None)):
        if kept is not None and "scandir" in vars(kept):
            kept.scandir = staticmethod(os.scandir)


class _Watched(fail_open.LikeBuiltin):
    """Calls `answer` with the original, its name and its caller."""

    def __init__(self, original: Function, name: str, answer: Callable[[_Call], Any]) -> None:
        super().__init__(original, original)
        self._name, self._answer, self._is_asking = name, answer, answer is _ask
        self.__wrapped__ = original
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(self, attribute, getattr(original, attribute, None))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if _is_inside or (self._is_asking and not file_answers.are_kept_for(caller)):
            return self._original(*args, **kwargs)
        return self._answered(caller, args, kwargs)

    @gate
    def _answered(self, caller: FrameType, args: Any, kwargs: Any) -> Any:
        return self._answer(_Call(self._original, self._name, caller, args, kwargs))


def _replace(module: Any, name: str, answer: Callable[[_Call], Any]) -> None:
    original = getattr(module, name)
    ours = _Watched(original, name, answer)
    setattr(module, name, ours)
    for supported in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if original in supported:
            supported.add(ours)


class _Call:
    """One call.

    path   that it is about
    place  None: it is not noted
    known  what the lost rank was answered at this place
    """

    def __init__(self, original: Function, name: str, caller: FrameType, args: Any, kwargs: Any) -> None:
        self.original, self.name, self.caller = original, name, caller
        self.args, self.kwargs = args, kwargs
        self.path = args[0] if args else kwargs.get("path", kwargs.get("src"))
        if self.path is None and name in ("listdir", "scandir"):
            self.path = "."
        self.is_of_kind_alone = name in ("stat", "lstat") and _is_of_kind_alone(caller)
        self.place, self.known = None, MISSING
        try:
            self.place = self._find_place()
            if self.place is not None:
                self.known = file_answers.find(self.place)
        except Exception as error:
            fail_open.give_up(f"os.{name}", error)
        self.session = fail_open.session_now()
        self.is_replay = self.session is not None and not self.session.mode.is_live

    def _find_place(self) -> Question | None:
        if any(key.endswith("dir_fd") and value is not None for key, value in self.kwargs.items()):
            return None
        others = [*self.args[1:], *(value for key, value in self.kwargs.items() if key != "path")]
        parts = [self.name, *(str(other) for other in others if isinstance(other, str | int | os.PathLike))]
        return file_answers.place_of(
            " ".join([*parts, "kind"] if self.is_of_kind_alone else parts), self.path, self.caller
        )

    def make(self) -> Any:
        """Call the original, and note what it answers."""
        if self.place is None:
            return call_through(self.original, self.args, self.kwargs)
        try:
            result = self.make_unnoted()
        except OSError as error:
            if error.errno is not None:
                file_answers.note(self.place, [error.errno])
            raise
        try:
            file_answers.note(self.place, _packed(result, self))
        except Exception as error:
            fail_open.give_up(f"os.{self.name}", error)
        return result

    def make_unnoted(self) -> Any:
        """Call the original; what that calls is not noted either."""
        global _is_inside
        _is_inside = True
        try:
            return call_through(self.original, self.args, self.kwargs)
        finally:
            _is_inside = False

    def answer_again(self) -> Any:
        """What the lost rank was answered; raises its error."""
        return _again(self.known, self.path, self.original)


def _ask(call: _Call) -> Any:
    """os.stat and the like."""
    if call.known is not MISSING:
        return call.answer_again()
    if call.place is not None and _is_of_gap(call.place, call.path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), call.path)
    return call.make()


def _change(call: _Call) -> Any:
    """Functions that change files: dropped if the user's own code calls them in a replay."""
    if call.known is not MISSING:
        result = call.answer_again()
        if not call.is_replay:
            with contextlib.suppress(OSError):
                return call.make_unnoted()
        return result
    return None if call.is_replay and is_called_by_user(call.caller) else call.make()


def _make_directory(call: _Call) -> Any:
    """os.mkdir, which os.makedirs and pathlib call: in a replay the directory may exist."""
    if call.known is not MISSING:
        call.answer_again()
        # On another node it may be missing.
        if not call.is_replay or call.session.address or not call.session.mode.is_alone:
            with contextlib.suppress(FileExistsError):
                call.make_unnoted()
        return None
    try:
        return call.make()
    except FileExistsError:
        if not call.is_replay:
            raise
        return None


def _open(call: _Call) -> Any:
    """os.open, of a file that must be new."""
    flags = call.args[1] if len(call.args) > 1 else call.kwargs.get("flags", 0)
    if not isinstance(flags, int) or flags & _EXCLUSIVE != _EXCLUSIVE:
        return call_through(call.original, call.args, call.kwargs)
    if call.known is MISSING:
        return call.make()
    call.answer_again()
    if call.is_replay:
        return call.original(os.devnull, flags & ~_EXCLUSIVE)
    return call.original(call.path, flags & ~os.O_EXCL, *call.args[2:])


def _is_of_kind_alone(caller: FrameType) -> bool:
    """Whether it is asked for os.path.exists and the like, to which times and sizes are nothing."""
    frame: FrameType | None = caller
    if caller.f_code.co_name in _THROUGH:
        frame = caller.f_back
    return frame is not None and frame.f_code.co_name in _KIND_ALONE and str(frame.f_globals.get("__name__")) in _PATHS


def _is_of_gap(place: Question, path: Any) -> bool:
    """Whether the file was not there for the lost rank, which wrote it in the step that is run again now."""
    if was_written_in_gap is None or not was_written_in_gap(path):
        return False
    return file_answers.was_last_answered(place, [errno.ENOENT])


def _packed(result: Any, call: _Call) -> list[Any]:
    """An answer as it is kept: [what it is, ...]; an error is [number]."""
    if call.name in ("stat", "lstat"):
        return ["kind", result.st_mode] if call.is_of_kind_alone else ["stat", _fields(result)]
    if call.name == "listdir":
        if len(result) > MOST_NAMES:
            return ["changed", os.stat(call.path).st_mtime_ns]
        return ["names", [os.fsencode(name) for name in result]]
    if call.name == "scandir":
        with call.original(call.path) as listed:
            entries = [entry for entry, _ in zip(listed, range(MOST_NAMES + 1), strict=False)]
        if len(entries) > MOST_NAMES:
            return ["changed", os.stat(call.path).st_mtime_ns]
        are_sized = len(entries) <= MOST_WITH_SIZES and call.caller.f_globals.get("__name__") not in _LISTING_NAMES
        return ["entries", [_packed_entry(entry, are_sized) for entry in entries]]
    if isinstance(result, str | os.PathLike):
        return ["path", os.fsencode(result)]
    return ["value", result if isinstance(result, bool) else None]


def _fields(status: os.stat_result) -> list[int]:
    return [getattr(status, name) for name in (*_SIZES, *_TIMES)]


def _packed_entry(entry: Any, is_sized: bool) -> list[Any]:
    kinds = [entry.is_symlink(), entry.is_dir(), entry.is_file()]
    fields = None
    if is_sized:
        with contextlib.suppress(OSError):
            fields = _fields(entry.stat())
    return [os.fsencode(entry.name), entry.inode(), kinds, fields]


def _again(answer: list[Any], path: Any, original: Function) -> Any:
    """An answer that was kept; raises an error that was."""
    match answer:
        case [int(number)]:
            raise OSError(number, os.strerror(number), path)
        case ["kind", mode]:
            return _status([mode, *[0] * 11])
        case ["stat", fields]:
            return _status(fields)
        case ["names", names]:
            return list(map(os.fsdecode, names))
        case ["entries", entries]:
            return _Listing(_Entry(os.fspath(path), *entry) for entry in entries)
        case ["changed", at_ns]:
            if os.stat(path).st_mtime_ns != at_ns:
                note_changed(path)
            return original(path)
        case ["path", target]:
            return os.fsdecode(target)
    return answer[-1]


def note_changed(path: Any) -> None:
    """A replay cannot give the script what it has found there at first."""
    session = fail_open.session_now()
    if session is not None:
        session.mode.note_not_proved(
            f"{os.fspath(path)} has changed since the set-up looked at it{pointer('file-changed')}"
        )


def _status(fields: list[int]) -> os.stat_result:
    mode, inode, device, links, user, group, size, modified_ns, changed_ns, block_size, blocks, kind = fields
    times = {"atime": modified_ns, "mtime": modified_ns, "ctime": changed_ns}
    more: dict[str, Any] = {f"st_{name}": at // 10**9 + 1e-9 * (at % 10**9) for name, at in times.items()}
    more |= {f"st_{name}_ns": at for name, at in times.items()}
    more |= {"st_blksize": block_size, "st_blocks": blocks, "st_rdev": kind}
    seconds = [at // 10**9 for at in times.values()]
    return os.stat_result([mode, inode, device, links, user, group, size, *seconds], more)


class _Listing:
    """As os.scandir returns it, of entries that are known."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> _Listing:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """No more entries."""
        self._entries = iter(())


class _Entry:
    """As an os.DirEntry, of a file that may be there no more."""

    def __init__(self, folder: str, name: bytes, inode: int, kinds: list[bool], fields: list[int] | None) -> None:
        self.name = os.fsdecode(name)
        self.path = os.path.join(folder, self.name)
        self._inode, self._fields = inode, fields
        self._is_link, self._is_directory, self._is_file = kinds

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return os.DirEntry

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def inode(self) -> int:
        return self._inode

    def is_symlink(self) -> bool:
        return self._is_link

    def is_junction(self) -> bool:
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is_directory and (follow_symlinks or not self._is_link)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is_file and (follow_symlinks or not self._is_link)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        if self._fields is not None and (follow_symlinks or not self._is_link):
            return _status(self._fields)
        return os.stat(self.path, follow_symlinks=follow_symlinks)
