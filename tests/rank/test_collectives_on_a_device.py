"""Collectives of real processes on simulated NPUs: which errors a script hears of, and what a recovery does to a device."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rank.worlds import FakeAgent, run_world, say, wait_for
from ttprun.device import registry
from ttprun.device.interface import DeviceFailedError
from ttprun.device.sim import Queue, SimulatedNpu
from ttprun.protocol import from_rank, to_rank
from ttprun.rank.comm import on_device
from ttprun.rank.session import current

SUMS = [30.0, 32.0, 34.0]
WAYS = ("refused", "under way", "of a future")


def ours(rank: int) -> torch.Tensor:
    return torch.arange(3, dtype=torch.float32) + 10 * (rank + 1)


def begin(rank: int) -> SimulatedNpu:
    device = SimulatedNpu()
    registry.simulate(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=2)
    return device


def counts(device: SimulatedNpu) -> dict[str, Any]:
    """What the device has been asked for."""
    rebuilt = [links for _, links in device.module.npu.rebuilt]
    (communicator,) = device.module.npu._living_communicators()
    return device.counters() | {"rebuilt": rebuilt, "calls": dict(communicator.calls)}


def summed(rank: int, way: str, breaks: Queue | None) -> tuple[list[float], dict[str, Any]]:
    """In rank 1 the device breaks: before an all-reduce, while it waits for the other rank, or the same of a future."""
    device = begin(rank)
    x = ours(rank)
    if rank == 0:
        wait_for("go")
    elif way == "refused":
        _break(device, breaks)
    work: Any = dist.all_reduce(x, async_op=True)
    if rank == 1 and way != "refused":
        _break(device, breaks)
        say("broken")
    if way == "of a future":
        work.get_future().wait()
    else:
        work.wait()
    return x.tolist(), counts(device)


def _break(device: SimulatedNpu, breaks: Queue | None) -> None:
    if breaks is None:
        device.module.npu.lose()
    elif breaks is Queue.UCE_EXIT:
        device.module.npu.fail_memory(torch.zeros(1), breaks)
    else:
        device.module.npu.queue = breaks


def stops(rank: int, way: str, breaks: Queue | None) -> str:
    """The error with which the script of rank 1 ends."""
    if rank == 0:
        begin(rank)
        if way == "of a future":
            wait_for("go")
            dist.all_reduce(ours(rank), async_op=True)
        return ""
    try:
        summed(rank, way, breaks)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "nothing has happened"


def let_it_come(way: str, agent: FakeAgent) -> None:
    """Rank 0 comes to the all-reduce once it is under way in rank 1; a future hears of nothing before that."""
    if way != "refused":
        agent.wait_for(1, from_rank.Note, text="broken")
    if way == "of a future":
        agent.tell_value(0, "go")


def mend(way: str, fault: str, agent: FakeAgent) -> None:
    let_it_come(way, agent)
    assert agent.wait_for(1, from_rank.Broken).device_fault == fault
    agent.break_connections()
    agent.resume()
    agent.tell_value(0, "go")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("breaks", "fault"), [(Queue.HCCS_LINK_EXIT, "link"), (Queue.SUSPECT_REMOTE_EXIT, "remote-suspect")]
)
def test_a_link_that_breaks_is_mended_and_the_script_hears_nothing(way: str, breaks: Queue, fault: str) -> None:
    scenario = functools.partial(mend, way, fault)

    (sums, _), (same, asked) = run_world(summed, way, breaks, scenario=scenario, is_begun=False)

    assert sums == same == SUMS
    assert (asked["stops"], asked["rebuilt"], asked["marked_safe"]) == (1, [False], 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("breaks", "told"), [(Queue.UCE_EXIT, "UCE ERROR"), (Queue.STOP_EXIT, "FORCE STOP"), (None, "507010")]
)
def test_an_error_that_no_new_connection_answers_ends_the_script_at_once(
    way: str, breaks: Queue | None, told: str
) -> None:
    scenario = functools.partial(let_it_come, way)

    _, error = run_world(stops, way, breaks, scenario=scenario, is_begun=False, limit_s=10.0)

    assert told in error


def waits(rank: int, is_of_future: bool) -> tuple[list[float], dict[str, Any]]:
    """Rank 0 waits in an all-reduce, to which rank 1 comes only after a recovery."""
    device = begin(rank)
    x = ours(rank)
    if rank == 1:
        wait_for("go")
    work: Any = dist.all_reduce(x, async_op=True)
    if rank == 0:
        say("waits")
    if is_of_future:
        work.get_future().wait()
    else:
        work.wait()
    return x.tolist(), counts(device)


def stop_and_go_on(agent: FakeAgent) -> None:
    agent.wait_for(0, from_rank.Note, text="waits")
    agent.pause()
    agent.break_connections()
    agent.resume()
    agent.tell_value(1, "go")


@pytest.mark.parametrize("is_of_future", [False, True])
def test_a_script_that_waits_while_its_device_is_stopped_hears_nothing_of_that(is_of_future: bool) -> None:
    (sums, asked), (same, _) = run_world(waits, is_of_future, scenario=stop_and_go_on, is_begun=False)

    assert sums == same == SUMS
    assert (asked["stops"], asked["rebuilt"], asked["calls"]) == (1, [False], {"allreduce": 2})


def steps(rank: int) -> list[bool]:
    """Both are inside of an optimizer's step when all are told to stand still. Whether it still ran at the stop."""
    device: Any = begin(rank)
    session = current()
    assert session is not None
    seen = []
    stop = device.stop

    def look_and_stop() -> None:
        seen.append(session.is_applying)
        stop()

    device.stop = look_and_stop
    with session.changed:
        session.is_applying = True
        say("steps")
        assert session.changed.wait_for(lambda: session.is_holding, 10.0)
    say("still steps")
    wait_for("go")
    with session.changed:
        session.is_applying = False
        session.changed.notify_all()
    dist.all_reduce(ours(rank))
    return seen


