"""What the file system has answered the script, by which a replacement is answered alike.

A replacement runs the set-up where the output of its own run lies: the folder that must be new is there, `version_0` is
taken, `last.pt` could be resumed from. So each answer that the script gets is kept in the rank's recorder, with its
place in the script and the step in which it was asked. In a replay the newest one of the same place is given again, up
to the step that is replayed; in the step that the replacement then runs again, those that the lost rank got in that
very step. An answer that is the same as the one before at its place is not kept again: to look for a file in each step
costs one entry. It is kept some times more in the step of that one, since `exists() or is_dir()` asks twice.

A process that is lost in the step that it runs again may have been lost by the answers: a script that ends itself
once, and leaves a file so as not to do it twice, would end each replacement. So each second process that runs a step
again, or replays it, is answered as the file system is, and these answers are not kept.

Answers to the main thread alone, and to code whose writes a replay drops (ownership.py). Begin with `find`.

Standard library only: a script may look at files before it imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import xxhash

from ttprun.introspect import fail_open
from ttprun.introspect.ownership import has_muted_effects, location_key
from ttprun.protocol.reason import Reason

MOST = 20_000  # answers that are kept
MOST_BYTES = 4 << 20  # of them
MOST_AT_ONE_LINE = 2_000
MOST_REPEATS = 8  # of an answer, in the step in which it was first given
MISSING: Any = object()
_FULL = 0  # the place of an entry which says that no more are kept
_RUN_AGAIN = 1  # the place of an entry which says that one more process has run a step again, or replayed it (-step)
_ALL_OTHERS = "the script"
_STORES = {b"SQLite format 3\0": "sqlite3", b"\x89HDF\r\n\x1a\n": "HDF5", b"CDF": "netCDF"}  # first bytes; kind
WRITTEN_AGAIN = "what the set-up and a repeated step write to it is written again"
# Modules that ask, open and remove for their caller.
_ON_BEHALF_OF_OTHERS = frozenset(
    {
        *("os", "posixpath", "genericpath", "glob", "shutil", "pathlib", "pathlib._local", "pathlib._abc"),
        *("codecs", "gzip", "bz2", "lzma", "zipfile", "tarfile", "shelve", "configparser", "urllib.request"),
        *("logging", "logging.handlers", "numpy.lib.npyio", "numpy.lib._npyio_impl", "numpy.lib._datasource"),
        *("numpy._core.memmap", "numpy.core.memmap", "numpy.lib._format_impl", "numpy.lib.format"),
        *("pandas.io.common", "PIL.Image", "torchvision.utils", "torch.serialization"),
    }
)


class _Looking(threading.local):
    is_on = False


_looking = _Looking()
Kept = tuple[int, list[Any]]  # place; [step, which call of that step, answer]


class _Log:
    """The answers.

    is_on    this process is a rank
    keep     writes an answer to the recorder, with its size; None: there is none yet, answers wait in `early`
    lost     of the lost process of this rank, by place
    newest   of this process: step, number in that step, and answer of what was answered last at a place; step of its
             entry
    """

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self.keep: Callable[[Kept], int] | None = None
        self.early: list[Kept] = []
        self.lost: defaultdict[int, list[list[Any]]] = defaultdict(list)
        self.newest: dict[int, list[Any]] = {}
        self.at_line: Counter[int] = Counter()
        self.count = self.size_bytes = 0
        self.asked: dict[int, list[int]] = {}  # of the lost ones: place; step and how many were given again
        # Of lost processes and of this one: the steps that were run again or, as negative numbers, replayed.
        self.runs_again: Counter[int] = Counter()
        self.again: set[int] = set()
        self.not_kept: list[str] = []  # lines of which no more answers are kept
        self.stores: list[str] | None = None  # `_open_stores()` at the first record
        self.stopped: set[tuple[CodeType, int]] = set()  # the same lines


_log = _Log()


def listen() -> None:
    """The script is about to start; there is no recorder yet."""
    global _log
    _log = _Log(is_on=True)


def begin(answers: Iterable[Kept], keep: Callable[[Kept], int]) -> None:
    """A run of the script begins, or has just imported torch.

    answers   the answers of the lost process of this rank
    keep      writes further ones to the recorder; returns their size
    """
    early = _log.early
    listen()
    _take(answers)
    _log.keep = keep
    for kept in early:
        _write(*kept)


def _take(answers: Iterable[Kept]) -> None:
    for place, entry in answers:
        _log.lost[place].append(entry)
        _log.count += 1
    _log.runs_again.update(step for step, *_ in _log.lost.pop(_RUN_AGAIN, ()))
    if _log.lost.pop(_FULL, None):  # then those of later steps are old ones
        _log.lost = defaultdict(list, {place: [e for e in kept if not e[0]] for place, kept in _log.lost.items()})
        _log.not_kept.append(_ALL_OTHERS)


def end() -> None:
    """This is a forked child."""
    global _log
    _log = _Log()


class Question(NamedTuple):
    """A question, and where the script asks it.

    number  of both
    line    number of the line of the script
    shown   the line for people
    """

    number: int
    line: int
    shown: str


def are_kept_for(caller: FrameType) -> bool:
    """Whether answers to this code are kept at all."""
    frame = _of_user(caller) if _log.is_on else None
    return frame is not None and (frame.f_code, frame.f_lineno) not in _log.stopped


def is_called_by_user(frame: FrameType | None) -> bool:
    """Whether code whose effects are muted in a replay calls, directly or through a module that acts for others."""
    return _of_user(frame) is not None


def _of_user(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name not in _ON_BEHALF_OF_OTHERS and not name.startswith("fsspec."):
            return frame if _is_of_user(frame.f_code.co_filename) else None
        frame = frame.f_back
    return None


def _is_of_user(filename: str) -> bool:
    if _looking.is_on:
        return False  # ownership.py asks the file system, too
    _looking.is_on = True
    try:
        return has_muted_effects(filename)
    finally:
        _looking.is_on = False


def place_of(kind: str, path: Any, caller: FrameType) -> Question | None:
    """The place of a question; None if its answer is not to be kept.

    kind   of the question
    path   str or path-like; None, and others: not to be kept
    """
    if not _log.is_on or threading.current_thread() is not threading.main_thread():
        return None
    frame = _of_user(caller)
    if frame is None or not isinstance(path, str | os.PathLike):
        return None
    named = os.fspath(path)
    if not isinstance(named, str):
        return None
    file = frame.f_code.co_filename
    line, shown = _number(f"{kind}|{file}:{frame.f_lineno}"), f"{os.path.basename(file)}:{frame.f_lineno}"
    if line in _log.lost or _log.at_line[line] >= MOST_AT_ONE_LINE:
        _stop_at(line, shown)
        _log.stopped.add((frame.f_code, frame.f_lineno))
        return None
    return Question(_number(f"{kind}|{named}|{frame.f_lineno}|{location_key()}"), line, shown)


def _number(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogateescape"))


def find(place: Question) -> Any:
    """The lost rank's answer at this place; MISSING if it had none, or if it is not to be given again."""
    entries = _log.lost.get(place.number)
    if not entries:
        return MISSING
    session = fail_open.session_now()
    if session is None or session.mode.is_live:
        step = 0 if session is None else session.applied
        entries = [entry for entry in entries if entry[0] == step]
    else:
        step = session.mode.newest_step
        entries = [entry for entry in entries if entry[0] <= step]
    if not entries:
        return MISSING
    if session is None or session.mode.is_live:
        is_again = _is_answered_again(step)
    else:  # the set-up always
        is_again = step == 0 or entries[-1][0] < step or _is_answered_again(-step)
    if not is_again:
        return MISSING
    which = _count_question(place, step)
    of_step = [entry for entry in entries if entry[0] == entries[-1][0]]
    if (session is None or session.mode.is_live) and which > of_step[-1][1]:
        return MISSING  # the lost rank did not come so far, or may have waited for a file
    return next((entry[2] for entry in reversed(of_step) if entry[1] <= which), of_step[0][2])


