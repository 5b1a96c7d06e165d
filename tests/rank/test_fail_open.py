"""Something of ours breaks inside a call of the script's: the call does what torch means by it, and training goes on.

Two real ranks, each time; what breaks, breaks in both of them or in one.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.rank.worlds import run_world
from ttprun.groups import group_making, journal, links, process_group
from ttprun.introspect.current_rank import Rank, current
from ttprun.rank.step import record, step_hooks


class OfOursError(Exception):
    """Something of ours that breaks."""


def breaking(*args: Any, **kwargs: Any) -> Any:
    raise OfOursError("broken")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def trains(rank: int, port: int) -> list[list[float]]:
    """Four steps with DDP, and a group of the script's own; returns the weights, and what that group has summed up."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    both = dist.new_group([0, 1])
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((2, 3), 1.0 + step + rank)).mean().backward()
        optimizer.step()
    whole = torch.full((2,), float(rank))
    dist.all_reduce(whole, group=both)
    found = [parameter.detach().flatten().tolist() for parameter in model.parameters()] + [whole.tolist()]
    KEPT.append((model, optimizer, both, dist.group.WORLD))  # torch's own gloo groups may hang when they are destroyed
    return found


KEPT: list[Any] = []


BREAKS = {
    "making a group": (process_group.ManagedGroup, "__init__", "all"),
    "making a group in one rank": (process_group.ManagedGroup, "__init__", "one"),
    "connecting a group": (links.Links, "connect", "all"),
    "connecting a group in one rank": (links.Links, "connect", "one"),
    "asking what is managed": (group_making, "_chosen", "all"),
    "issuing a collective": (process_group.ManagedGroup, "issue", "all"),
    "issuing a collective in one rank": (process_group.ManagedGroup, "issue", "one"),
    "noting a collective in one rank": (process_group, "Entry", "one"),
    "holding a collective's input in one rank": (process_group.ManagedGroup, "_keep", "one"),
    "waiting for a collective": (journal.Journal, "wait", "all"),
    "the hook before a step": (step_hooks, "_begin_step", "all"),
    "the hook before a step in one rank": (step_hooks, "_begin_step", "one"),
    "the commit in one rank": (step_hooks, "commit", "one"),
    "the hook after a step": (Rank, "pass_boundary", "all"),
    "the hook after a step in one rank": (Rank, "pass_boundary", "one"),
    "the record of a step in one rank": (record, "describe", "one"),
}


def broken(rank: int, port: int, what: str) -> tuple[Any, str]:
    owner, name, where = BREAKS[what]
    if where == "all" or rank == 1:
        setattr(owner, name, breaking)
    session = current()
    assert session is not None
    return trains(rank, port), session.unprotected.text


@pytest.fixture(scope="module")
def plain() -> Any:
    """What the ranks return without us."""
    return run_world(trains, free_port(), is_begun=False, is_managed=False)


def test_a_world_of_which_nothing_breaks_is_as_without_us(plain: Any) -> None:
    managed = run_world(trains, free_port(), is_begun=False)

    assert managed == plain


@pytest.mark.parametrize("what", BREAKS)
def test_training_ends_as_without_us_and_says_why_protection_is_off(plain: Any, what: str) -> None:
    found = run_world(broken, free_port(), what, is_begun=False)

    assert [weights for weights, _ in found] == plain
    assert all("OfOursError('broken')" in reason for _, reason in found)
