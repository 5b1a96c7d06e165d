"""Recoveries in which a device has its part, on simulated NPUs: links that break, and processes that are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.harness import (
    Run,
    assert_only_replaced,
    assert_recovered_by,
    assert_same_outcome,
    assert_survivors_kept_their_pids,
)

RunTtprun = Callable[..., Run]
Undisturbed = Callable[..., Run]

EPOCHS = "epochs_dataloader.py"
WHILE_TRUE = "while_true_get_batch.py"
PLAIN = "plain_tensors.py"
SIMULATED = ["--simulate-npu"]


@pytest.mark.parametrize(
    ("script", "ranks", "phase", "is_simulated_everywhere"),
    [
        (WHILE_TRUE, 2, "backward", True),
        (EPOCHS, 3, "backward", True),
        (EPOCHS, 3, "forward", True),
        (EPOCHS, 3, "in_step", True),
        (EPOCHS, 3, "validation", True),
        (EPOCHS, 3, "checkpoint", True),
        (PLAIN, 2, "collective", True),
        (PLAIN, 2, "collective", False),  # only the rank that is struck has a simulated device
        (WHILE_TRUE, 2, "backward", False),
    ],
)
def test_a_link_between_devices_that_breaks_is_mended_under_the_script_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, ranks: int, phase: str, is_simulated_everywhere: bool
) -> None:
    options = SIMULATED if is_simulated_everywhere else []

    result = run_ttprun(script, ranks, faults=[f"link:rank=1,step=14,phase={phase}"], options=options)

    assert_recovered_by(result, ["reconnect"])
    assert (result.incidents[0]["kind"], result.incidents[0]["ranks"]) == ("link", []), result.story()
    assert_same_outcome(result, undisturbed(script, ranks))
    assert [len(pids) for pids in result.pids.values()] == [1] * ranks
    assert not [line for line in result.stderr[1] if "LINK ERROR" in line], result.story()  # the script has met nothing
    assert devices_of(result) == {rank: ["resumed"] for rank in (range(ranks) if is_simulated_everywhere else [1])}


def test_a_link_that_breaks_again_at_once_costs_the_process_whose_device_says_so(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    faults = ["link:rank=1,step=13,phase=collective"] * 2  # in two collectives, one after the other

    result = run_ttprun(PLAIN, 2, faults=faults, options=SIMULATED)

    assert_recovered_by(result, ["reconnect", "replace"])
    assert [(incident["kind"], incident["ranks"]) for incident in result.incidents] == [("link", []), ("link", [1])]
    assert "connecting again has not helped" in result.incidents[1]["reason"], result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2))
    assert devices_of(result) == {0: ["resumed", "rebuilt"], 1: ["resumed", "made"]}


@pytest.mark.parametrize(
    # Tensors that the optimizer updates; a collective that the script issues in its set-up only, and how often.
    ("script", "tensors", "set_up", "times"),
    [(EPOCHS, 16, "allgather", 1), (PLAIN, 4, "broadcast", 2)],
)
def test_a_lost_process_is_replaced_and_the_survivors_groups_are_rebuilt_in_place(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, tensors: int, set_up: str, times: int
) -> None:
    faults = ["kill:rank=1,step=12,phase=backward", "kill:rank=0,step=24,phase=collective"]

    result = run_ttprun(script, 3, faults=faults, options=SIMULATED)

    assert_only_replaced(result, incidents=2)
    assert_same_outcome(result, undisturbed(script, 3))
    assert_survivors_kept_their_pids(result)
    assert devices_of(result) == {0: ["rebuilt", "made"], 1: ["made", "rebuilt"], 2: ["rebuilt", "rebuilt"]}
    assert devices_of(result, "stops") == {0: [1, 0], 1: [0, 1], 2: [1, 2]}
    marked = devices_of(result, "marked_safe")
    assert marked == {0: [0, tensors], 1: [tensors, tensors], 2: [0, 0]}  # all that a replacement was sent
    calls = {rank: [of.get(set_up, 0) for of in of_rank] for rank, of_rank in devices_of(result, "calls").items()}
    assert calls == {0: [times, 0], 1: [0, 0], 2: [times, times]}  # nobody has issued it again


def devices_of(result: Run, name: str = "communicators") -> dict[int, list[Any]]:
    """Rank -> what its device has told in each recovery: what has become of its communicators, or counts."""
    found: dict[int, list[Any]] = {}
    for event in sorted(result.events, key=lambda event: event.get("rank") or 0):
        if event["event"] == "device_ready":
            found.setdefault(event["rank"], []).append(event[name])
    return found
