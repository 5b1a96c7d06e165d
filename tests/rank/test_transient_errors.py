"""Which errors are answered by another run of the script in the same process."""

from __future__ import annotations

import pytest

from ttprun.device.errors import DeviceErrors
from ttprun.rank.rerun import is_transient

ADDITIONS = {"^ValueError: parity": "memory-temporary", "UCE ERROR": "unknown"}


@pytest.mark.parametrize(
    ("error", "retry_on", "additions", "expected"),
    [
        (RuntimeError("UCE ERROR"), [], {}, True),
        (RuntimeError("FORCE STOP"), [], {}, True),
        (RuntimeError("HCCS LINK ERROR"), [], {}, True),  # the script has been left: reconnecting is not enough
        (RuntimeError("CUDA error: misaligned address"), [], {}, False),
        (RuntimeError("CUDA error: misaligned address"), ["CUDA error"], {}, False),  # the process could do nothing
        (RuntimeError("PRECISION ERROR"), ["."], {}, False),
        (RuntimeError("out of memory"), [], {}, False),
        (RuntimeError("out of memory"), ["^RuntimeError: out of"], {}, True),
        (ValueError("parity"), [], ADDITIONS, True),
        (RuntimeError("UCE ERROR"), [], ADDITIONS, False),
        (RuntimeError("UCE ERROR"), ["UCE"], ADDITIONS, True),
    ],
)
def test_what_the_device_says_comes_before_what_the_user_says(
    error: Exception, retry_on: list[str], additions: dict[str, str], expected: bool
) -> None:
    assert is_transient(error, DeviceErrors(additions).diagnose(error), retry_on) is expected
