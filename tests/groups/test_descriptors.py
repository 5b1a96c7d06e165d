"""What we open in a rank: none of it is open in what the script starts."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

from ttprun.groups.connection import Exchange
from ttprun.groups.gloo import Connection

LOOK = "import os; print(sorted(os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd') if fd != '3'))"


class DeafChannel:
    """A line to an agent that says nothing."""

    def send(self, message: Any, fds: Any = ()) -> None:
        """Nobody hears it."""


def seen_by_child() -> str:
    """The files that are open in a child which inherits all that it may."""
    with open(os.devnull) as nothing:
        look = subprocess.run(
            [sys.executable, "-S", "-c", LOOK], stdin=nothing, capture_output=True, close_fds=False, check=True
        )
    return "".join("|" if letter.isdigit() else letter for letter in look.stdout.decode())


def test_a_child_of_a_rank_inherits_none_of_its_connections() -> None:
    before = seen_by_child()

    connection = Connection(Exchange(DeafChannel()), 0, "all", rank=0, size=1, op_limit=timedelta(seconds=5))  # type: ignore[arg-type]

    assert seen_by_child() == before
    connection.close()
