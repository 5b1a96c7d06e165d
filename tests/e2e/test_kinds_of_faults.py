"""Every kind of fault really happens: seen by what it does to a process, a socket or a tensor.

Kinds that end a process are followed to the replaced rank; those that hang it are ended by the fault's own `seconds`,
so that these tests need nobody to find the hang. Moments are hit by the phases' hooks.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.e2e.harness import (
    WHILE_TRUE,
    Launch,
    Run,
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_only_replaced,
    assert_same_outcome,
)

NAMED = (
    "SIGSEGV, crashed in native code, in while_true_get_batch.py",
    "SIGABRT, aborted by native code, in while_true_get_batch.py",
    "SIGTERM, sent from outside this job",
    "exited with code 3",
)


def injected(result: Run) -> list[tuple[str, str | None, int | None]]:
    """Kind, phase and step of each fault that struck."""
    strikes = [event for event in result.events if event["event"] == "fault_injected"]
    return [(event["kind"], event["phase"], event["step"]) for event in strikes]


def exits(result: Run) -> list[tuple[int, int | None, int | None]]:
    """Rank, code and signal of each process that ended badly."""
    found = [event for event in result.events if event["event"] == "rank_exited"]
    return [(event["rank"], event["code"], event["signal"]) for event in found if event["code"] != 0]


def wait_for_event(launch: Launch, name: str, limit_s: float = 180.0) -> dict[str, Any]:
    """Block until the run's log holds an event of that name, and return it."""
    assert launch.run_dir is not None
    log = launch.run_dir / "events.jsonl"
    give_up_at_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_at_s:
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        found = [event for event in map(json.loads, lines) if event["event"] == name]
        if found:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no event {name} within {limit_s:.0f} s")


def test_every_way_to_die_is_seen_as_what_it_is_and_repaired(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    faults = [
        "segv:rank=1,step=4,phase=backward",
        "abort:rank=0,step=12,phase=in_step",
        "term:rank=1,step=20,phase=forward",
        "exit:rank=0,step=28,phase=collective,code=3",
    ]

    result = run_ttprun(WHILE_TRUE, 2, faults=faults)

    assert injected(result) == [
        ("segv", "backward", 4),
        ("abort", "in_step", 12),
        ("term", "forward", 20),
        ("exit", "collective", 28),
    ]
    assert exits(result) == [(1, None, 11), (0, None, 6), (1, None, 15), (0, 3, None)]
    assert_only_replaced(result, incidents=4)
    reasons = [incident["reason"] for incident in result.incidents]
    assert all(words in reason for words, reason in zip(NAMED, reasons, strict=True)), result.story()
    assert_same_outcome(result, undisturbed(WHILE_TRUE, 2))


def test_a_storm_of_random_faults_is_the_same_each_time_and_costs_nothing(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    """A30, in small."""
    result = run_ttprun(WHILE_TRUE, 2, faults=["random:every=9steps,count=3,seed=4"])

    drawn = [event["fault"] for event in result.events if event["event"] == "fault_injected"]
    assert drawn == [
        "exit:rank=1,step=9,phase=backward",
        "abort:rank=1,step=18,phase=in_step",
        "exit:rank=0,step=27,phase=backward",
    ]
    assert_only_replaced(result, incidents=3)
    assert_same_outcome(result, undisturbed(WHILE_TRUE, 2))


@pytest.mark.parametrize(
    ("fault", "least_s"),
    [
        ("cut-off:rank=1,step=14,phase=backward,seconds=2", 2.0),
        ("slow:rank=0,step=15,phase=forward,rate=200000,seconds=3", 1.0),
    ],
)
def test_what_only_delays_a_rank_delays_all_and_changes_nothing(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, fault: str, least_s: float
) -> None:
    launch = start_ttprun(WHILE_TRUE, 2, faults=[fault])

    struck_s = wait_for_event(launch, "fault_injected")["at_s"]
    launch.wait_for_line(0, "iter 18:")
    took_s = time.monotonic() - struck_s

    assert took_s > least_s * 0.9
    result = launch.finish()
    assert len(injected(result)) == 1
    assert_same_outcome(result, undisturbed(WHILE_TRUE, 2))


def test_a_killed_standby_is_replaced_and_nobody_notices(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    killed = ["standby-kill:rank=0,step=250,phase=forward"]

    result = run_ttprun(WHILE_TRUE, 2, faults=killed, script_args=["--max_iters=300"])

    lost = [event for event in result.events if event["event"] == "standby_lost"]
    assert injected(result) == [("standby-kill", "forward", 250)]
    assert len(lost) == 1  # ready or not: how far it has come by that step depends on the machine
    assert result.incidents == []
    assert_same_outcome(result, undisturbed(WHILE_TRUE, 2, ["--max_iters=300"]))
