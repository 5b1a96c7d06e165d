"""One table: the message of a device's or communication library's error -> a fault, and the rung that answers it.

Patterns are short, since the same error is printed in two forms: in full (`[ERROR] date (PID:.., Device:.., RankID:..)
ERR00100 ...`, with the runtime's traceback) and in short (TORCH_NPU_COMPACT_ERROR_OUTPUT=1). Only RuntimeErrors are
checked, as the vendors raise no others; additions of a configuration (`device_errors`) apply to any exception.

Does not import torch: the agent, `ttprun doctor` and the configuration read it too. Read ROWS first; the first row that
matches wins. VARIABLES keeps the libraries from answering errors by themselves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property

# The times of optimizer updates, which decide whether failed device memory can be repaired. A multi-bit ECC error
# carries its time. Memory that failed after the newest update began cannot have corrupted the state of an earlier
# update; memory that failed before may have. The rule is MindIO's (`_can_do_repair`).

_clock_ns = time.time_ns  # the script's is recorded
_TIME = re.compile(r"time us=\s*(\d+)")  # torch_npu's own pattern has a space there, MindIO's has none


def now_us() -> int:
    """The clock used for the device's: microseconds since 1970."""
    return _clock_ns() // 1000


def error_time_us(text: str) -> int | None:
    """The time in an error's message, by the device's clock; None if it has none."""
    match = _TIME.search(text)
    return int(match.group(1)) if match else None


class UpdateTimes:
    """When the newest update of the optimizer began and ended, by the device's clock in microseconds; 0: not yet.

    During an update, `end_us` is that of the previous one.
    """

    def __init__(self, clock_us: Callable[[], int] = now_us) -> None:
        self.clock_us = clock_us
        self.start_us = 0
        self.end_us = 0

    def begin(self) -> None:
        """An update begins now."""
        self.start_us = self.clock_us()

    def end(self) -> None:
        """It has ended."""
        self.end_us = self.clock_us()

    def can_repair(self, error_us: int | None, start_us: int | None = None, end_us: int | None = None) -> bool:
        """Whether memory that failed at that time can be repaired: no kept state can be corrupted.

        error_us          when it failed; None: unknown
        start_us, end_us  of the newest update; None: as noted here
        """
        start = self.start_us if start_us is None else start_us
        end = self.end_us if end_us is None else end_us
        if not error_us or not start:
            return False
        return error_us > max(start, end) or start <= error_us <= end

    def is_repairable_by(self, text: str) -> bool:
        """Whether the memory that an error's message dates can be repaired. A time in the future proves nothing."""
        error_us = error_time_us(text)
        return error_us is not None and error_us <= self.clock_us() and self.can_repair(error_us)


class DeviceFault(StrEnum):
    """The kinds of device errors that recovery distinguishes."""

    MEMORY_TEMPORARY = "memory-temporary"  # unused device memory has failed: the step can be run again
    MEMORY_PERSISTENT = "memory-persistent"  # memory with state has failed: it is released, the state comes from a peer
    MEMORY_CORRUPTED = "memory-corrupted"  # wrong data may have been used, or it is unknown which memory has failed
    MEMORY_OUTSIDE_POOL = "memory-outside-pool"  # a library's buffers, not tensors, have failed: needs a new process
    LINK = "link"  # a connection between devices broke
    REMOTE_SUSPECT = "remote-suspect"  # another device, or its process, has probably failed
    COLLECTIVE_TIMEOUT = "collective-timeout"  # a device has waited too long, mostly for another rank
    FORCED_STOP = "forced-stop"  # this rank was stopped on purpose, and is not broken
    DEVICE_LOST = "device-lost"  # this process cannot use its device any more: its context, or the device, is lost
    DEVICE_BUSY = "device-busy"  # another process, mostly the lost one, has not given the device or its memory back yet
    PRECISION = "precision"  # the numbers are wrong, perhaps in all ranks
    UNKNOWN = "unknown"  # not a device error, as far as we know


