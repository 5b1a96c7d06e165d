"""What has happened to a device decides how its rank is repaired, and names the incident."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.e2e.harness import (
    PLAIN,
    RunTtprun,
)


def meaning(fault: str, tmp_path: Path) -> list[str]:
    """Options with which the error that `inject-fault exception` raises means this fault of the device."""
    file = tmp_path / "device.yaml"
    file.write_text(yaml.safe_dump({"device_errors": {"^InjectedFaultError: injected": fault}}))
    return ["--config", str(file)]


def test_numbers_that_may_be_wrong_in_all_ranks_make_all_start_again(run_ttprun: RunTtprun, tmp_path: Path) -> None:
    options = [*meaning("precision", tmp_path), "--max-restarts", "1"]

    result = run_ttprun(PLAIN, 2, faults=["exception:rank=1,step=12,phase=backward"], options=options)

    # Neither rank can be repaired, so both end, and the one that ends first has the incident.
    assert result.incidents[0]["kind"] in ("precision", "link"), result.story()
    assert [incident["rung"] for incident in result.incidents] == ["restart"], result.story()
    assert "the other ranks' state may be wrong too" in result.incidents[0]["reason"], result.story()
    assert result.exit_code == 0, result.story()
    assert result.process_counts == [2, 2]
