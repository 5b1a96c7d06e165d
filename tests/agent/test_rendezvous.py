"""The agents of a group meet: real sockets, a rendezvous store of a dict."""

from __future__ import annotations

import json
import selectors
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.agent.nodes import Store
from ttprun.agent.base.peers import Peers
from ttprun.agent.between import rendezvous
from ttprun.agent.between.rendezvous import NotMetError, Place, first_start, meet, own_address
from ttprun.errors import ConfigError
from ttprun.protocol import process_orders
from ttprun.protocol.rank_events import RankStarted

LIMIT_S = 60.0


def place(number: int, size: int = 2, **alike: str) -> Place:
    """One node of a group."""
    alike = {"ttprun": "1.0", "the script": "abc"} | alike
    return Place("127.0.0.1", alike, number=number, size=size, ranks=2)


@pytest.fixture
def meet_all() -> Any:
    """Let all agents meet at once; each answer is its Peers or its error."""
    pool = ThreadPoolExecutor(8)
    made: list[Peers] = []

    def meet_them(store: Store, *places: Place) -> list[Any]:
        futures: list[Future[Peers]] = [pool.submit(meet, first_start(store), one) for one in places]
        answers: list[Any] = [future.exception(LIMIT_S) or future.result() for future in futures]
        made.extend(answer for answer in answers if isinstance(answer, Peers))
        return answers

    yield meet_them
    for peers in made:
        peers.close(selectors.DefaultSelector())
    pool.shutdown()


def heard(peers: Peers) -> list[tuple[int, Any]]:
    """The next messages that come to an agent."""
    found: list[tuple[int, Any]] = []
    selector = selectors.DefaultSelector()
    peers.watch(
        selector, lambda node, message: found.append((node, message)), lambda node, why: None, lambda address: None
    )
    while not found:
        for key, _ in selector.select(LIMIT_S):
            key.data()
    return found


Meet = Callable[..., list[Any]]


def test_the_agents_of_three_nodes_meet_and_the_first_one_leads(meet_all: Meet) -> None:
    leader, first, second = meet_all(Store(), place(0, 3), place(1, 3), place(2, 3))

    leader.send(2, process_orders.SpawnRank(4, 1))
    first.to_leader(RankStarted(at_s=1.0, rank=2, pid=77))

    assert heard(second) == [(0, process_orders.SpawnRank(4, 1))]
    assert heard(leader) == [(1, RankStarted(at_s=1.0, rank=2, pid=77))]
    assert [peers.is_follower for peers in (leader, first, second)] == [False, True, True]


def test_nodes_with_different_scripts_are_refused_on_each_of_them_with_what_differs(meet_all: Meet) -> None:
    answers = meet_all(Store(), place(0, 3), place(1, 3), place(2, 3, **{"the script": "xyz"}))

    reported = "node 0 (127.0.0.1) and node 2 (127.0.0.1) differ in the script: abc and xyz"
    assert [type(answer) for answer in answers] == [ConfigError] * 3
    assert {str(answer).partition(";")[0] for answer in answers} == {reported}


def test_nodes_whose_clocks_differ_are_refused_on_each_of_them(meet_all: Meet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CLOCK_LIMIT_S", -1.0)

    answers = meet_all(Store(), place(0), place(1))

    assert [type(answer) for answer in answers] == [ConfigError] * 2
    assert "the clock of node 1 (127.0.0.1) is 0 s " in str(answers[0])
    assert str(answers[0]) == str(answers[1])


def test_the_leader_learns_who_does_not_share_its_save_directory(
    meet_all: Meet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = replace(place(0), save_dir=str(tmp_path / "not made yet"))

    shared, _ = meet_all(Store(), first, place(1))
    monkeypatch.setattr(rendezvous.os.path, "exists", lambda path: False)
    separate, _ = meet_all(Store(), first, place(1))

    assert (shared.without_save_dir, separate.without_save_dir) == ([], [1])
    assert list(tmp_path.iterdir()) == []


GUESS = b'{"op": "Hello", "token": "guessed", "node": 1, "address": "", "alike": {}}\n'


@pytest.mark.parametrize("says", [GUESS, b""], ids=["one that does not know the token", "those who say nothing"])
def test_strangers_are_hung_up_on_and_hold_up_nobody(
    meet_all: Meet, monkeypatch: pytest.MonkeyPatch, says: bytes
) -> None:
    monkeypatch.setattr(rendezvous, "LIMIT_S", 100 * LIMIT_S)  # a wait for one would not end in this test's time
    store = Store()
    strangers: list[socket.socket] = []
    answered: Future[bytes] = Future()

    def knock() -> None:
        store.wait(["ttprun/leader"], timedelta(seconds=LIMIT_S))
        where = json.loads(store.get("ttprun/leader"))
        strangers.extend(socket.create_connection((where["address"], where["port"]), LIMIT_S) for _ in range(5))
        strangers[0].sendall(says)
        answered.set_result(strangers[0].recv(100) if says else b"")
        meet_all(store, place(1))

    knocking = threading.Thread(target=knock, daemon=True)
    knocking.start()
    (leader,) = meet_all(store, place(0))
    knocking.join(LIMIT_S)

    assert answered.result(LIMIT_S) == b""
    assert isinstance(leader, Peers)
    for sock in strangers:
        sock.close()


def test_if_a_node_does_not_come_all_know_that_they_have_not_met(
    meet_all: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "LIMIT_S", 0.5)

    answers = meet_all(Store(), place(0, 3), place(1, 3))

    assert [type(answer) for answer in answers] == [NotMetError] * 2


def test_a_node_waits_for_the_name_of_one_that_is_not_placed_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = socket.getaddrinfo
    answers = iter([socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2)

    def look_up(host: str, port: int, **how: Any) -> Any:
        for answer in answers:
            raise answer
        return looked_up("127.0.0.1", port, **how)

    monkeypatch.setattr(rendezvous, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    with pytest.raises(OSError, match="not known"):
        own_address(None, "train-node-0-0.train:29400")
    assert own_address(None, "train-node-0-0.train:29400", LIMIT_S) == "127.0.0.1"


def test_a_node_is_known_by_the_address_with_which_it_reaches_the_rendezvous() -> None:
    assert own_address(None, "127.0.0.1:29400") == "127.0.0.1"
    assert own_address("localhost", "10.0.0.1:29400") == "127.0.0.1"