# Fault -> the rung (`recovery.job.RUNGS`) at which its answer starts.
# "precision" should start at "rewind", but a snapshot holds no proof that it was taken before the numbers went wrong.
ANSWERS: dict[DeviceFault, str] = {
    DeviceFault.MEMORY_TEMPORARY: "rerun",
    DeviceFault.MEMORY_PERSISTENT: "rerun",
    DeviceFault.MEMORY_CORRUPTED: "replace",
    DeviceFault.MEMORY_OUTSIDE_POOL: "replace",
    DeviceFault.LINK: "reconnect",
    DeviceFault.REMOTE_SUSPECT: "reconnect",
    DeviceFault.COLLECTIVE_TIMEOUT: "reconnect",
    DeviceFault.FORCED_STOP: "rerun",
    DeviceFault.DEVICE_LOST: "replace",
    DeviceFault.DEVICE_BUSY: "replace",
    DeviceFault.PRECISION: "restart",
    DeviceFault.UNKNOWN: "replace",
}


@dataclass(frozen=True)
class Row:
    """One error.

    library   that prints it
    pattern   regular expression, searched for in "Type: message"
    rung      where the answer starts; "": at the fault's own rung
    is_dated  its message has a time; if the newest update of the optimizer had begun by then, the fault is
              `memory-persistent` instead
    """

    library: str
    pattern: str
    fault: DeviceFault
    rung: str = ""
    is_dated: bool = False


def _acl(text: str, reason: str, code: int) -> str:
    """torch_npu's own name, or the runtime's reason, or the error's number as torch_npu prints it."""
    return rf"\b{text}\b|reason=\[{reason}\]|error code is {code}\b"


def _cuda(text: str, code: int) -> str:
    """CUDA's message as torch prints it, or the number in an AcceleratorError."""
    return rf"CUDA (?:error|driver error|failure \d+)\W*{text}|Cuda failure (?:\d+ )?'{text}|error code is {code}\b"


