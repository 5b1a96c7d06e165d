"""One table: the text of an error of a device or a communication library -> a fault, and the rung that answers it.

Short texts only, since the same error is printed in two shapes: in full (`[ERROR] date (PID:.., Device:.., RankID:..)
ERR00100 ...`, with the runtime's traceback) and in short (TORCH_NPU_COMPACT_ERROR_OUTPUT=1). Only RuntimeErrors are
looked at, as the vendors raise no others; what a configuration adds (`device_errors`) is looked for in any exception.

No torch is imported: the agent, `ttprun doctor` and the configuration read it too. Read ROWS first; the first row whose
text is found wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property

from ttprun.device.updates import UpdateTimes


class DeviceFault(StrEnum):
    """What has happened to the device, as far as its recovery depends on it."""

    MEMORY_TEMPORARY = "memory-temporary"  # device memory failed that nothing needs any more: the step can be run again
    MEMORY_PERSISTENT = "memory-persistent"  # memory failed that held state: it is released, and comes from a peer
    MEMORY_CORRUPTED = "memory-corrupted"  # wrong data may have been used, or it is not known which memory failed
    MEMORY_OUTSIDE_POOL = (
        "memory-outside-pool"  # it belongs to no tensor (buffers of a library): only a new process helps
    )
    LINK = "link"  # a connection between devices broke
    REMOTE_SUSPECT = "remote-suspect"  # another device, or its process, is thought to have failed
    COLLECTIVE_TIMEOUT = "collective-timeout"  # a device has waited too long, mostly for another rank
    FORCED_STOP = "forced-stop"  # this rank was stopped on purpose; nothing of it is broken
    DEVICE_LOST = "device-lost"  # this process can use its device no more: its context is lost, or the device is
    PRECISION = "precision"  # the numbers are wrong, perhaps in all ranks
    UNKNOWN = "unknown"  # no device error, as far as we know


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
    DeviceFault.PRECISION: "restart",
    DeviceFault.UNKNOWN: "replace",
}


@dataclass(frozen=True)
class Row:
    """One error.

    library   who prints it
    pattern   regular expression, searched for in "Type: message"
    rung      where the answer starts; "": at the fault's own rung
    is_dated  its text says when it happened, and if the newest update of the optimizer had begun by then, the memory is
              `memory-persistent`, whatever `fault` says
    """

    library: str
    pattern: str
    fault: DeviceFault
    rung: str = ""
    is_dated: bool = False


def _acl(text: str, reason: str, code: int) -> str:
    """torch_npu's own words, or the runtime's reason, or the error's number in the way that torch_npu prints it."""
    return rf"\b{text}\b|reason=\[{reason}\]|error code is {code}\b"


def _cuda(text: str, code: int) -> str:
    """CUDA's text as torch prints it, or the number that an AcceleratorError carries."""
    return rf"CUDA (?:error|driver error|failure \d+)\W*{text}|Cuda failure (?:\d+ )?'{text}|error code is {code}\b"


