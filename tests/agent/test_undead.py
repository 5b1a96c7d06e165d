"""A rank that cannot die for long, as in an uninterruptible read of a file server, holds up nothing: scenario A46."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agent.frozen import Freezer
from tests.agent.starting import LIMIT_S, wait_for_end
from tests.agent.test_supervisor import begin, comes_around, make, supervisor, verdict_of  # noqa: F401 - fixtures
from ttprun import recovery
from ttprun.agent.base import stack_dumps
from ttprun.agent.launcher.supervisor import Supervisor
from ttprun.agent.node import process_watch
from ttprun.agent.node.rank_processes import RankHandler
from ttprun.protocol import process_orders

NOT_IN_TIME_S = 100 * LIMIT_S  # a wait of the loop for this would be seen: it does not come around


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    made = Freezer()
    yield made
    made.remove()


@pytest.fixture
def two_ranks(
    supervisor: Supervisor,  # noqa: F811
    freezer: Freezer,
    started: Callable[..., RankHandler],
) -> Iterator[Supervisor]:
    """Neither does anything, and rank 0 is frozen."""
    begin(supervisor, [started("-c", "exec sleep 600", entry="/bin/sh", is_python=False) for _ in range(2)])
    freezer.freeze(supervisor.node.here[0].pid)
    (first, _), node = [slot.handler for slot in supervisor.node.here], supervisor.node
    yield supervisor
    freezer.thaw()
    supervisor.stop(0)
    if (replacement := node.here[0].handler) is not first:
        replacement.proc.wait()
        replacement.close(signal.SIGKILL)
        replacement.channel.close()


def hang(supervisor: Supervisor) -> None:  # noqa: F811
    """The machine hears that rank 0 hangs, and orders its end and a replacement."""
    node = supervisor.node
    event = recovery.RankHung(
        at_s=time.monotonic(), rank=0, pid=node.here[0].pid, boundary=0, detected_after_s=1.0, reason="it is frozen"
    )
    node.call(lambda: node.advance(event))


def test_while_a_rank_does_not_die_the_loop_goes_round_and_another_rank_s_end_is_answered(
    two_ranks: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_watch, "DEATH_LIMIT_S", NOT_IN_TIME_S)
    frozen, other = two_ranks.node.here

    hang(two_ranks)
    goes_round = comes_around(two_ranks)
    os.kill(other.pid, signal.SIGKILL)
    verdict = verdict_of(two_ranks)

    assert (goes_round, verdict) == (True, "fail")  # no restart is left
    assert frozen.handler.proc.poll() is None


def test_a_replacement_does_not_wait_for_ever_for_a_process_that_does_not_die(
    two_ranks: Supervisor, freezer: Freezer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_watch, "DEATH_LIMIT_S", 1.0)
    slot = two_ranks.node.here[0]
    lost = slot.handler.proc

    hang(two_ranks)
    give_up_at_s = time.monotonic() + LIMIT_S
    while slot.pid == lost.pid and time.monotonic() < give_up_at_s and comes_around(two_ranks):
        time.sleep(0.01)

    assert slot.pid != lost.pid
    assert Path(f"/proc/{lost.pid}").exists()
    freezer.thaw()
    assert wait_for_end(lost.pid)


def test_while_the_stack_of_a_rank_is_read_the_loop_goes_round(
    two_ranks: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late rank is asked for its stack before it is killed; this one never answers."""
    monkeypatch.setattr(stack_dumps, "_BOARD_LIMIT_S", NOT_IN_TIME_S)
    order = process_orders.KillRank(0, "it is late", is_late=True)

    two_ranks.node.call(lambda: two_ranks.group.agent.carry_out(order))

    assert comes_around(two_ranks)