_F = DeviceFault
ROWS: tuple[Row, ...] = (
    # Ascend: torch_npu and its runtime. `UCE ERROR` does not say which memory: see `Device.check_memory`.
    Row("torch_npu", _acl("UCE ERROR", "device mem error", 507053), _F.MEMORY_PERSISTENT),
    # See `UpdateTimes`.
    Row("torch_npu", _acl("HBM MULTI BIT ECC", "hbm Multi-bit ECC error", 507054), _F.MEMORY_CORRUPTED, is_dated=True),
    # Also raised for an address out of range: it is unknown what has been read and written.
    Row("torch_npu", _acl("SUSPECT MEM ERROR", "suspect device mem error", 507055), _F.MEMORY_CORRUPTED),
    Row("torch_npu", _acl("FORCE STOP", "device task abort", 107022), _F.FORCED_STOP),
    # These stop the device's queue: what it had still to compute is lost, so no new connection alone is the answer.
    Row("torch_npu", _acl("HCCL OP RETRY FAILED", "hccl op retry failed", 507904), _F.LINK, rung="rerun"),
    Row("torch_npu", _acl("SUSPECT REMOTE ERROR", "suspect remote error", 507057), _F.REMOTE_SUSPECT, rung="rerun"),
    Row("torch_npu", _acl("(?:HCCS|UB) LINK ERROR", "(?:device network )?link error", 507056), _F.LINK, rung="rerun"),
    Row("torch_npu", r"reason=\[lost heartbeat\]|error code is 507010\b", _F.DEVICE_LOST),
    Row("torch_npu", r"reason=\[aicore (?:timeout|exception)\]|error code is 50701[45]\b", _F.DEVICE_LOST),
    Row("torch_npu", r"reason=\[(?:task|stream sync) timeout\]|error code is 107020\b", _F.COLLECTIVE_TIMEOUT),
    Row("torch_npu", r"error code is (?:507046|507048)\b", _F.COLLECTIVE_TIMEOUT),
    Row("HCCL", r"\bEI0002\b", _F.COLLECTIVE_TIMEOUT),  # a notify wait
    Row("HCCL", r"\bEI0006\b", _F.LINK),  # a socket could not be built
    Row("HCCL", r"\bHCCL_E_REMOTE\b", _F.REMOTE_SUSPECT),
    # Used between MindIO and frameworks; torch_npu never raises them.
    Row("MindIO", r"\bARF FINISH\b", _F.FORCED_STOP),
    Row("MindIO", r"\bSTEP FINISH\b", _F.FORCED_STOP),
    Row("MindIO", r"\bPRECISION ERROR\b", _F.PRECISION),
    # CUDA, errors that are sticky according to cuda.h ("the process must be terminated and relaunched"): every later
    # operation of this process fails too, so rerun cannot help, whatever `retry_on` says.
    Row("CUDA", _cuda("uncorrectable ECC error encountered", 214), _F.MEMORY_CORRUPTED),
    Row("CUDA", _cuda("uncorrectable NVLink error detected", 220), _F.LINK, rung="replace"),
    Row("CUDA", _cuda("Invalid access of peer GPU memory over nvlink", 226), _F.REMOTE_SUSPECT, rung="replace"),
    Row("CUDA", _cuda("an illegal memory access was encountered", 700), _F.DEVICE_LOST),
    Row("CUDA", _cuda("the launch timed out and was terminated", 702), _F.DEVICE_LOST),
    Row("CUDA", _cuda("context is destroyed", 709), _F.DEVICE_LOST),
    Row("CUDA", _cuda("device-side assert triggered", 710), _F.DEVICE_LOST),
    Row("CUDA", _cuda("hardware stack error", 714), _F.DEVICE_LOST),
    Row("CUDA", _cuda("an illegal instruction was encountered", 715), _F.DEVICE_LOST),
    Row("CUDA", _cuda("misaligned address", 716), _F.DEVICE_LOST),
    Row("CUDA", _cuda("operation not supported on global/shared address space", 717), _F.DEVICE_LOST),
    Row("CUDA", _cuda("invalid program counter", 718), _F.DEVICE_LOST),
    Row("CUDA", _cuda("unspecified launch failure", 719), _F.DEVICE_LOST),
    Row("CUDA", _cuda("tensor memory not completely freed", 721), _F.DEVICE_LOST),
    # Not sticky, but the device is missing.
    Row("CUDA", _cuda("no CUDA-capable device is detected", 100), _F.DEVICE_LOST),
    Row("CUDA", _cuda(r"(?:all )?CUDA-capable device\(?s\)? (?:is/)?are busy or unavailable", 46), _F.DEVICE_BUSY),
    Row("CUDA", _cuda("unknown error", 999), _F.DEVICE_LOST),
    Row("CUDA", r"GPU is lost|GPU has fallen off the bus|No CUDA GPUs are available", _F.DEVICE_LOST),
    # NCCL, as torch reports it. The watchdog's time-out comes before the abort that follows it.
    Row("NCCL", r"Watchdog caught collective operation timeout", _F.COLLECTIVE_TIMEOUT),
    Row("NCCL", r"\bncclRemoteError\b", _F.REMOTE_SUSPECT),
    # A communicator could not be made, mostly as a member has gone.
    Row("NCCL", r"ncclUniqueId .*store->get\(.*got error", _F.REMOTE_SUSPECT),
    Row("NCCL", r"\bncclInternalError\b", _F.LINK),
    Row("NCCL", r"\bncclSystemError\b", _F.LINK),
    Row("NCCL", r"\bncclUnhandledCudaError\b", _F.DEVICE_LOST),
    Row("NCCL", r"NCCL communicator (?:was|has been) aborted|NCCL watchdog thread terminated", _F.LINK),
    # gloo, as torch reports it. With its file name: "Connection reset by peer" alone may be a data server's.
    Row("gloo", r"/gloo/transport/\S+\] Timed out waiting \d+ms for (?:recv|send) operation", _F.COLLECTIVE_TIMEOUT),
    Row("gloo", r"Application timeout caused pair closure", _F.COLLECTIVE_TIMEOUT),  # by the operation before this one
    Row("gloo", r"failed to pass monitoredBarrier in \d+ ms", _F.COLLECTIVE_TIMEOUT),
    Row(
        "gloo",
        r"/gloo/transport/\S+\] .*(?:Connection (?:closed|reset) by peer|Connection refused|Broken pipe)",
        _F.LINK,
    ),
    Row("gloo", r"Gloo connectFullMesh failed with", _F.LINK),
)


_MESSAGE_LENGTH = 300


_OF_COMPUTATIONS = (_F.MEMORY_TEMPORARY, _F.MEMORY_PERSISTENT, _F.MEMORY_CORRUPTED, _F.DEVICE_LOST, _F.FORCED_STOP)


