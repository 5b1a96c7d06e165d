"""The connection breaks under a collective: two real processes, real gloo, a fake agent between them."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rank.collectives import (
    FLOAT,
    SUMS,
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_reduce_future,
    all_to_all_single,
    barriers,
    batched_send_and_receive,
    broadcast,
    functional_all,
    gather,
    objects,
    ours,
    plain,
    reduce_scatter_tensor,
    scatter,
    send_and_receive,
)
from tests.rank.training import losses_and_weights
from tests.rank.worlds import FakeAgent, run_world, say, wait_for
from ttprun.groups.journal import Journal
from ttprun.introspect.current_rank import current
from ttprun.protocol import from_rank


def several_at_once(rank: int) -> Any:
    tensors = [ours(rank) * (k + 1) for k in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in tensors]
    for work in works[::-1]:
        work.wait()
    return tensors


def chained_futures(rank: int) -> Any:
    tensors = [ours(rank), ours(rank) * 2]
    futures = [dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] + 1) for x in tensors]
    return [future.wait() for future in futures]


def wait_on_another_thread(rank: int) -> Any:
    x = ours(rank)
    work = dist.all_reduce(x, async_op=True)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join(60)
    return x, thread.is_alive()


def ask_until_completed(rank: int) -> Any:
    x = ours(rank)
    work = dist.all_reduce(x, async_op=True)
    end = threading.Event()
    while not work.is_completed():
        end.wait(0.01)
    return x


def into_parameters(rank: int) -> Any:
    """As optimizers do that communicate inside step(): what is waited for is issued again on another thread."""
    gathered, sent = torch.nn.Parameter(torch.zeros(6)), torch.nn.Parameter(ours(rank))
    with torch.no_grad():
        works = [
            dist.all_gather_into_tensor(gathered, ours(rank), async_op=True),
            dist.broadcast(sent, 1, async_op=True),
        ]
        for work in works:
            work.wait()
    return [gathered, sent]


HANGING: dict[str, Callable[[int], Any]] = {
    "allreduce": all_reduce,
    "allreduce future": all_reduce_future,
    "several at once": several_at_once,
    "chained futures": chained_futures,
    "another thread": wait_on_another_thread,
    "polling": ask_until_completed,
    "into parameters": into_parameters,
    "broadcast": functools.partial(broadcast, root=0),
    "broadcast from 1": functools.partial(broadcast, root=1),
    "allgather": all_gather,
    "all_gather_single": all_gather_into_tensor,
    "reduce_scatter_single": reduce_scatter_tensor,
    "gather": gather,
    "scatter": scatter,
    "all_to_all_single": all_to_all_single,
    "allreduce_coalesced": all_reduce_coalesced,
    "functional collectives": functional_all,
    "objects": objects,
    "barrier": barriers,
    "send and receive": send_and_receive,
    "batched send and receive": batched_send_and_receive,
}
CUT_STYLES = ("plain", "small buckets", "views", "half hook")
EXPECTED_AFTER_HANGING: dict[str, Any] = {
    "several at once": [[[FLOAT, [(k + 1) * s for s in SUMS]] for k in range(4)]] * 2,
    "chained futures": [[[FLOAT, [s + 1 for s in SUMS]], [FLOAT, [2 * s + 1 for s in SUMS]]]] * 2,
    "another thread": [[[FLOAT, SUMS], False]] * 2,
    "polling": [[FLOAT, SUMS]] * 2,
    "into parameters": [[[FLOAT, [10.0, 11.0, 12.0, 20.0, 21.0, 22.0]], [FLOAT, [20.0, 21.0, 22.0]]]] * 2,
}


def be_held_up(rank: int, name: str) -> None:
    """Rank 0 goes on into an operation; rank 1 waits until the connection has been broken and rebuilt."""
    if rank == 0:
        say(f"waiting {name}")
    else:
        wait_for(f"go {name}")


def rebuild(agent: FakeAgent, name: str, times: int = 1) -> None:
    """In the scenario: what a broken link brings about while rank 0 waits."""
    agent.wait_for(0, from_rank.Note, text=f"waiting {name}")
    agent.pause()
    for _ in range(times):
        agent.break_connections()
        if times > 1:
            agent.break_connections()
        agent.resume()
    agent.send_value(1, f"go {name}")


def hang_everywhere(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    session = current()
    assert session is not None
    found: dict[str, Any] = {}
    for name, call in HANGING.items():
        before = ours(rank)
        dist.all_reduce(before)
        taken = before.clone()
        before.mul_(0).add_(rank)  # the script goes on with its tensor
        be_held_up(rank, name)
        result = call(rank)
        after = ours(rank)
        dist.all_reduce(after)
        found[name] = [*plain([result, taken, before, after]), session.unprotected.text]
    return found


def rebuild_everywhere(agent: FakeAgent) -> None:
    for name in HANGING:
        rebuild(agent, name)


@pytest.fixture(scope="module")
def after_hanging() -> list[Any]:
    return run_world(hang_everywhere, scenario=rebuild_everywhere)


@pytest.mark.parametrize("name", HANGING)
def test_a_rank_that_waits_when_the_connection_breaks_gets_the_right_result(
    name: str, after_hanging: list[Any], gloo_and_ours: tuple[list[Any], list[Any]]
) -> None:
    expected = EXPECTED_AFTER_HANGING.get(name) or [result[name] for result in gloo_and_ours[0]]

    found = [result[name] for result in after_hanging]

    assert [result[0] for result in found] == expected
    assert [result[4] for result in found] == ["", ""]


@pytest.mark.parametrize("name", HANGING)
def test_what_was_done_before_a_break_stays_as_the_script_has_left_it(name: str, after_hanging: list[Any]) -> None:
    found = [result[name] for result in after_hanging]

    assert [result[1:4] for result in found] == [
        [[FLOAT, SUMS], [FLOAT, [rank] * 3], [FLOAT, SUMS]] for rank in (0.0, 1.0)
    ]


def train_and_be_cut(rank: int) -> dict[str, Any]:
    def at_step(step: int, how: str) -> None:
        if step == 3:  # rank 0 hangs in the first all-reduce of its backward pass
            be_held_up(rank, how)

    return {how: losses_and_weights(rank, how, at_step=functools.partial(at_step, how=how)) for how in CUT_STYLES}


def rebuild_in_training(agent: FakeAgent) -> None:
    for how in CUT_STYLES:
        agent.boundary += 3
        rebuild(agent, how)
        agent.boundary += 2


@pytest.fixture(scope="module")
def after_cut() -> list[Any]:
    return run_world(train_and_be_cut, scenario=rebuild_in_training)


@pytest.mark.parametrize("how", CUT_STYLES)
def test_ddp_comes_to_the_same_weights_if_the_connection_breaks_in_a_backward_pass(
    how: str, after_cut: list[Any], gloo_and_ours: tuple[list[Any], list[Any]]
) -> None:
    assert [result[how] for result in after_cut] == [result[f"ddp {how}"] for result in gloo_and_ours[0]]


def hang_once(rank: int) -> Any:
    be_held_up(rank, "once")
    return plain(several_at_once(rank))


def rebuild_thrice(agent: FakeAgent) -> None:
    rebuild(agent, "once", times=3)


def test_a_connection_may_break_again_while_it_is_repaired() -> None:
    assert run_world(hang_once, scenario=rebuild_thrice) == EXPECTED_AFTER_HANGING["several at once"]


def make_a_group(rank: int) -> Any:
    be_held_up(rank, "group")
    x = ours(rank)
    dist.all_reduce(x, group=dist.new_group([0, 1]))
    return plain(x)


def rebuild_while_a_group_is_made(agent: FakeAgent) -> None:
    rebuild(agent, "group")


def test_a_rank_that_waits_in_new_group_when_the_connection_breaks_gets_its_group() -> None:
    found = run_world(make_a_group, scenario=rebuild_while_a_group_is_made)

    assert found == [[FLOAT, SUMS]] * 2


def be_left_alone(rank: int) -> Any:
    """Rank 1 closes its connection and no recovery comes: rank 0 must get the error, as under torchrun."""
    from ttprun.groups import journal

    journal.PATIENCE_S = 0.5
    x = ours(rank)
    dist.all_reduce(x)
    if rank == 1:
        group: Any = dist.group.WORLD
        group.links.cut()
        return "cut"
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


def test_without_a_recovery_the_script_gets_the_backends_error() -> None:
    assert run_world(be_left_alone) == ["RuntimeError", "cut"]


def be_left_alone_by_an_agent_that_stands_still(rank: int) -> Any:
    """No recovery can come before the agent is awake again."""
    session = current()
    assert session is not None
    is_awake = threading.Event()
    session[Journal].is_agent_awake = is_awake.is_set
    threading.Timer(2.0, is_awake.set).start()
    return be_left_alone(rank), is_awake.is_set() or rank == 1


def test_while_the_agent_stands_still_the_script_gets_no_error() -> None:
    assert run_world(be_left_alone_by_an_agent_that_stands_still) == [("RuntimeError", True), ("cut", True)]
