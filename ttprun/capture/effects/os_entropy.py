"""Randomness of the operating system: it cannot be recorded, so a replacement would draw other numbers.

Draws before the first step mostly seed a generator whose state is recorded, or name a file: a replacement's setup gets
the same (origins.py), unless they are secrets. A script that draws during its steps cannot be replayed: the number of
draws is in each boundary's record.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from ttprun.capture.effects import origins
from ttprun.capture.host import current
from ttprun.introspect import fail_open
from ttprun.introspect.whose import is_script_code

_USING_IT = frozenset({"random", "secrets", "uuid"})
_drawn = 0


def wrap_urandom(original: Any) -> Any:
    """os.urandom, which `secrets`, `uuid.uuid4` and `random.SystemRandom` use: count the script's draws."""

    def urandom(size: int) -> bytes:
        global _drawn
        session = current()
        if origins.is_on():
            caller = _caller_with_a_name(fail_open.caller())
            drawn: bytes = origins.draw(f"urandom {size}", lambda: original(size), caller)
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
