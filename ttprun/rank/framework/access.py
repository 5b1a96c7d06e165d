"""How the interface finds the framework's side of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttprun.rank.session import Session, current

if TYPE_CHECKING:
    from ttprun.rank.framework.framework import Framework


def has_framework() -> bool:
    """This process is a rank whose framework recovers by callbacks."""
    session = current()
    return session is not None and session.framework is not None


def this_rank() -> tuple[Session, Framework]:
    """Raises RuntimeError in any other process."""
    session = current()
    if session is None or session.framework is None:
        raise RuntimeError("mindio_ttp: this process is no rank that recovers; start the script with: ttprun --mindio")
    return session, session.framework
