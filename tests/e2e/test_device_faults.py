"""What has happened to a device decides how its rank is repaired, and names the incident."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.e2e.harness import (
    EPOCHS,
    PLAIN,
    Run,
    RunTtprun,
    Undisturbed,
    assert_recovered_by,
    assert_same_outcome,
)


def meaning(fault: str, tmp_path: Path) -> list[str]:
    """Options with which the error that `inject-fault exception` raises means this fault of the device."""
    file = tmp_path / "device.yaml"
    file.write_text(yaml.safe_dump({"device_errors": {"^InjectedFaultError: injected": fault}}))
    return ["--config", str(file)]


@pytest.mark.parametrize(
    ("fault", "rung", "processes", "retry_on"),
    [
        ("memory-temporary", "rerun", [1, 1], []),
        ("device-lost", "replace", [1, 2], ["--retry-on", "InjectedFaultError"]),  # retrying would not help
    ],
)
def test_a_rank_is_kept_or_replaced_as_its_device_asks_for_and_nothing_differs(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    tmp_path: Path,
    fault: str,
    rung: str,
    processes: list[int],
    retry_on: list[str],
) -> None:
    options = [*meaning(fault, tmp_path), *retry_on]

    result = run_ttprun(PLAIN, 2, faults=["exception:rank=1,step=12,phase=backward"], options=options)

    assert_recovered_by(result, [rung])
    assert [incident["kind"] for incident in result.incidents] == [fault]
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    assert process_counts(result) == processes


def test_each_fault_of_a_simulated_device_is_answered_in_its_way_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults = [
        "uce-low:rank=1,step=4,phase=backward",
        "uce-high:rank=0,step=8,phase=in_step",
        "link:rank=1,step=13,phase=collective",
        "uce-fatal:rank=0,step=17,phase=before_step",
        "device-lost:rank=1,step=22,phase=after_step",
    ]

    result = run_ttprun(PLAIN, 2, faults=faults)

    assert_recovered_by(result, ["rerun", "rerun", "reconnect", "replace", "replace"])
    assert [incident["kind"] for incident in result.incidents] == [
        "memory-temporary",
        "memory-persistent",
        "link",
        "memory-outside-pool",
        "device-lost",
    ]
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    assert process_counts(result) == [2, 2]


@pytest.mark.parametrize("phase", ["forward", "backward", "in_step", "after_step", "validation"])
def test_weights_that_an_uncorrectable_memory_error_has_ruined_come_from_a_peer_in_the_same_process(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, phase: str
) -> None:
    result = run_ttprun(EPOCHS, 3, faults=[f"uce-high:rank=1,step=20,phase={phase}"])

    strikes = [event for event in result.events if event["event"] == "fault_injected"]
    assert re.fullmatch(r"simulated device; [1-9]\d* tensors \([1-9]\d* bytes\) hold garbage", strikes[0]["detail"])
    assert_recovered_by(result, ["rerun"])
    assert [incident["kind"] for incident in result.incidents] == ["memory-persistent"]
    assert_same_outcome(result, undisturbed(EPOCHS, 3))
    assert [len(pids) for pids in result.pids.values()] == [1, 1, 1]
    assert process_counts(result) == [1, 1, 1]


@pytest.mark.parametrize(
    ("step", "kind", "rung", "processes"),
    [(20, "memory-persistent", "rerun", [1, 1, 1]), (0, "memory-corrupted", "replace", [1, 2, 1])],
)
def test_an_ecc_error_is_repaired_in_the_same_process_if_it_is_newer_than_the_newest_step(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, step: int, kind: str, rung: str, processes: list[int]
) -> None:
    result = run_ttprun(EPOCHS, 3, faults=[f"ecc:rank=1,step={step},phase=forward"])

    assert_recovered_by(result, [rung])
    assert [incident["kind"] for incident in result.incidents] == [kind]
    assert_same_outcome(result, undisturbed(EPOCHS, 3))
    assert process_counts(result) == processes


def test_numbers_that_may_be_wrong_in_all_ranks_make_all_start_again(run_ttprun: RunTtprun, tmp_path: Path) -> None:
    options = [*meaning("precision", tmp_path), "--max-restarts", "1"]

    result = run_ttprun(PLAIN, 2, faults=["exception:rank=1,step=12,phase=backward"], options=options)

    assert [incident["kind"] for incident in result.incidents] == ["precision"], result.story()
    assert [incident["rung"] for incident in result.incidents] == ["restart"], result.story()
    assert "the other ranks' state may be wrong too" in result.incidents[0]["reason"], result.story()
    assert result.exit_code == 0, result.story()
    assert process_counts(result) == [2, 2]


def process_counts(result: Run) -> list[int]:
    """How many processes each rank has had, by rank; exact: from the event log."""
    started = [event["rank"] for event in result.events if event["event"] == "rank_started"]
    return [started.count(rank) for rank in sorted(set(started))]