def stop_in_a_step(agent: FakeAgent) -> None:
    for rank in range(2):
        agent.wait_for(rank, from_rank.Note, text="steps")
    agent.generation += 1
    agent.tell_all(to_rank.Freeze(agent.generation, [0, 1], []))
    for rank in range(2):
        agent.wait_for(rank, from_rank.Note, text="still steps")
        agent.pause()
        agent.tell_value(rank, "go")
    for rank in range(2):
        agent.wait_for(rank, from_rank.Frozen, generation=agent.generation)
    agent.resume()


def test_a_device_is_stopped_only_behind_the_optimizer_step_that_runs_on_it() -> None:
    assert run_world(steps, scenario=stop_in_a_step, is_begun=False) == [[False], [False]]


@pytest.fixture
def device() -> Iterator[SimulatedNpu]:
    simulated = SimulatedNpu()
    registry.simulate(simulated)
    yield simulated
    registry.simulate(None)


ON_DEVICE: Any = [
    SimpleNamespace(links=SimpleNamespace(are_on_device=False)),
    SimpleNamespace(links=SimpleNamespace(are_on_device=True)),
]


@pytest.mark.parametrize("is_held", [True, False])
def test_a_rank_whose_memory_has_failed_too_does_not_go_on_as_if_it_held_its_state(
    device: SimulatedNpu, is_held: bool
) -> None:
    weights = [torch.zeros(4)]
    device.module.npu.fail_memory(weights[0])
    if not is_held:
        weights.clear()

    with pytest.raises(DeviceFailedError, match="memory of the device has failed"):
        on_device.restart(ON_DEVICE)


def test_a_device_that_carries_none_of_the_groups_is_left_alone(device: SimulatedNpu) -> None:
    on_device.stop(ON_DEVICE[:1])
    untouched = device.counters()["stops"]
    on_device.stop(ON_DEVICE)

    assert (untouched, device.counters()["stops"]) == (0, 1)


# A process that is lost: the survivor's communicator is the same one before and after.


def set_up_and_summed(rank: int) -> tuple[list[float], dict[str, Any], bool]:
    """Two broadcasts; then rank 0 waits in an all-reduce for a rank 1 that is lost first."""
    device = begin(rank)
    (made,) = device.module.npu._living_communicators()
    for _ in range(2):
        dist.broadcast(ours(0), 0)
    x = ours(rank)
    if rank == 1 and not is_second_life():
        say("set up")
        wait_for("never")
    dist.all_reduce(x)
    return x.tolist(), counts(device), device.module.npu._living_communicators() == [made]


def is_second_life() -> bool:
    session = current()
    assert session is not None
    return session.generation > 1


def lose(agent: FakeAgent) -> None:
    agent.wait_for(1, from_rank.Note, text="set up")
    agent.kill(1)
    replace_lost(agent)


def replace_lost(agent: FakeAgent) -> None:
    (report,) = agent.freeze(lost=[1])
    agent.replace(1)
    agent.resume(expected={name: group.issued for name, group in report.journal.items()})


def test_a_lost_process_is_answered_by_a_rebuild_in_place_of_the_survivors_communicator() -> None:
    survivor, replacement = run_world(set_up_and_summed, scenario=lose, is_begun=False)

    sums, asked, is_same = survivor
    assert (sums, is_same) == (SUMS, True)
    assert (asked["stops"], asked["rebuilt"]) == (1, [True])
    same_sums, asked_of_new, _ = replacement
    assert same_sums == SUMS
    assert (asked_of_new["stops"], asked_of_new["rebuilt"]) == (0, [])  # it has made its own


def fails_to_stop(rank: int) -> tuple[list[float], dict[str, Any], bool]:
    """As above, but what rank 1 meets is that its device does not answer when all are told to stand still."""
    if rank == 1 and not is_second_life():
        begin(rank).module.npu.lose()
        say("set up")
        wait_for("never")
    return set_up_and_summed(rank)


def freeze_all(agent: FakeAgent) -> None:
    agent.wait_for(1, from_rank.Note, text="set up")
    agent.generation += 1
    for line in agent.lines:
        line.send(to_rank.Freeze(agent.generation, [0, 1], []))
    assert agent.wait_for(1, from_rank.ScriptError).device_fault == "device-lost"
    _, status = os.waitpid(agent.pids[1], 0)
    assert os.waitstatus_to_exitcode(status) == 1
    replace_lost(agent)


def test_a_process_whose_device_cannot_be_stopped_gives_itself_up_and_is_replaced() -> None:
    (sums, asked, _), (same, _, _) = run_world(fails_to_stop, scenario=freeze_all, is_begun=False)

    assert sums == same == SUMS
    assert asked["rebuilt"] == [True]