_F = DeviceFault
ROWS: tuple[Row, ...] = (
    # Ascend: torch_npu and its runtime. `UCE ERROR` alone does not say which memory: `Device.check_memory` does.
    Row("torch_npu", _acl("UCE ERROR", "device mem error", 507053), _F.MEMORY_PERSISTENT),
    # See `updates.py`.
    Row("torch_npu", _acl("HBM MULTI BIT ECC", "hbm Multi-bit ECC error", 507054), _F.MEMORY_CORRUPTED, is_dated=True),
    # Also raised for an address out of range: what has been read and written is not known.
    Row("torch_npu", _acl("SUSPECT MEM ERROR", "suspect device mem error", 507055), _F.MEMORY_CORRUPTED),
    Row("torch_npu", _acl("FORCE STOP", "device task abort", 107022), _F.FORCED_STOP),
    Row("torch_npu", _acl("HCCL OP RETRY FAILED", "hccl op retry failed", 507904), _F.LINK),
    Row("torch_npu", _acl("SUSPECT REMOTE ERROR", "suspect remote error", 507057), _F.REMOTE_SUSPECT),
    Row("torch_npu", _acl("(?:HCCS|UB) LINK ERROR", "(?:link error|device network link error)", 507056), _F.LINK),
    Row("torch_npu", r"reason=\[lost heartbeat\]|error code is 507010\b", _F.DEVICE_LOST),
    Row("torch_npu", r"reason=\[aicore (?:timeout|exception)\]|error code is 50701[45]\b", _F.DEVICE_LOST),
    Row("torch_npu", r"reason=\[(?:task|stream sync) timeout\]|error code is 107020\b", _F.COLLECTIVE_TIMEOUT),
    Row("torch_npu", r"error code is (?:507046|507048)\b", _F.COLLECTIVE_TIMEOUT),
    Row("HCCL", r"\bEI0002\b", _F.COLLECTIVE_TIMEOUT),  # a notify wait
    Row("HCCL", r"\bEI0006\b", _F.LINK),  # a socket could not be built
    Row("HCCL", r"\bHCCL_E_REMOTE\b", _F.REMOTE_SUSPECT),
    # Words between MindIO and the frameworks that it serves; torch_npu never raises them.
    Row("MindIO", r"\bARF FINISH\b", _F.FORCED_STOP),
    Row("MindIO", r"\bSTEP FINISH\b", _F.FORCED_STOP),
    Row("MindIO", r"\bPRECISION ERROR\b", _F.PRECISION),
    # CUDA, errors that are sticky by the words of cuda.h ("the process must be terminated and relaunched"): whatever
    # this process asks of the device fails the same way from now on, so rerun is no answer, whatever `retry_on` says.
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
    # Not sticky, but the device is not there.
    Row("CUDA", _cuda("no CUDA-capable device is detected", 100), _F.DEVICE_LOST),
    Row("CUDA", _cuda(r"(?:all )?CUDA-capable device\(?s\)? (?:is/)?are busy or unavailable", 46), _F.DEVICE_LOST),
    Row("CUDA", _cuda("unknown error", 999), _F.DEVICE_LOST),
    Row("CUDA", r"GPU is lost|GPU has fallen off the bus|No CUDA GPUs are available", _F.DEVICE_LOST),
    # NCCL, by way of torch. What its watchdog says of a time-out comes before what was done about it.
    Row("NCCL", r"Watchdog caught collective operation timeout", _F.COLLECTIVE_TIMEOUT),
    Row("NCCL", r"\bncclRemoteError\b", _F.REMOTE_SUSPECT),
    Row("NCCL", r"\bncclSystemError\b", _F.LINK),
    Row("NCCL", r"\bncclUnhandledCudaError\b", _F.DEVICE_LOST),
    Row("NCCL", r"NCCL communicator (?:was|has been) aborted|NCCL watchdog thread terminated", _F.LINK),
    # gloo, by way of torch. Its file comes first: "Connection reset by peer" alone may be a data server's.
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


@dataclass(frozen=True)
class Diagnosis:
    """What the table says of one error.

    rung      where the answer starts
    is_dated  it follows from when the error happened: after such an error the device itself calls all failed memory
              persistent, whether something holds it or not
    """

    fault: DeviceFault
    rung: str
    is_dated: bool = False

    @property
    def name(self) -> str:
        """The fault in a word, "" if it is no device error."""
        return str(self.fault) if self.is_known else ""

    @property
    def is_known(self) -> bool:
        """Whether this is a device error at all."""
        return self.fault is not DeviceFault.UNKNOWN

    @property
    def can_wait(self) -> bool:
        """Whether a script that waits for a collective need not hear of it: connections are built anew under it.

        What nobody knows may be a connection that broke in a way of its own.
        """
        return not self.is_known or self.rung == "reconnect"

    @property
    def can_stay(self) -> bool:
        """Whether the process can go on with its device.

        A link's error that has ended the script, outside of a collective, asks for the next rung, which is rerun.
        """
        return self.rung in ("reconnect", "rerun")


def diagnosis_of(fault: DeviceFault, rung: str = "", is_dated: bool = False) -> Diagnosis:
    """The answer to a fault, at its own rung unless another is given."""
    return Diagnosis(fault, rung or ANSWERS[fault], is_dated)


@dataclass(frozen=True)
class DeviceErrors:
    """The table, with what a configuration adds to it.

    additions   pattern -> name of a fault; they come before our rows, and "unknown" takes an error off the table
    """

    additions: Mapping[str, str]

    def diagnose(self, error: BaseException, updates: UpdateTimes | None = None) -> Diagnosis:
        """What an exception means, or else that from which it was raised (`raise ... from`).

        updates   when the optimizer was last updated; None: not known, so that no error is proved to be newer
        """
        for found in _chain(error):
            told = _text_of(found)
            for pattern, fault in self._added:
                if pattern.search(told):
                    return diagnosis_of(fault)
            if isinstance(found, RuntimeError) and (row := row_of(told)) is not None:
                if row.is_dated and updates is not None and updates.is_repairable_by(told):
                    return diagnosis_of(DeviceFault.MEMORY_PERSISTENT, is_dated=True)
                return diagnosis_of(row.fault, row.rung)
        return diagnosis_of(DeviceFault.UNKNOWN)

    @cached_property
    def _added(self) -> list[tuple[re.Pattern[str], DeviceFault]]:
        return [(re.compile(pattern), DeviceFault(fault)) for pattern, fault in self.additions.items()]


def row_of(text: str) -> Row | None:
    """The first row that is found in a text, None if there is none."""
    return next((row for pattern, row in _compiled() if pattern.search(text)), None)


@cache
def _compiled() -> list[tuple[re.Pattern[str], Row]]:
    """Not when imported: every rank imports this, and few meet an error."""
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
    """An error's type, and the first line of what it says."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # an error's own __str__ may fail
        lines = []
    name = type(error).__name__
    return f"{name}: {lines[0][:_MESSAGE_LENGTH]}" if lines else name


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__


def _text_of(error: BaseException) -> str:
    """ "Type: message", and the number that torch.AcceleratorError carries; "" if the error cannot say what it is."""
    try:
        code = getattr(error, "error_code", None)
        return f"{type(error).__name__}: {error}" + (f" [error code is {code}]" if isinstance(code, int) else "")
    except Exception:  # an error's own __str__ may fail
        return ""
