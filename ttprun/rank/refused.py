"""An operation that the device or the connection has refused: it looks like the backend's work, and has failed."""

from __future__ import annotations

from typing import Any

import torch


class Refused:
    """Work that was never begun.

    error   with which it was refused
    """

    def __init__(self, error: Exception) -> None:
        self._error = error.with_traceback(None)

    def wait(self, *limit: Any) -> bool:
        """As Work.wait. Raises the error."""
        raise self._error.with_traceback(None)

    def is_completed(self) -> bool:
        """It touches no tensor."""
        return True

    def is_success(self) -> bool:
        """It has failed."""
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        """One that has failed."""
        promise: torch.futures.Future[Any] = torch.futures.Future()
        failed = promise.then(lambda _: self.wait())
        promise.set_result(None)
        return failed
