"""Point-to-point operations: nothing is lost when a rank or a connection is, nothing received is asked for again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.test_gpus import unprotected
from tests.groups.test_groups_made_while_a_rank_is_lost import be_lost, begin, is_first_life, replace_with
from tests.rank.worlds import FakeAgent, run_world, say, wait_for
from ttprun.introspect.current_rank import current
from ttprun.protocol import from_rank, rank_events


def ours(rank: int, number: int) -> torch.Tensor:
    return torch.arange(20.0) + 10 * number + 100 * rank


def swap_and_spoil(rank: int, number: int) -> list[float]:
    """Send to the other rank and receive from it; then both tensors are used for something else."""
    given, taken = ours(rank, number), torch.empty(20)
    sent = dist.isend(given, 1 - rank, tag=number % 2)
    dist.recv(taken, 1 - rank, tag=number % 2)
    assert sent is not None
    sent.wait()
    found: list[float] = taken.tolist()
    given.fill_(-1.0)
    taken.fill_(-2.0)
    return found


def swapped(rank: int, numbers: range) -> list[list[float]]:
    return [ours(1 - rank, number).tolist() for number in numbers]


def issued_again() -> int:
    """How many messages this rank's connection has carried in this generation."""
    session = current()
    assert session is not None
    (group,) = session.made.living.values()
    connection = group.links.by_gloo
    assert connection is not None
    return connection._p2p_channels.issued


def swap_around_a_break(rank: int) -> Any:
    found = [swap_and_spoil(rank, number) for number in range(3)]
    if rank == 0:
        say("waiting")
    else:
        wait_for("go")
    found += [swap_and_spoil(rank, number) for number in range(3, 5)]
    return found, issued_again(), unprotected()


def break_once(agent: FakeAgent) -> None:
    agent.wait_for(0, from_rank.Note, text="waiting")
    agent.pause()
    agent.break_connections()
    agent.resume()
    agent.send_value(1, "go")


def test_what_was_received_before_a_break_is_not_sent_again() -> None:
    found = run_world(swap_around_a_break, scenario=break_once)

    assert found == [(swapped(rank, range(5)), 4, "") for rank in range(2)]


def swap_and_be_lost(rank: int, times: int, differs: bool = False) -> Any:
    """Rank 1 is lost behind some messages; its replacement begins from the top."""
    begin(rank)
    session = current()
    assert session is not None
    is_other = differs and rank == 1 and not is_first_life()
    if is_other:
        session.proof = None  # nothing is left of the lost rank, as on a lost node
    found = []
    for number in range(times):
        if is_other and number == 1:
            dist.send(torch.zeros(20), 0, tag=1)
        found.append(swap_and_spoil(rank, number))
    if rank == 0:
        say("waiting")
    elif is_first_life():
        be_lost()
    found += [swap_and_spoil(rank, number) for number in range(times, times + 2)]
    return found, unprotected()


def lose_after_messages(agent: FakeAgent) -> None:
    agent.wait_for(0, from_rank.Note, text="waiting")
    agent.wait_for(1, from_rank.Note, text="lost")
    replace_with(agent, 1)


@pytest.mark.parametrize("times", [1, 4])
def test_a_replacement_gets_all_that_was_sent_to_the_lost_rank_and_sends_nothing_twice(times: int) -> None:
    found = run_world(swap_and_be_lost, times, scenario=lose_after_messages, is_begun=False)

    assert found == [(swapped(rank, range(times + 2)), "") for rank in range(2)]


def lose_and_hear_of_a_mismatch(agent: FakeAgent) -> None:
    lose_after_messages(agent)
    mismatch = agent.wait_for(1, rank_events.MismatchFound)
    assert "sends something else to rank 0 than what this has received from the lost rank" in mismatch.reason.text
    raise InterruptedError


def test_a_replacement_that_sends_something_else_is_refused() -> None:
    with pytest.raises(AssertionError, match="InterruptedError"):
        run_world(swap_and_be_lost, 4, True, scenario=lose_and_hear_of_a_mismatch, is_begun=False)


def poll_and_use(rank: int) -> Any:
    """A handle that is asked until it is done, and never waited for; its tensor is used at once."""
    x = ours(rank, 0)
    if rank == 0:
        work = dist.irecv(x, 1)
        assert work is not None
        while not work.is_completed():
            pass
        x.mul_(2)
    else:
        dist.send(x, 0)
    dist.barrier()
    say("waiting")
    wait_for("go")
    dist.barrier()
    return x.tolist(), unprotected()


def break_after_both(agent: FakeAgent) -> None:
    for rank in range(2):
        agent.wait_for(rank, from_rank.Note, text="waiting")
    agent.break_connections()
    agent.resume()
    for rank in range(2):
        agent.send_value(rank, "go")


def test_what_was_received_and_used_without_a_wait_stays_as_it_is() -> None:
    found = run_world(poll_and_use, scenario=break_after_both)

    assert found == [((2 * ours(1, 0)).tolist(), ""), (ours(1, 0).tolist(), "")]


def receive_in_the_next_step(rank: int) -> Any:
    """Rank 1 sends in the second step what rank 0 has asked for in the first one."""
    session = current()
    assert session is not None
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = ours(rank, 0)
    work = dist.irecv(x, 1) if rank == 0 else None
    for step in range(2):
        if rank == 1 and step == 1:
            dist.send(x, 0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if work is not None:
        work.wait()
    return x.tolist(), unprotected()


def test_a_message_that_is_received_in_another_step_than_it_is_sent_ends_protection_with_the_reason() -> None:
    found = run_world(receive_in_the_next_step)

    assert [tensor for tensor, _ in found] == [ours(1, 0).tolist()] * 2
    assert found[0][1].startswith("the script's recv from rank 1 is still pending at optimizer step 1, which rank 1")
