"""How the interface finds this process's session and framework."""

from __future__ import annotations

from ttprun.rank.framework.framework import Framework
from ttprun.rank.session import Session, current


def has_framework() -> bool:
    """Whether this process is a rank whose framework recovers by callbacks."""
    session = current()
    return session is not None and session.framework is not None


def this_rank() -> tuple[Session, Framework]:
    """This rank's session and framework. Raises RuntimeError in any other process."""
    session = current()
    framework = session.framework if session is not None else None
    if session is None or not isinstance(framework, Framework):
        raise RuntimeError("mindio_ttp: this process is not a protected rank; start the script with: ttprun --mindio")
    return session, framework
