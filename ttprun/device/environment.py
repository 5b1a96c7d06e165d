"""What a rank's environment has for NCCL's and HCCL's sake: torch and torch_npu read it once, as they are imported.

With their defaults both end the process when an operation fails or is late, and with it a survivor of a fault. The
launcher sets these for each rank and each standby before its Python starts: a later change of the environment may crash
a thread of C++ that reads it. A value that the user has given is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping

NCCL_VARIABLES: dict[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's default ends the process when an operation fails or is late
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the watchdog thread would end the process with a CUDA error of its own
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # the monitor thread ends the process when the watchdog waits for an abort
    # The watchdog sleeps for a minute after a failed operation, and a communicator's destructor waits for it. It also
    # asks our store, in Python, once a second whether another rank has failed.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
}
HCCL_VARIABLES: dict[str, str] = {
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": "0",  # HCCL's watchdog would end the process
    "TORCH_HCCL_ENABLE_MONITORING": "0",  # the rest as of NCCL
    "TORCH_HCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_HCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_HCCL_DESYNC_DEBUG": "0",
}
VARIABLES = NCCL_VARIABLES | HCCL_VARIABLES

# With it torch handles errors of NCCL itself, whatever the variables above say.
DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
DEBUG_NOTE = (
    f"{DEBUG_VARIABLE}=DETAIL: torch then ends a process whose collective has failed, so a survivor of a fault may "
    "be ended too, and all ranks restart: leave it unset in a long job"
)


def is_debugging(environment: Mapping[str, str]) -> bool:
    """Whether the user has asked for torch's own handling of errors."""
    return environment.get(DEBUG_VARIABLE, "").upper() == "DETAIL"
