"""The spare pool: launchers that wait for the slots of a lost node: real sockets, no ranks."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.agent.nodes import ALIKE, LIMIT_S, Lead, Store
from ttprun.agent.base.spare_pool import RendezvousKeys, read_where, write_where
from ttprun.agent.between import rendezvous
from ttprun.agent.between.latecomers import LOST, Taken, wait_for_slots
from ttprun.agent.between.rendezvous import Place
from ttprun.errors import ConfigError
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.channel import Channel
from ttprun.protocol.standby_messages import WarmUp


@pytest.fixture
def warm() -> list[tuple[list[str], list[str]]]:
    """What those who wait have learnt that their standbys should import and compile."""
    return []


@pytest.fixture
def wait(warm: list[tuple[list[str], list[str]]]) -> Iterator[Callable[..., Future[Any]]]:
    pool = ThreadPoolExecutor(4)

    def warmed(modules: list[str], files: list[str]) -> None:
        warm.append((modules, files))

    yield lambda where, alike=ALIKE: pool.submit(wait_for_slots, where, Place("127.0.0.1", alike), warmed)
    pool.shutdown()


Wait = Callable[..., "Future[Any]"]


def test_who_waits_gets_the_slots_of_a_lost_node_with_the_records_of_its_ranks(lead: Lead, wait: Wait) -> None:
    waiting = wait(lead.where)
    lead.run(lambda: bool(lead.came))

    address = lead.peers.slot(1, lambda address: True)
    for rank in (2, 3):
        lead.peers.send(1, node_messages.Records(rank, f"of rank {rank}"))
    taken = waiting.result(LIMIT_S)

    assert address == "127.0.0.1"
    assert isinstance(taken, Taken)
    assert {rank: one.part for rank, one in taken.records.items()} == {2: "of rank 2", 3: "of rank 3"}
    assert (taken.peers.node, taken.peers.size, taken.peers.ranks_per_node) == (1, 2, 2)
    assert taken.peers.master == "10.0.0.1 29500"
    assert lead.peers.is_connected(1)
    taken.peers.close(selectors.DefaultSelector())


def test_who_waits_knows_what_the_ranks_have_imported_whether_it_came_before_or_after_they_had(
    lead: Lead, wait: Wait, warm: list[tuple[list[str], list[str]]]
) -> None:
    pool = lead.peers.pool
    assert pool is not None
    waiting = [wait(lead.where)]
    lead.run(lambda: len(lead.came) == 1)
    pool.warm_up(WarmUp(["torch.optim"], ["model.py"]))
    waiting.append(wait(lead.where))

    lead.run(lambda: len(warm) == 2)

    assert warm == [(["torch.optim"], ["model.py"])] * 2
    lead.peers.close(lead.selector)
    assert [one.result(LIMIT_S).kind for one in waiting] == [LOST, LOST]


def test_who_may_not_train_is_passed_over_and_keeps_its_place(lead: Lead, wait: Wait) -> None:
    waiting = wait(lead.where)
    lead.run(lambda: bool(lead.came))

    address = lead.peers.slot(1, lambda address: False)

    assert address is None
    assert not lead.peers.is_connected(1)
    assert len(lead.peers.pool or ()) == 1
    lead.peers.close(lead.selector)
    assert waiting.result(LIMIT_S).kind == LOST


def test_who_runs_another_script_is_turned_away_with_what_differs(lead: Lead, wait: Wait) -> None:
    waiting = wait(lead.where, ALIKE | {"the script": "xyz"})
    lead.run(waiting.done)

    error = waiting.exception()
    assert isinstance(error, ConfigError)
    assert "differ in the script" in str(error)
    assert len(lead.peers.pool or ()) == 0


def test_who_waits_hears_how_the_group_has_ended(lead: Lead, wait: Wait) -> None:
    waiting = wait(lead.where)
    lead.run(lambda: bool(lead.came))

    lead.peers.conclude(meeting.Concluded("done", "", True, 0))
    lead.peers.close(lead.selector)

    assert waiting.result(LIMIT_S) == meeting.Concluded("done", "", True, 0)


def test_who_waits_goes_to_the_next_leader_if_the_one_that_leads_is_lost(lead: Lead, wait: Wait) -> None:
    following = Lead()
    pools = {0: lead.where, 1: following.where}
    waiting = wait(lead.where)
    lead.run(lambda: bool(lead.came))
    pool = lead.peers.pool
    assert pool is not None
    pool.announce(meeting.SparePools(pools, 1))

    lead.peers.close(lead.selector)
    following.run(lambda: bool(following.came))
    following.peers.conclude(meeting.Concluded("done", "", True, 0))
    following.peers.close(following.selector)

    assert waiting.result(LIMIT_S) == meeting.Concluded("done", "", True, 0)


def test_who_has_come_through_the_listener_and_said_nothing_yet_is_kept_when_another_answers(lead: Lead) -> None:
    pool = lead.peers.pool
    assert pool is not None
    with socket.create_connection((lead.where.address, lead.where.port)) as sock:
        lead.run(lambda: bool(pool.listener._newcomers))
        pool.watch(lead.selector, lead.came.append)
        link = Channel(sock, rendezvous.KNOWN)
        link.send(meeting.Hello(lead.where.token, -1, "10.0.0.3", ALIKE))

        lead.run(lambda: lead.came == ["10.0.0.3"])

    assert len(pool) == 1


def test_a_node_that_was_given_up_is_not_let_in_again_as_one_of_the_group(lead: Lead) -> None:
    with socket.create_connection((lead.where.address, lead.where.port)) as sock:
        link = Channel(sock, rendezvous.KNOWN)
        link.send(meeting.Hello(lead.where.token, 1, "10.0.0.2", ALIKE))
        pool = ThreadPoolExecutor(1)
        answer = pool.submit(link.receive_with_fds)
        lead.run(answer.done)

    assert isinstance(answer.result()[0], meeting.Deposed)
    assert lead.came == []
    pool.shutdown()


def test_a_launcher_knows_by_the_rendezvous_store_how_many_came_before_and_where_to_wait() -> None:
    store = Store()
    rendezvous_keys = RendezvousKeys(store, "job 7")

    before = rendezvous_keys.announced()
    numbers = [RendezvousKeys(store, "job 7").arrive() for _ in range(3)]
    rendezvous_keys.announce(meeting.Where("10.0.0.1", 1, "t"))

    assert before is None
    assert numbers == [1, 2, 3]
    assert RendezvousKeys(store, "job 8").arrive() == 1
    assert rendezvous_keys.announced() == meeting.Where("10.0.0.1", 1, "t")
    assert RendezvousKeys(store, "job 8").announced() is None


def test_where_a_group_is_stands_in_the_save_directory_for_who_cannot_reach_the_store(tmp_path: Path) -> None:
    file = tmp_path / "save" / "leader-train.json"
    where = meeting.Where("10.0.0.1", 7, "secret")

    before = read_where(str(file))
    write_where(str(file), where)

    assert before is None
    assert read_where(str(file)) == where
    assert file.stat().st_mode & 0o077 == 0, "it has the token"
    assert list(file.parent.iterdir()) == [file]


def test_who_comes_while_the_job_saves_its_state_and_ends_is_for_its_next_start(lead: Lead, wait: Wait) -> None:
    pool = lead.peers.pool
    assert pool is not None
    pool.is_ending = lambda: True

    waiting = wait(lead.where)
    lead.run(waiting.done)

    assert waiting.result().kind == "restart"
    assert (lead.came, len(pool)) == ([], 0)
