"""The time and the system's entropy that a script draws.

Folders and files are named after these (`runs/<date>`, a run's uuid), so a replacement, whose setup runs later, would
use other names. Each draw of the user's code before its first step is therefore kept in the rank's recorder by the
place of its call, and a replacement's setup gets the same value. From the first step on nothing is kept. Begin with
`draw`. The process id is repeated for file names alone: see `wrap_getpid`.

Randomness of the operating system cannot be recorded. Draws before the first step mostly seed a generator whose state
is recorded, or name a file: a replacement's setup gets the same, unless they are secrets. A script that draws during
its steps cannot be replayed: the number of draws is in each boundary's record.

Standard library only: a script may ask for the time before it imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from ttprun.introspect import fail_open
from ttprun.introspect.current_rank import current
from ttprun.introspect.ownership import has_muted_effects, is_script_code, location_key

MOST = 2048  # draws that are kept
MOST_AT_ONE_PLACE = 64
# Packages that name a run's folder for the user; a replacement appends to their files (installing.py).
_NAMING = ("hydra", "tensorboard", "torch.utils.tensorboard")
_clock_ns = time.time_ns
_localtime = time.localtime

Drawn = tuple[str, Any]  # place and value


class _Log:
    """The draws.

    is_on     the script has not reached its first step
    keep      writes a draw to the recorder; None: there is none yet, draws wait in `early`
    left      draws of the lost process of this rank, by place, that this one has not repeated yet
    """

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self.keep: Callable[[Drawn], Any] | None = None
        self.early: list[Drawn] = []
        self.left: defaultdict[str, deque[Any]] = defaultdict(deque)
        self.counts: Counter[str] = Counter()


_log = _Log()


def listen() -> None:
    """The script is about to start; there is no recorder yet."""
    global _log
    _log = _Log(is_on=True)
    _patch_datetime()


def begin(draws: Iterable[Drawn], keep: Callable[[Drawn], Any] | None) -> None:
    """A run of the script begins, or has just imported torch.

    draws   the draws of the lost process of this rank
    keep    writes further draws to the recorder; None: a replay, which keeps none
    """
    if not _log.is_on:
        listen()
    for place, value in draws:
        _log.left[place].append(value)
    early, _log.early = _log.early, []
    _log.keep = keep if keep is not None else _drop
    for drawn in early:
        _log.keep(drawn)


def end() -> None:
    """The script has reached its first step, a replay has gone live, or this is a forked child."""
    global _log
    if _log.is_on:
        _log = _Log()
        _restore_datetime()


def _drop(drawn: Drawn) -> None:
    pass


def draw(kind: str, make: Callable[[], Any], caller: FrameType | None) -> Any:
    """The result of `make`, or in a replacement the one that the lost rank had at the same place.

    caller   only draws of the user's own code and of _NAMING are kept
    """
    if caller is None or threading.current_thread() is not threading.main_thread() or not _is_followed(caller):
        return make()
    place = f"{kind}|{caller.f_globals.get('__name__')}:{caller.f_lineno}|{location_key()}"
    queue = _log.left.get(place)
    if queue:
        return queue.popleft()
    value = make()
    _log.counts[place] += 1
    if _log.counts[place] <= MOST_AT_ONE_PLACE and _log.counts.total() <= MOST:
        drawn = (place, value)
        _log.early.append(drawn) if _log.keep is None else _log.keep(drawn)
    return value


def is_on() -> bool:
    """Whether draws are kept now."""
    return _log.is_on


def _is_followed(caller: FrameType) -> bool:
    name = str(caller.f_globals.get("__name__"))
    return has_muted_effects(caller.f_code.co_filename) or any(
        name == module or name.startswith(f"{module}.") for module in _NAMING
    )


def _now_ns(kind: str, caller: FrameType) -> int:
    value: int = draw(kind, _clock_ns, caller)
    return value


# Wrappers; when nothing is kept they act as the originals.


def wrap_time(original: Any) -> Any:
    """time.time."""
    return lambda: _now_ns("time", fail_open.caller()) / 1e9 if _log.is_on else original()


def wrap_time_ns(original: Any) -> Any:
    """time.time_ns."""
    return lambda: _now_ns("time_ns", fail_open.caller()) if _log.is_on else original()


def wrap_of_seconds(original: Any) -> Any:
    """time.localtime, gmtime and ctime, of now if called without seconds."""

    def of_seconds(*seconds: Any) -> Any:
        if not _log.is_on or seconds not in ((), (None,)):
            return original(*seconds)
        return original(_now_ns("seconds", fail_open.caller()) / 1e9)

    return of_seconds


def wrap_text(original: Any) -> Any:
    """time.asctime, and time.strftime with its format alone: of now, if called without a time."""

    def text(*args: Any) -> Any:
        if not _log.is_on or (args and not (len(args) == 1 and type(args[0]) is str)):
            return original(*args)
        return original(*args, _localtime(_now_ns("strftime" if args else "asctime", fail_open.caller()) / 1e9))

    return text


def wrap_getpid(original: Any) -> Any:
    """os.getpid: TensorBoard gets the lost rank's, for file names. Other code may look up or signal its own process."""

    def getpid() -> Any:
        if not _log.is_on:
            return original()
        caller = fail_open.caller()
        is_name = str(caller.f_globals.get("__name__")).startswith("tensorboard.")
        return draw("pid", original, caller) if is_name else original()

    return getpid


