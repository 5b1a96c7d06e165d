"""The table from error texts to faults: each row is found in both shapes of an error, and nothing else is."""

import subprocess
import sys

import pytest

from ttprun.device.device_errors import ANSWERS, ROWS, DeviceErrors, DeviceFault, UpdateTimes, check_additions, row_of
from ttprun.recovery.job import RUNGS

TABLE = DeviceErrors({})
FULL = (
    "npuSynchronizeDevice:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:506 NPU function error: {}\n"
    "[ERROR] 2026-07-13-21:24:03 (PID:507053, Device:2, RankID:2) ERR00100 PTA call acl api failed.\n"
    "EH9999: Inner Error!\n"
    "        rtDeviceSynchronizeWithTimeout execute failed, reason=[{}][FUNC:FuncErrorReason][LINE:53]\n"
    "        TraceBack (most recent call last):\n"
)
IN_FULL = FULL.format("{}", "inner error")
COMPACT = "CANN error: {}"
TORCH_CUDA = (
    "CUDA error: {}\nSearch for `cudaErrorX' in https://docs.nvidia.com/cuda/ for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.\n"
)
OLD_CUDA = "CUDA error: {}\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}\nLast error:\nsocketPollConnect"
WATCHDOG = "[PG ID 0 PG GUID 0(default_pg) Rank 1] {}"
GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/{}. This is typically caused by a remote worker"
BARE = "{}"