def was_last_answered(place: Question, answer: list[Any]) -> bool:
    """Whether this is the lost rank's last answer at this place, of whichever step; true at the first question alone.

    Who asks again may wait for the file.
    """
    entries = _log.lost.get(place.number)
    if not entries or entries[-1][2] != answer:
        return False
    session = fail_open.session_now()
    step = 0 if session is None else session.applied
    return _is_answered_again(step) and _count_question(place, step) == 0


def _is_answered_again(step: int) -> bool:
    """Whether the step that runs again now, or is replayed (-step), is answered as at first."""
    if step not in _log.again:
        _log.again.add(step)
        if _log.keep is not None:
            _write(_RUN_AGAIN, [step, 0, None])
    return _log.runs_again[step] % 2 == 0


def _count_question(place: Question, step: int) -> int:
    """How often this was asked in this step before."""
    asked = _log.asked.setdefault(place.number, [step, -1])
    asked[:] = (step, asked[1] + 1) if asked[0] == step else (step, 0)
    return asked[1]


def note(place: Question, answer: Any) -> None:
    """The script is answered so. In a replay nothing is kept: it is all there."""
    session = fail_open.session_now()
    if session is not None and session.mode.is_alone:
        return
    step = 0 if session is None else session.applied
    if step in _log.again and not _is_answered_again(step):
        return
    newest = _log.newest.get(place.number)
    which = 0
    if newest is not None:
        which = newest[1] + 1 if newest[0] == step else 0
        if newest[2] == answer:
            newest[:2] = step, which
            if newest[3] == step and which <= MOST_REPEATS:
                _write(place.number, [step, which, answer])
            return
    _log.newest[place.number] = [step, which, answer, step]
    _log.at_line[place.line] += 1
    _write(place.number, [step, which, answer])


