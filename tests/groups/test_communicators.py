"""Communicators of devices, which are made in C++ that blocks until all members have come, and hears nothing."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ttprun.device.interface import DeviceFailedError
from ttprun.groups import generations, links
from ttprun.groups.connection import Exchange, GenerationOverError, GroupMember
from ttprun.groups.device_link import LateLink
from ttprun.protocol import from_rank

LIMIT_S = 60.0
DEVICE = torch.device("meta", 0)  # torch knows the kind, and keeps nothing there
ARGS = ([torch.empty(1, device=DEVICE)],)


class Work:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class Backend:
    """Its communicator is made when `may_connect` is set; that thread hears nothing before."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.has_begun, self.may_connect = threading.Event(), threading.Event()

    def allreduce(self, tensors: Any, options: Any) -> Work:
        self.events.append("connects")
        self.has_begun.set()
        assert self.may_connect.wait(LIMIT_S)
        return Work()

    def abort(self) -> None:
        self.events.append("aborted")


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = SimpleNamespace(
        set_device=lambda index: None, Stream=lambda device: None, stream=lambda stream: contextlib.nullcontext()
    )
    monkeypatch.setattr(torch, "meta", module, raising=False)
    return


def exchanges(size: int) -> list[Exchange]:
    """Those of several ranks, each of which hears what the others put."""
    found: list[Exchange] = []

    def channel_of(rank: int) -> Any:
        def send(put: from_rank.Put) -> None:
            for other in range(size):
                if other != rank:
                    found[other].deliver(put.generation, put.key, put.value)

        return SimpleNamespace(send=send)

    found.extend(Exchange(channel_of(rank)) for rank in range(size))
    return found


def member(exchange: Exchange, rank: int = 0, size: int = 1, **more: Any) -> GroupMember:
    return GroupMember(exchange, 1, "key", "0", rank, size, list(range(size)), timedelta(seconds=LIMIT_S), **more)


def link_of(place: GroupMember, backend: Any) -> LateLink:
    group: Any = dist.ProcessGroup(place.rank, place.size)  # type: ignore[call-arg]
    link = LateLink(place, "meta", lambda store, member: group)
    link.backend = backend
    return link


def on_thread(call: Any, *args: Any) -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call(*args)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failed


def test_an_operation_that_is_left_to_torch_needs_nothing_of_the_devices_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "meta", SimpleNamespace())
    (exchange,) = exchanges(1)
    events: list[str] = []
    link = link_of(member(exchange), backend := Backend(events))
    link._group = backend
    backend.may_connect.set()

    link.issue_plainly("allreduce", (*ARGS, None))

    assert events == ["connects"]


class Pairs(Backend):
    """Whose messages are noted as well."""

    def send(self, tensors: Any, peer: int, tag: int) -> Work:
        self.events.append(f"sends to {peer}")
        return Work()

    def recv(self, tensors: Any, peer: int, tag: int) -> Work:
        self.events.append(f"receives from {peer}")
        return Work()


def test_two_ranks_make_a_communicator_for_their_messages_and_wait_for_no_third() -> None:
    """The third never comes; each is in C++ only when the other is about to be."""
    events: list[list[str]] = [[], []]
    places = [member(exchange, rank, 3) for rank, exchange in enumerate(exchanges(3))]
    for exchange in {place.exchange for place in places}:
        for rank in range(3):
            exchange.deliver(1, f"group key/meta/here {rank}", b"-")
    pair = [link_of(place, Pairs(noted)) for place, noted in zip(places[:2], events, strict=True)]
    of_each = [(ARGS[0], 1 - rank, 0) for rank in range(2)]

    first, failed = on_thread(pair[0].make_ready, of_each[0])
    assert not events[0]
    pair[1].make_ready(of_each[1])
    first.join(LIMIT_S)

    assert (failed, events) == ([], [["sends to 1"], ["receives from 0"]])
    assert [link.is_ready(args) for link, args in zip(pair, of_each, strict=True)] == [True, True]
    assert not pair[0].is_ready((ARGS[0], 2, 0))
    assert not pair[0].is_ready(ARGS)


