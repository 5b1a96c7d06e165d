"""One job a save directory: a lock that the kernel gives back however the job ends, with the job's name in it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from ttprun.state.errors import SaveDirectoryInUseError

LOCK_NAME = ".ttprun.lock"
logger = logging.getLogger(__name__)


class DirectoryLock:
    """The right to write to a save directory, as long as this process lives or until `release`.

    is_exclusive  False on a file system without locks: two jobs in one directory are then the user's to avoid
    """

    def __init__(self, save_dir: Path, run_id: str) -> None:
        """Take the lock, without waiting. Raises SaveDirectoryInUseError, or OSError if nothing can be written there.

        The file itself is never removed: a job that waits at an old file and one with a new one would both hold it.
        """
        self.run_id = run_id
        self.is_exclusive = True
        self._fd = os.open(save_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read_holder(self._fd)
            os.close(self._fd)
            raise SaveDirectoryInUseError(save_dir, *holder) from None
        except OSError as error:
            self.is_exclusive = False
            logger.warning(
                "'%s' is on a file system without locks (%s); make sure that no other job writes there",
                save_dir,
                error.strerror,
            )
        text = json.dumps({"run_id": run_id, "pid": os.getpid(), "host": os.uname().nodename})
        with suppress(OSError):  # a full disk: the lock holds all the same, only without a name
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, text.encode() + b"\n", 0)

    def release(self) -> None:
        """Give the directory back before this process ends."""
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
        os.close(self._fd)


def _read_holder(fd: int) -> tuple[str | None, int | None, str | None]:
    """Run id, pid and host of the job that holds the lock; None for each if it has not written them."""
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
        return str(holder["run_id"]), int(holder["pid"]), str(holder["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None, None
