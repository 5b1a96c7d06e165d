"""NCCL and HCCL read their variables once: each rank's process is started with them, and each standby's."""

from __future__ import annotations

import pytest

from tests.e2e.harness import RunTtprun, assert_only_replaced
from ttprun.device.device_errors import VARIABLES


@pytest.mark.usefixtures("new_pythons")  # a fork has the environment of its parent
def test_each_rank_and_each_standby_is_started_with_what_keeps_survivors_of_a_device_alive(
    run_ttprun: RunTtprun,
) -> None:
    expected = " ".join(sorted(f"{name}={value}" for name, value in VARIABLES.items()))

    result = run_ttprun("device_environment.py", 2, faults=["kill:rank=1,step=6,phase=collective"])

    assert_only_replaced(result)
    assert {rank: lines[-1] for rank, lines in result.stdout.items()} == {
        rank: f"[rank {rank}] started with {expected}" for rank in range(2)
    }