def test_a_second_fault_while_a_communicator_is_made_is_answered_and_the_backend_left_to_its_thread() -> None:
    (exchange,) = exchanges(1)
    events: list[str] = []
    backend = Backend(events)
    link = link_of(member(exchange), backend)
    waiting, failed = on_thread(link.make_ready, ARGS)
    assert backend.has_begun.wait(LIMIT_S)

    exchange.end_before(2)

    waiting.join(LIMIT_S)
    assert [type(error) for error in failed] == [GenerationOverError]
    link.abort()  # which does not wait for the thread, nor call the backend
    assert events == ["connects"]
    link.drop()
    held, may_connect = weakref.ref(backend), backend.may_connect
    del backend
    gc.collect()
    assert held() is not None
    may_connect.set()


def test_a_communicator_that_is_made_after_its_generation_has_ended_is_aborted_by_the_thread_that_made_it() -> None:
    (exchange,) = exchanges(1)
    events: list[str] = []
    backend = Backend(events)
    link = link_of(member(exchange), backend)
    waiting, _ = on_thread(link.make_ready, ARGS)
    assert backend.has_begun.wait(LIMIT_S)
    exchange.end_before(2)
    waiting.join(LIMIT_S)
    link.abort()

    backend.may_connect.set()

    ended = [thread for thread in threading.enumerate() if thread.name == "ttprun-connecting"]
    for thread in ended:
        thread.join(LIMIT_S)
    assert events == ["connects", "aborted"]


def test_an_operation_waits_until_all_members_are_about_to_issue_their_first() -> None:
    both = exchanges(2)
    events: list[list[str]] = [[], []]
    backends = [Backend(events[rank]) for rank in range(2)]
    for backend in backends:
        backend.may_connect.set()
    made: list[Any] = [None, None]

    def make(rank: int) -> None:
        made[rank] = link_of(member(both[rank], rank, 2), backends[rank])

    for thread, failed in [on_thread(make, rank) for rank in range(2)]:
        thread.join(LIMIT_S)
        assert not failed
    first, failed = on_thread(made[0].make_ready, ARGS)
    first.join(0.2)
    assert first.is_alive()
    assert events == [[], []]  # it does not block in C++

    made[1].make_ready(ARGS)

    first.join(LIMIT_S)
    assert not failed
    assert events == [["connects"], ["connects"]]
    assert made[0].is_ready(ARGS)


@pytest.mark.parametrize("connects", [(True, True), (True, False), (False, False)])
def test_all_members_connect_at_once_or_none_does(connects: tuple[bool, bool]) -> None:
    both = exchanges(2)
    ready: list[bool] = [False, False]

    def make(rank: int) -> None:
        class Group(dist.ProcessGroup):
            def allreduce(self, *args: Any) -> Any:
                return Work()

            def abort(self) -> None:
                """It has nothing to end."""

        place = member(both[rank], rank, 2, device=DEVICE, connects_now=connects[rank])
        link = LateLink(place, "meta", lambda store, member: Group(rank, 2))  # type: ignore[call-arg]
        ready[rank] = link.is_used

    for thread, failed in [on_thread(make, rank) for rank in range(2)]:
        thread.join(LIMIT_S)
        assert not failed

    assert ready == [all(connects)] * 2


def test_an_abort_that_does_not_return_costs_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ABORT_LIMIT_S", 0.05)
    never = threading.Event()
    (exchange,) = exchanges(1)
    link = link_of(member(exchange), SimpleNamespace(abort=never.wait))

    with pytest.raises(DeviceFailedError, match="the abort of 1 communicators has not returned"):
        links.abort_all([link])

    never.set()


def test_a_device_that_does_not_end_its_work_costs_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    module = SimpleNamespace(current_device=lambda: 0, set_device=lambda index: None, synchronize=never.wait)
    monkeypatch.setattr(generations.accelerator, "in_use", lambda: ("meta", module))
    monkeypatch.setattr(generations, "SETTLE_LIMIT_S", 0.05)

    with pytest.raises(DeviceFailedError, match="has not ended its work within"):
        generations.settle()

    never.set()
