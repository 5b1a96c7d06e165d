"""What `ttprun doctor` has found out about one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "fails"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    area     "software", "devices", "kernel", "limits", "network", "files" or "mindio"
    subject  the thing
    found    what is there: a version, a number
    level    "ok"; "note": it works, but something is less or worth knowing; "fails": recovery cannot work
    means    what works less, or not at all, because of it; "" if ok
    cure     what to do about it; "" if nothing
    """

    area: str
    subject: str
    found: str
    level: Level = "ok"
    means: str = ""
    cure: str = ""
