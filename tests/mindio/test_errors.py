"""Each error text of MindIO's table is reported as the state that it stands for."""

from __future__ import annotations

import pytest

from ttprun.device.device_errors import UpdateTimes
from ttprun.mindio.handlers import ErrorTable, ReportState


@pytest.fixture
def table() -> ErrorTable:
    """After an update of the optimizer that took from 1000 to 2000 us."""
    times = UpdateTimes()
    times.start_us, times.end_us = 1000, 2000
    return ErrorTable(times)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("NPU function error: UCE ERROR, error code is 507053", ReportState.RS_UCE),
        ("HBM MULTI BIT ECC ERROR.time us=1500 time is 1", ReportState.RS_UCE),
        ("HBM MULTI BIT ECC ERROR.time us= 2500. time is 1", ReportState.RS_UCE),
        ("HBM MULTI BIT ECC ERROR.time us=500", ReportState.RS_UCE_CORRUPTED),
        ("HBM MULTI BIT ECC ERROR", ReportState.RS_UCE_CORRUPTED),
        ("FORCE STOP. By mindio-ttp BeginUpdating", ReportState.RS_NORMAL),
        ("ARF FINISH", ReportState.RS_PREREPAIR_FINISH),
        ("STEP FINISH", ReportState.RS_STEP_FINISH),
        ("HCCL OP RETRY FAILED", ReportState.RS_HCCL_FAILED),
        ("SUSPECT REMOTE ERROR", ReportState.RS_HCCL_FAILED),
        ("UB LINK ERROR", ReportState.RS_HCCL_FAILED),
        ("HCCS LINK ERROR", ReportState.RS_HCCL_FAILED),
        ("SUSPECT MEM ERROR", ReportState.RS_UNKNOWN),
        ("out of luck", ReportState.RS_UNKNOWN),
        ("UCE ERROR after FORCE STOP", ReportState.RS_UCE),
    ],
)
def test_an_error_text_is_reported_as_its_state(table: ErrorTable, text: str, state: ReportState) -> None:
    assert table.classify(RuntimeError(text)) is state


@pytest.mark.parametrize("text", ["UCE ERROR", "HBM MULTI BIT ECC", "HCCL OP RETRY FAILED", "UB LINK ERROR"])
def test_without_retry_an_error_of_the_device_is_like_any_other(table: ErrorTable, text: str) -> None:
    table.is_retried = False

    assert table.classify(RuntimeError(text)) is ReportState.RS_UNKNOWN


def test_before_the_first_update_failed_memory_cannot_be_repaired() -> None:
    assert ErrorTable(UpdateTimes()).classify(RuntimeError("HBM MULTI BIT ECC time us=5")) is (
        ReportState.RS_UCE_CORRUPTED
    )


def test_only_a_runtime_error_stands_for_anything(table: ErrorTable) -> None:
    assert table.classify(ValueError("UCE ERROR")) is ReportState.RS_UNKNOWN


def test_a_framework_can_add_an_error_of_its_own(table: ErrorTable) -> None:
    table.add("PRECISION ERROR", "RS_RETRY", lambda text: "PRECISION ERROR")

    assert table.classify(RuntimeError("PRECISION ERROR load ckpt step=3")) is ReportState.RS_RETRY


def test_a_state_that_is_not_there_is_refused(table: ErrorTable) -> None:
    with pytest.raises(ValueError, match="'RS_MAYBE' is not a state"):
        table.add("PRECISION ERROR", "RS_MAYBE", str)