# The attributes of datetime.datetime, a C type, cannot be set; its dictionary can. The methods are restored at the
# first step, as ours are slow.

_originals: dict[str, Any] = {}
_why_no_datetime = ""


def _dictionary_of(kind: type) -> dict[str, Any]:
    attributes: Any = gc.get_referents(kind.__dict__)[0]
    if type(attributes) is not dict or attributes.get("now") is not kind.__dict__["now"]:
        raise TypeError(f"this Python stores the attributes of {kind} in another way")
    return attributes


def _set_datetime(methods: dict[str, Any]) -> None:
    _dictionary_of(datetime.datetime).update(methods)
    modified: Any = ctypes.pythonapi.PyType_Modified
    modified.argtypes = [ctypes.py_object]
    modified.restype = None
    modified(datetime.datetime)


def _patch_datetime() -> None:
    if _originals:
        return
    global _why_no_datetime
    functions = {name: datetime.datetime.__dict__[name] for name in ("now", "utcnow")}
    try:
        _set_datetime({"now": classmethod(_now), "utcnow": classmethod(_utcnow)})
    except Exception as error:
        _why_no_datetime = f"a replacement gets another datetime.now(), and so other names made from it: {error!r}"
        return
    _originals.update(functions)


def why_not() -> str:
    """Which times are not repeated for a replacement, and why; "" if all are."""
    return _why_no_datetime


def _restore_datetime() -> None:
    if _originals:
        with contextlib.suppress(Exception):
            _set_datetime(_originals)
            _originals.clear()


def _now(cls: Any, tz: Any = None) -> Any:
    """Return new datetime object local to tz, or without one if it is None."""
    nanoseconds = _now_ns("now", sys._getframe(1)) if _log.is_on else _clock_ns()
    return cls.fromtimestamp(nanoseconds // 10**9, tz).replace(microsecond=nanoseconds // 1000 % 10**6)


def _utcnow(cls: Any) -> Any:
    """Return a new datetime representing UTC day and time."""
    nanoseconds = _now_ns("utcnow", sys._getframe(1)) if _log.is_on else _clock_ns()
    moment = cls.fromtimestamp(nanoseconds // 10**9, datetime.UTC)
    return moment.replace(microsecond=nanoseconds // 1000 % 10**6, tzinfo=None)


os.register_at_fork(after_in_child=end)


_USING_IT = frozenset({"random", "secrets", "uuid"})
_drawn = 0


def wrap_urandom(original: Any) -> Any:
    """os.urandom, which `secrets`, `uuid.uuid4` and `random.SystemRandom` use: count the script's draws."""

    def urandom(size: int) -> bytes:
        global _drawn
        session = current()
        if is_on():
            caller = _caller_with_a_name(fail_open.caller())
            drawn: bytes = draw(f"urandom {size}", lambda: original(size), caller)
            return drawn
        if session is not None and session.applied and _is_asked_by_user(fail_open.caller()):
            _drawn += 1
        drawn = original(size)
        return drawn

    return urandom


def _is_asked_by_user(frame: FrameType | None) -> bool:
    """Whether the user's own code draws, directly or through a module that uses os.urandom."""
    while frame is not None and frame.f_globals.get("__name__") in _USING_IT:
        frame = frame.f_back
    return frame is not None and is_script_code(frame.f_code.co_filename)


def _caller_with_a_name(frame: FrameType | None) -> FrameType | None:
    """The code that draws a name or a seed; None for a secret, which is not kept."""
    while frame is not None and frame.f_globals.get("__name__") in _USING_IT:
        if frame.f_globals.get("__name__") == "secrets":
            return None
        frame = frame.f_back
    return frame


def drawn_since_last_asked() -> int:
    """The number of the script's draws since the previous call."""
    global _drawn
    drawn, _drawn = _drawn, 0
    return drawn
