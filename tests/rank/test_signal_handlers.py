"""A handler of the script's raises while our code runs: the script catches it at the call that it made, and goes on.

Two real ranks. The signal comes inside a function of ours, in both ranks or in one, once for each step.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.rank.test_fail_open import free_port
from tests.rank.worlds import run_world
from ttprun.groups import group_making, journal, process_group
from ttprun.introspect import signal_handlers
from ttprun.introspect.current_rank import Rank, current
from ttprun.rank.step import commit_barrier, record, step_hooks

KEPT: list[Any] = []


class Late(Exception):
    """What the script's handler raises."""


def too_late(number: int, frame: Any) -> None:
    raise Late(frame.f_code.co_name)


def trains(rank: int, port: int, begin: Callable[[str], None] = lambda at: None) -> tuple[list[list[float]], list[str]]:
    """Four steps with DDP, each call with a time limit; returns the weights, and the calls in which it has run out.

    begin   called before everything ("start"), and before the first step ("steps")
    """
    late: list[str] = []

    @contextlib.contextmanager
    def limited(call: str) -> Iterator[None]:
        try:
            yield
        except Late:
            late.append(call)

    begin("start")
    with limited("init"):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reduced = torch.zeros(2)
    begin("steps")
    for step in range(4):
        optimizer.zero_grad()
        loss: Any = None
        while loss is None:
            with limited("forward"):
                loss = model(torch.full((2, 3), 1.0 + step + rank)).mean()
        with limited("backward"):
            loss.backward()
        reduced += 1.0 + rank
        with limited("reduce"):
            dist.all_reduce(reduced)
        with limited("step"):
            optimizer.step()
    KEPT.append((model, optimizer, dist.group.WORLD))  # torch's own gloo groups may hang when they are destroyed
    return [*(parameter.detach().flatten().tolist() for parameter in model.parameters()), reduced.tolist()], late


SECTIONS = {
    # where the signal comes: (what holds the function, its name, the call of the script's in which it surfaces)
    "before a process group is connected": (group_making, "_connect", "init"),
    "issuing a collective": (process_group.ManagedGroup, "issue", ""),
    "noting a collective": (process_group, "Entry", ""),
    "copying a collective's input": (process_group.ManagedGroup, "_keep", ""),
    "waiting for a collective": (journal.Journal, "wait", "reduce"),
    "a collective's completion": (process_group.ManagedGroup, "complete", "reduce"),
    "the hook before a step": (step_hooks, "_begin_step", "step"),
    "the record": (record, "describe", "step"),
    "the commit": (step_hooks, "commit", "step"),
    "waiting for the other ranks' records": (commit_barrier, "_is_past", "step"),
    "the hook after a step": (Rank, "pass_boundary", "step"),
    "the step itself": (torch.optim.SGD, "_init_group", "step"),
}


def _raise() -> None:
    """On the main thread alone: what another one raises comes anywhere in the script, also where it skips a call."""
    if threading.current_thread() is threading.main_thread():
        signal.raise_signal(signal.SIGALRM)


def signalled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _raise()
        result = function(*args, **kwargs)
        _raise()
        return result

    call.__code__ = call.__code__.replace(co_filename=signal_handlers.__file__)  # as if it were ours
    return call


def interrupted(rank: int, port: int, where: str, ranks: tuple[int, ...]) -> tuple[Any, list[str], str]:
    owner, name, call = SECTIONS[where]

    def begin(at: str) -> None:
        if rank in ranks and at == ("start" if call == "init" else "steps"):
            signal.signal(signal.SIGALRM, too_late)
            setattr(owner, name, signalled(getattr(owner, name)))

    found, late = trains(rank, port, begin)
    session = current()
    assert session is not None
    return found, late, session.unprotected.text


@pytest.fixture(scope="module")
def plain() -> Any:
    """What the ranks end with, without us and without a signal."""
    return [found for found, _ in run_world(trains, free_port(), is_begun=False, is_managed=False)]


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["in all ranks", "in one rank"])
@pytest.mark.parametrize("where", SECTIONS)
def test_a_handler_that_raises_in_our_code_is_caught_at_the_scripts_call_and_nothing_differs(
    plain: Any, where: str, ranks: tuple[int, ...]
) -> None:
    found = run_world(interrupted, free_port(), where, ranks, is_begun=False)

    assert [weights for weights, _, _ in found] == plain
    assert [why for _, _, why in found] == ["", ""]
    _, _, call = SECTIONS[where]
    for rank in ranks:
        late = found[rank][1]
        assert call in late if call else {*late} & {"backward", "reduce"}
