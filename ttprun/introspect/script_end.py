"""Whether the script has nothing left to do: its last statement, `main()` mostly, is returning."""

from __future__ import annotations

import dis
from types import FrameType


def is_reached(frame: FrameType | None) -> bool:
    """Whether this frame is the script itself, in a statement outside of all loops behind which there is no other.

    frame   the innermost one that is not ours
    """
    if frame is None or frame.f_code.co_name != "<module>" or frame.f_globals.get("__name__") != "__main__":
        return False
    lines = list(frame.f_code.co_positions())
    ends_at = lines[frame.f_lasti // 2][1] or 0
    if any((line or 0) > ends_at for line, *_ in lines[frame.f_lasti // 2 + 1 :]):
        return False
    return not any(
        one.offset > frame.f_lasti and one.opname.startswith("JUMP_BACKWARD")
        for one in dis.get_instructions(frame.f_code)
    )