# What is printed, the shapes in which it comes, what it means, and where the answer starts.
ERRORS: list[tuple[str, tuple[str, ...], str, str]] = [
    ("UCE ERROR, error code is 507053", (IN_FULL, COMPACT), "memory-persistent", "rerun"),
    ("UCE ERROR", (IN_FULL, COMPACT, BARE), "memory-persistent", "rerun"),
    ("HBM MULTI BIT ECC ERROR.time us= 91.time is 91", (IN_FULL, COMPACT), "memory-corrupted", "replace"),
    ("SUSPECT MEM ERROR", (IN_FULL, COMPACT), "memory-corrupted", "replace"),
    ("FORCE STOP", (IN_FULL, COMPACT, BARE), "forced-stop", "rerun"),
    ("FORCE STOP. By mindio-ttp BeginUpdating", (BARE,), "forced-stop", "rerun"),
    ("HCCL OP RETRY FAILED", (IN_FULL, COMPACT), "link", "rerun"),
    ("SUSPECT REMOTE ERROR", (IN_FULL, COMPACT), "remote-suspect", "rerun"),
    ("HCCS LINK ERROR", (IN_FULL, COMPACT), "link", "rerun"),
    ("UB LINK ERROR", (IN_FULL, COMPACT), "link", "rerun"),
    ("x, error code is 107022", (IN_FULL, COMPACT), "forced-stop", "rerun"),
    ("x, error code is 507054", (IN_FULL, COMPACT), "memory-corrupted", "replace"),
    ("x, error code is 507055", (IN_FULL, COMPACT), "memory-corrupted", "replace"),
    ("x, error code is 507056", (IN_FULL, COMPACT), "link", "rerun"),
    ("x, error code is 507057", (IN_FULL, COMPACT), "remote-suspect", "rerun"),
    ("x, error code is 507904", (IN_FULL, COMPACT), "link", "rerun"),
    ("x, error code is 507010", (IN_FULL, COMPACT), "device-lost", "replace"),
    ("x, error code is 507014", (IN_FULL, COMPACT), "device-lost", "replace"),
    ("x, error code is 507015", (IN_FULL, COMPACT), "device-lost", "replace"),
    ("x, error code is 107020", (IN_FULL, COMPACT), "collective-timeout", "reconnect"),
    ("x, error code is 507046", (IN_FULL, COMPACT), "collective-timeout", "reconnect"),
    ("x, error code is 507048[Error]: ", (IN_FULL, COMPACT), "collective-timeout", "reconnect"),
    (
        "EI0002: [PID: 7] The wait execution of the Notify register",
        (IN_FULL, COMPACT),
        "collective-timeout",
        "reconnect",
    ),
    ("EI0006: [PID: 7] Getting socket times out", (IN_FULL, COMPACT), "link", "reconnect"),
    ("HCCL_E_REMOTE: A call failed", (IN_FULL, COMPACT), "remote-suspect", "reconnect"),
    ("ARF FINISH", (BARE,), "forced-stop", "rerun"),
    ("STEP FINISH", (BARE,), "forced-stop", "rerun"),
    ("PRECISION ERROR load ckpt step=40", (BARE,), "precision", "restart"),
    ("uncorrectable ECC error encountered", (TORCH_CUDA, OLD_CUDA), "memory-corrupted", "replace"),
    ("uncorrectable NVLink error detected during the execution", (TORCH_CUDA, OLD_CUDA), "link", "replace"),
    (
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        (TORCH_CUDA, OLD_CUDA),
        "remote-suspect",
        "replace",
    ),
    ("an illegal memory access was encountered", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("the launch timed out and was terminated", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("context is destroyed", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("device-side assert triggered", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("hardware stack error", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("an illegal instruction was encountered", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("misaligned address", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("operation not supported on global/shared address space", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("invalid program counter", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("unspecified launch failure", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("tensor memory not completely freed", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("no CUDA-capable device is detected", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("CUDA-capable device(s) is/are busy or unavailable", (TORCH_CUDA, OLD_CUDA), "device-busy", "replace"),
    ("all CUDA-capable devices are busy or unavailable", (TORCH_CUDA, OLD_CUDA), "device-busy", "replace"),
    ("unknown error", (TORCH_CUDA, OLD_CUDA), "device-lost", "replace"),
    ("No CUDA GPUs are available", (BARE,), "device-lost", "replace"),
    ("unable to determine the device handle: GPU is lost", (BARE,), "device-lost", "replace"),
    (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=19, OpType=ALLREDUCE, Timeout(ms)=60000) ran "
        "for 60007 milliseconds before timing out.",
        (WATCHDOG, "NCCL communicator was aborted on rank 1. Original reason for failure was: {}"),
        "collective-timeout",
        "reconnect",
    ),
    (
        "remote process exited or there was a network error, NCCL version 2.26.2\nncclRemoteError: A call failed "
        "possibly due to a network error or a remote process exiting prematurely.",
        (NCCL, WATCHDOG),
        "remote-suspect",
        "reconnect",
    ),
    ("unhandled system error\nncclSystemError: System call failed", (NCCL, WATCHDOG), "link", "reconnect"),
    (
        "internal error - please report\nncclInternalError: Internal check failed.",
        (NCCL, WATCHDOG),
        "link",
        "reconnect",
    ),
    (
        "[1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', "
        "but store->get('0') got error: Connection reset by peer",
        (BARE, NCCL),
        "remote-suspect",
        "reconnect",
    ),
    ("unhandled cuda error\nncclUnhandledCudaError: Call to CUDA", (NCCL, WATCHDOG), "device-lost", "replace"),
    ("Cuda failure 700 'an illegal memory access was encountered'", (NCCL,), "device-lost", "replace"),
    ("NCCL communicator was aborted on rank 1.", (BARE, WATCHDOG), "link", "reconnect"),
    ("NCCL watchdog thread terminated with exception: x", (WATCHDOG,), "link", "reconnect"),
    ("pair.cc:537] Read error [127.0.0.1]:24228: Connection reset by peer", (GLOO,), "link", "reconnect"),
    ("pair.cc:553] Connection closed by peer [127.0.0.1]:24228", (GLOO,), "link", "reconnect"),
    ("unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation", (GLOO,), "collective-timeout", "reconnect"),
    ("Application timeout caused pair closure", (BARE,), "collective-timeout", "reconnect"),
    ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 300 ms", (BARE,), "collective-timeout", "reconnect"),
    ("Gloo connectFullMesh failed with [timeout]", (BARE,), "link", "reconnect"),
]


@pytest.mark.parametrize(("text", "shapes", "fault", "rung"), ERRORS, ids=[text[:40] for text, *_ in ERRORS])
def test_an_error_is_known_in_each_of_its_shapes(text: str, shapes: tuple[str, ...], fault: str, rung: str) -> None:
    for shape in shapes:
        found = TABLE.diagnose(RuntimeError(shape.format(text)))

        assert (found.fault, found.rung) == (fault, rung), shape


def test_there_is_an_error_above_for_each_row() -> None:
    found = [row_of(f"RuntimeError: {shape.format(text)}") for text, shapes, *_ in ERRORS for shape in shapes]

    assert [row for row in ROWS if row not in found] == []


@pytest.mark.parametrize(
    ("reason", "fault"),
    [
        ("device task abort", "forced-stop"),
        ("device mem error", "memory-persistent"),
        ("hbm Multi-bit ECC error", "memory-corrupted"),
        ("suspect device mem error", "memory-corrupted"),
        ("link error", "link"),
        ("device network link error", "link"),
        ("hccl op retry failed", "link"),
        ("suspect remote error", "remote-suspect"),
        ("lost heartbeat", "device-lost"),
        ("aicore exception", "device-lost"),
        ("task timeout", "collective-timeout"),
    ],
)
def test_the_runtimes_own_reason_is_known_where_torch_npu_gives_no_word_for_it(reason: str, fault: str) -> None:
    assert TABLE.diagnose(RuntimeError(FULL.format("AclrtSynchronizeDevice", reason))).fault == fault


@pytest.mark.parametrize(
    "error",
    [
        ValueError("UCE ERROR"),  # vendors raise RuntimeError
        RuntimeError("REDUCE ERROR in the user's own code"),
        RuntimeError(IN_FULL.format("x, error code is 107001")),  # the pid in it is 507053
        RuntimeError("CUDA error: invalid argument"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("Connection reset by peer"),  # a data server's
        RuntimeError("Timed out waiting 1000ms for recv operation"),
        KeyError("misaligned address"),
    ],
)
def test_what_is_no_error_of_a_device_is_unknown(error: Exception) -> None:
    found = TABLE.diagnose(error)

    assert not found.is_known
    assert (found.fault, found.rung) == ("unknown", "replace")


def test_an_error_is_known_by_its_number_if_that_is_all_it_says() -> None:
    class AcceleratorError(RuntimeError):
        """As torch's, which carries the number of the accelerator's error."""

        error_code = 716

    assert TABLE.diagnose(AcceleratorError("the device failed")).fault == "device-lost"


def test_an_error_that_a_framework_has_wrapped_is_still_known() -> None:
    wrapped = ValueError("step 5 failed")
    wrapped.__cause__ = RuntimeError("UCE ERROR")

    assert TABLE.diagnose(wrapped).fault == "memory-persistent"


def test_an_error_that_cannot_say_what_it_is_is_unknown() -> None:
    class MuteError(RuntimeError):
        def __str__(self) -> str:
            raise AttributeError("no text")

    assert not TABLE.diagnose(MuteError()).is_known


def test_a_fault_has_an_answer_and_each_rung_is_one_of_the_ladder() -> None:
    assert set(ANSWERS) == set(DeviceFault)
    assert set(ANSWERS.values()) | {row.rung for row in ROWS if row.rung} <= RUNGS


# Memory that failed with a multi-bit ECC error: when? The newest update of the optimizer took from 1000 to 2000 us, or
# is under way since 3000; it is 5000 now.
DONE, UNDER_WAY, NEVER = (1000, 2000), (3000, 2000), (0, 0)


@pytest.mark.parametrize(
    ("update", "failed_at_us", "fault"),
    [
        (DONE, 999, "memory-corrupted"),  # before it: what it read may have been wrong
        (DONE, 1000, "memory-persistent"),
        (DONE, 2000, "memory-persistent"),
        (DONE, 2001, "memory-persistent"),
        (DONE, 5000, "memory-persistent"),
        (DONE, 5001, "memory-corrupted"),  # is still to come: by another clock, so nothing is proved
        (UNDER_WAY, 2001, "memory-corrupted"),
        (UNDER_WAY, 3000, "memory-corrupted"),
        (UNDER_WAY, 3001, "memory-persistent"),
        (NEVER, 4000, "memory-corrupted"),
    ],
)
def test_an_ecc_error_is_repaired_in_place_only_if_the_newest_update_had_begun_by_then(
    update: tuple[int, int], failed_at_us: int, fault: str
) -> None:
    updates = UpdateTimes(clock_us=lambda: 5000)
    updates.start_us, updates.end_us = update
    texts = (f"time us= {failed_at_us}.time is {failed_at_us}", f"time us={failed_at_us} time is {failed_at_us}")

    found = {
        TABLE.diagnose(RuntimeError(shape.format(f"HBM MULTI BIT ECC ERROR.{text}")), updates)
        for shape in (IN_FULL, COMPACT)
        for text in texts
    }

    assert [(one.fault, one.is_dated) for one in found] == [(fault, fault == "memory-persistent")]


def test_an_ecc_error_that_does_not_say_when_may_be_from_any_time() -> None:
    updates = UpdateTimes(clock_us=lambda: 5000)
    updates.begin()

    assert TABLE.diagnose(RuntimeError("HBM MULTI BIT ECC ERROR"), updates).fault == "memory-corrupted"
    assert TABLE.diagnose(RuntimeError("HBM MULTI BIT ECC ERROR.time us= 5000")).fault == "memory-corrupted"


def test_only_an_ecc_error_is_judged_by_its_time() -> None:
    updates = UpdateTimes(clock_us=lambda: 5000)
    updates.begin()

    assert TABLE.diagnose(RuntimeError("SUSPECT MEM ERROR.time us= 5000"), updates).fault == "memory-corrupted"


def test_an_update_is_noted_by_the_clock_that_is_given() -> None:
    times = iter((7, 9))
    updates = UpdateTimes(clock_us=lambda: next(times))

    updates.begin()
    updates.end()

    assert (updates.start_us, updates.end_us) == (7, 9)


def test_a_configuration_adds_errors_of_any_type_and_takes_ours_off() -> None:
    table = DeviceErrors({r"^XpuError: lost": "device-lost", "UCE ERROR": "unknown"})

    class XpuError(Exception):
        pass

    assert table.diagnose(XpuError("lost device 3")).rung == "replace"
    assert not table.diagnose(RuntimeError("UCE ERROR")).is_known
    assert table.diagnose(RuntimeError("FORCE STOP")).fault == "forced-stop"


@pytest.mark.parametrize(
    ("additions", "complaint"),
    [
        ({"(": "link"}, r"'\(' is not a regular expression; correct it"),
        ({"x": "linc"}, "'x' is 'linc', which is not a fault; use one of memory-temporary, "),
    ],
)
def test_an_addition_that_cannot_be_used_is_answered_with_a_cure(additions: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_additions(additions)


def test_the_table_is_read_without_torch_and_nothing_is_compiled_for_it() -> None:
    program = (
        "import sys; from ttprun.device import device_errors; "
        "sys.exit('torch' in sys.modules or device_errors._compiled.cache_info().currsize)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
