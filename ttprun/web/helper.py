"""A process beside the launcher that only reads the run directory: started in a session of its own, so that Ctrl-C is
for the launcher, and ended by closing its standard input.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def start(module: str, *words: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start `python -m module words`. Raises OSError if there is no room for it."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Let it come to its end, and wait until it is gone: `limit_s` seconds at most."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