@dataclass(frozen=True)
class Diagnosis:
    """The table's answer for one error.

    rung      where the answer starts
    is_dated  it follows from the error's time: the device reports all failed memory as persistent then, used or not
    """

    fault: DeviceFault
    rung: str
    is_dated: bool = False

    @property
    def name(self) -> str:
        """The fault's name, "" if it is not a device error."""
        return str(self.fault) if self.is_known else ""

    @property
    def is_known(self) -> bool:
        """Whether this is a device error."""
        return self.fault is not DeviceFault.UNKNOWN

    @property
    def is_of_computation(self) -> bool:
        """Whether any operation on the device may raise it, and not only a collective."""
        return self.fault in _OF_COMPUTATIONS

    @property
    def can_wait(self) -> bool:
        """Whether a script that waits for a collective keeps waiting, since new connections may solve it.

        An unknown error may be a broken connection.
        """
        return not self.is_known or self.rung == "reconnect"

    @property
    def can_stay(self) -> bool:
        """Whether the process can keep its device.

        A link error outside a collective, which has ended the script, needs the next rung, which is rerun.
        """
        return self.rung in ("reconnect", "rerun")


def diagnosis_of(fault: DeviceFault, rung: str = "", is_dated: bool = False) -> Diagnosis:
    """The answer to a fault.

    rung       where the answer starts; "": the fault's own, in ANSWERS
    is_dated   as in Diagnosis
    """
    return Diagnosis(fault, rung or ANSWERS[fault], is_dated)


@dataclass(frozen=True)
class DeviceErrors:
    """The table, with a configuration's additions.

    additions   pattern -> name of a fault; before our rows, and "unknown" removes an error from the table
    """

    additions: Mapping[str, str]

    def diagnose(self, error: BaseException, updates: UpdateTimes | None = None) -> Diagnosis:
        """What an exception, or one of its causes (`raise ... from`), means.

        updates   times of the optimizer's updates; None: unknown, so no error is known to be newer
        """
        for cause in causes_of(error):
            message = _message_of(cause)
            for pattern, fault in self._added:
                if pattern.search(message):
                    return diagnosis_of(fault)
            if isinstance(cause, RuntimeError) and (row := row_of(message)) is not None:
                if row.is_dated and updates is not None and updates.is_repairable_by(message):
                    return diagnosis_of(DeviceFault.MEMORY_PERSISTENT, is_dated=True)
                return diagnosis_of(row.fault, row.rung)
        return diagnosis_of(DeviceFault.UNKNOWN)

    @cached_property
    def _added(self) -> list[tuple[re.Pattern[str], DeviceFault]]:
        return [(re.compile(pattern), DeviceFault(fault)) for pattern, fault in self.additions.items()]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or its allocator's share of it, had no memory left for the script."""
    return isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError"


def row_of(text: str) -> Row | None:
    """The first row that matches a message, None if none does."""
    return next((row for pattern, row in _compiled() if pattern.search(text)), None)


@cache
def _compiled() -> list[tuple[re.Pattern[str], Row]]:
    """Compiled late: every rank imports this module, and few need it."""
    return [(re.compile(row.pattern), row) for row in ROWS]


def check_additions(additions: Mapping[str, str]) -> None:
    """Raise ValueError, "what; cure", unless each key is a regular expression and each value a fault's name."""
    for pattern, fault in additions.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"'{pattern}' is not a regular expression; correct it ({error})") from None
        if fault not in list(DeviceFault):
            raise ValueError(f"'{pattern}' is '{fault}', which is not a fault; use one of {', '.join(DeviceFault)}")


def in_one_line(error: BaseException) -> str:
    """An error's type, and the first line of its message."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an error's own __str__ may fail
        lines = []
    name = type(error).__name__
    return f"{name}: {lines[0][:_MESSAGE_LENGTH]}" if lines else name


def causes_of(error: BaseException, also_handled: bool = False) -> Iterator[BaseException]:
    """An error and its causes (`raise ... from`); also_handled: and the errors that were handled when these came."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            pending += [cause.__cause__, cause.__context__ if also_handled else None]


def _message_of(error: BaseException) -> str:
    """ "Type: message", and the number in a torch.AcceleratorError; "" if the error's own __str__ fails."""
    try:
        code = getattr(error, "error_code", None)
        return f"{type(error).__name__}: {error}" + (f" [error code is {code}]" if isinstance(code, int) else "")
    except Exception:  # an error's own __str__ may fail
        return ""


# What a rank's environment has for NCCL's and HCCL's sake: torch and torch_npu read it once, as they are imported.
#
# With their defaults both end the process when an operation fails or is late, and with it a survivor of a fault. The
# launcher sets these for each rank and each standby before its Python starts: a later change of the environment may
# crash a thread of C++ that reads it. A value that the user has given is replaced.

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
    "HCCL_ASYNC_ERROR_HANDLING": "0",  # as the releases 2.6 to 2.9 call it, at least
    "HCCL_DESYNC_DEBUG": "0",
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
