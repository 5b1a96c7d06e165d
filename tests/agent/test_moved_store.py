"""The store that the agent that leads serves, and who finds it: real sockets and stores, no ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.agent.nodes import LIMIT_S, Lead
from tests.nodes import free_port
from ttprun.agent.base.spare_pool import RendezvousKeys, read_where, write_where
from ttprun.agent.between import latecomers
from ttprun.agent.between.latecomers import JobFinder, MovedStore
from ttprun.protocol import meeting

LOST = "127.0.0.9"  # nobody listens there


@pytest.fixture
def during(lead: Lead) -> Iterator[Callable[[Callable[[], str]], str]]:
    """What a call returns while the supervisor of the agent that leads does its work."""
    pool = ThreadPoolExecutor(1)

    def run(call: Callable[[], str]) -> str:
        answer: Future[str] = pool.submit(call)
        lead.run(answer.done)
        return answer.result(LIMIT_S)

    yield run
    pool.shutdown()


def finder(file: Path | str, port: int = 1, hosts: tuple[str, ...] = (), is_host: bool = True) -> JobFinder:
    return JobFinder(f"{LOST}:{port}", "job", str(file), lambda: hosts, is_host)


def test_the_store_of_a_running_job_is_found_by_the_leaders_file(
    lead: Lead, during: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "leader-job.json"
    store = MovedStore(free_port(), "job", 2, str(file))
    store.announce("127.0.0.1", lead.where)

    found = during(finder(file).find)

    assert found == read_where(str(file)).store  # type: ignore[union-attr]
    assert lead.came == [], "it has only asked"


def test_it_is_found_by_the_hosts_that_may_train_if_there_is_no_file(lead: Lead) -> None:
    port = free_port()
    store = MovedStore(port, "job", 2, "")
    store.announce("127.0.0.1", lead.where)

    assert finder("", port, ("127.0.0.1",)).find() == f"127.0.0.1:{port}"
    assert JobFinder(f"{LOST}:{port}", "another", "", lambda: ("127.0.0.1",), True).find() == ""


def test_a_launcher_that_comes_by_the_moved_store_is_one_more_than_the_job_needs(lead: Lead) -> None:
    store = MovedStore(free_port(), "job", 2, "")

    for _ in range(2):  # it leads, and leads again after a restart of all ranks
        store.announce("127.0.0.1", lead.where)

    assert store._store is not None
    keys = RendezvousKeys(store._store, "job")
    assert keys.announced() == lead.where
    assert keys.arrive() == 3


def test_if_the_port_of_the_rendezvous_is_taken_the_store_has_another_one(lead: Lead, tmp_path: Path) -> None:
    file, taken = tmp_path / "leader-job.json", lead.where.port

    MovedStore(taken, "job", 2, str(file)).announce("127.0.0.1", lead.where)

    assert read_where(str(file)).store not in ("", f"127.0.0.1:{taken}")  # type: ignore[union-attr]


def test_what_a_lost_leader_has_left_is_no_job(tmp_path: Path) -> None:
    file = tmp_path / "leader-job.json"
    write_where(str(file), meeting.Where("127.0.0.1", free_port(), "t", store="127.0.0.1:1"))

    assert finder(file).find_at_start() == ""


def test_somebody_else_at_the_port_of_a_lost_leader_is_no_job(
    lead: Lead, during: Callable[..., str], tmp_path: Path
) -> None:
    file = tmp_path / "leader-job.json"
    write_where(str(file), replace(lead.where, token="of an earlier run", store="127.0.0.1:1"))

    assert during(finder(file).find) == ""


def test_a_launcher_that_comes_while_the_job_ends_waits_for_that_and_then_starts_it_again(
    lead: Lead, tmp_path: Path
) -> None:
    file, asked = tmp_path / "leader-job.json", threading.Event()
    write_where(str(file), replace(lead.where, store="127.0.0.1:1"))
    assert lead.peers.pool is not None
    lead.peers.pool.is_ending = lambda: asked.set() or True  # type: ignore[func-returns-value]

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(finder(file).find_at_start)
        lead.run(asked.is_set)
        assert not answer.done()
        lead.peers.close(lead.selector)

        assert answer.result(LIMIT_S) == ""


def test_it_also_waits_until_the_store_of_the_job_that_has_ended_is_gone(
    lead: Lead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([meeting.Concluded("restart", "the job is ending", True, 0), None, None, None])
    there, looks = iter([True, True, False]), []
    monkeypatch.setattr(JobFinder, "find", lambda self: "")
    monkeypatch.setattr(JobFinder, "_ask_leader", lambda self: next(answers))
    monkeypatch.setattr(latecomers, "_has_job", lambda *where: looks.append(where) or next(there))
    monkeypatch.setattr(latecomers, "_LOOK_AGAIN_S", 0.0)

    assert finder("", port=7).find_at_start() == ""
    assert looks == [(LOST, 7, "job")] * 3


def test_an_agent_whose_job_has_ended_leaves_the_file_of_another_leader_alone(lead: Lead, tmp_path: Path) -> None:
    file = tmp_path / "leader-job.json"
    first, second = (MovedStore(free_port(), "job", 2, str(file)) for _ in range(2))
    first.announce("127.0.0.1", lead.where)
    second.announce("127.0.0.1", replace(lead.where, token="of the next leader"))

    first.withdraw()
    of_the_next = read_where(str(file))
    second.withdraw()

    assert of_the_next is not None
    assert not file.exists()
