"""Report the modules that a standby should have imported and compiled to replace a rank quickly."""

from __future__ import annotations

import os
import sys

from ttprun.capture.position import user_code
from ttprun.protocol import standby_messages
from ttprun.rank.session import Session


def report(session: Session) -> None:
    """Report once, after the first step, what this rank has imported."""
    if session.local_rank == 0:
        modules = [name for name in sys.modules if name.startswith("torch.")]
        session.channel.send(standby_messages.WarmUp(modules, list(user_code.followed)))
    if session.framework is None:
        session.channel.send(standby_messages.Imported(user_code.modules(), os.getcwd()))