def _write(place: int, entry: list[Any]) -> None:
    if _log.keep is None:
        _log.early.append((place, entry))
        return
    _log.count += 1
    _log.size_bytes += _log.keep((place, entry))
    if _log.is_on and (_log.count > MOST or _log.size_bytes > MOST_BYTES):
        _log.is_on = False
        _log.keep((_FULL, [0, 0, None]))
        _log.not_kept.append(_ALL_OTHERS)


def _stop_at(line: int, shown: str) -> None:
    """No more answers at this line are kept; those that were would be old ones."""
    if shown not in _log.not_kept:
        _log.not_kept.append(shown)
        if line not in _log.lost:
            _write(line, [0, 0, None])


def not_proved() -> list[Reason]:
    """The lines that have asked so much that a replacement is answered there as the file system is then."""
    if _log.stores is None:
        _log.stores = _open_stores()
    more = f"asks the file system (more than {MOST_AT_ONE_LINE} answers)"
    many = [Reason("hidden-state", f"what {shown} {more}") for shown in _log.not_kept]
    return many + [Reason("written-again", store) for store in _log.stores]


def _open_stores() -> list[str]:
    """The stores that this process may write to by compiled code: "log.db (sqlite3): ... is written again".

    A replay drops what Python's files write, but not that. The files are read by the descriptors that there are: to
    close another one would end the locks that SQLite holds.
    """
    stores: set[str] = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            name = os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
            is_written = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            if is_written and stat.S_ISREG(os.fstat(number).st_mode):
                head = os.pread(number, max(map(len, _STORES)), 0)
                kinds = ["lmdb"] if name == "data.mdb" else [_STORES[of] for of in _STORES if head.startswith(of)]
                stores.update(f"{name} ({kind}): {WRITTEN_AGAIN}" for kind in kinds)
    return sorted(stores)


os.register_at_fork(after_in_child=end)
