"""How much memory each rank's mirror may take, and that where none is wanted nothing is taken."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent.base.peers import Peers
from ttprun.agent.lead.comparisons import MirrorShares
from ttprun.agent.node import mirrors
from ttprun.agent.node.mirrors import MirrorCopies, Mirrors
from ttprun.agent.node.mirrors import fetch_copies as fetch
from ttprun.agent.node.node import Process
from ttprun.protocol.board import EMPTY_SLOT, SLOTS, Board, Field, SlotContent
from ttprun.protocol.meeting import Where

FREE = 8000
Make = Callable[..., tuple[Mirrors, Any]]


class Slot(Process):
    """Notes what its process is sent last."""

    def send_if_present(self, put: Any) -> None:
        self.order = put


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """`make(key=value)`: of a node with three ranks, when 8,000 bytes are free."""
    monkeypatch.setattr(mirrors, "free_bytes", lambda: FREE)
    made = []

    def new(nodes: int = 1, **config: object) -> tuple[Mirrors, Any]:
        slots = [Slot(rank, rank, None, record_fd=-1) for rank in range(3)]
        wanted = {"buddy": "auto", "buddy_memory": "25%", "mindio": False} | config
        node: Any = SimpleNamespace(
            config=SimpleNamespace(**wanted),
            rungs=frozenset(("replace", "rewind")),
            world_size=3,
            keeps_mirrors_twice=nodes > 1 and config.get("buddy") == "node",
            here=slots,
            slots=slots,
            process=lambda rank: slots[rank],
            board=Board.create(3)[1],
            peers=Peers(ranks_per_node=3, size=nodes),
        )
        node.shares = MirrorShares(node)
        made.append(Mirrors(node))
        return made[-1], node

    yield new
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("config", "together"),
    [
        ({}, 2000),
        ({"buddy_memory": "1000"}, 1000),
        ({"buddy_memory": "1TiB"}, FREE),
        ({"buddy": "on"}, FREE),
        ({"buddy": "node"}, 2000),
        ({"buddy": "node", "nodes": 2}, 1000),
    ],
)
def test_the_ranks_of_a_node_share_its_memory_by_their_weights(
    make: Make, config: dict[str, str], together: int
) -> None:
    found, node = make(**config)

    assert node.shares.share_out({0: 300, 2: 100})

    for slot in (node.slots[0], node.slots[2]):
        keep(found, node, slot)
    assert node.slots[0].order.limit_bytes == together * 3 // 4
    assert node.shares.order_for(1) is None
    assert node.slots[2].order.limit_bytes == together // 4
    assert not node.shares.share_out({0: 300, 2: 100})


def test_the_same_memory_is_kept_when_more_ranks_turn_out_to_be_single_holders(make: Make) -> None:
    found, node = make()
    node.shares.share_out({0: 100})
    keep(found, node, node.slots[0])
    before = found.paths_for(0)

    node.shares.share_out({0: 100, 1: 100})
    keep(found, node, node.slots[0])
    keep(found, node, node.slots[1])

    assert found.paths_for(0) == before
    assert all(os.path.exists(path) for path in found.paths_for(1))


@pytest.mark.parametrize("config", [{"buddy": "off"}, {"mindio": True}])
def test_where_no_mirror_is_wanted_no_rank_gets_one(make: Make, config: dict[str, object]) -> None:
    _, node = make(**config)

    assert not node.shares.share_out({0: 100, 1: 100, 2: 100})
    assert [node.shares.order_for(slot.rank) for slot in node.slots] == [None] * 3


def test_each_node_shares_out_its_own_memory(make: Make) -> None:
    _, node = make()
    node.peers.ranks_per_node = 2

    node.shares.share_out({0: 100, 1: 300, 2: 100})

    orders = [node.shares.order_for(slot.rank) for slot in node.slots]
    assert [order.share for order in orders if order] == [0.25, 0.75, 1.0]


@pytest.mark.parametrize(("config", "is_limited"), [({}, True), ({"buddy": "on"}, False)])
def test_only_a_mirror_that_nobody_has_asked_for_is_limited_in_what_it_costs(
    make: Make, config: dict[str, str], is_limited: bool
) -> None:
    found, node = make(**config)
    node.shares.share_out({0: 300})

    keep(found, node, node.slots[0])

    assert (node.slots[0].order.limit_share > 0) == is_limited


def keep(found: Mirrors, node: Any, slot: Process) -> None:
    """Its node gets the order."""
    order = node.shares.order_for(slot.rank)
    assert order is not None
    found.keep(order)


STATE = SlotContent(6, has_state=True, has_step=False)
STEP = SlotContent(5, has_state=True, has_step=True)
MIB = 1 << 20
Kept = tuple[MirrorCopies, Any, list[int]]


@pytest.fixture
def kept() -> Iterator[Kept]:
    """(copies of node 1 of two, which keeps those of rank 0; its board; files of who takes the lost slot)."""
    slots = [Process(rank, 0, None, record_fd=-1) for rank in range(2)]
    board = Board.create(2)[1]
    peers = SimpleNamespace(size=2, address="127.0.0.1")
    node: Any = SimpleNamespace(
        here=slots[1:], world_size=2, board=board, peers=peers, log=lambda event, **fields: None
    )
    copies = MirrorCopies(node, 4 * MIB)
    files = [os.memfd_create("fetched") for _ in range(SLOTS)]
    yield copies, board, files
    copies.close()
    for fd in files:
        os.close(fd)
    for thread in threading.enumerate():
        if thread.name == "ttprun-mirror-copies":
            thread.join(60)
            assert not thread.is_alive()


def fill(kept: Kept, number: int, held: SlotContent, content: bytes) -> None:
    copies, board, _ = kept
    with open(copies.paths_for(1)[number], "wb") as file:
        file.write(content)
    board.set(1, (Field.MIRROR_COPY_0, Field.MIRROR_COPY_1)[number], held.pack())


def test_who_takes_a_lost_nodes_slots_gets_what_the_next_one_keeps(kept: Kept) -> None:
    copies, _, files = kept
    state, step = os.urandom(MIB + 77), os.urandom(MIB + 77)
    fill(kept, 0, STATE, state)
    fill(kept, 1, STEP, step)

    held, taken = fetch(copies.serve(0), files, 3 * MIB)

    assert held == [STATE, STEP]
    assert taken == 2 * (MIB + 77)
    assert [os.pread(fd, 2 * MIB, 0) for fd in files] == [state, step]


def test_only_a_state_that_is_whole_can_be_written_into_a_checkpoint(kept: Kept) -> None:
    copies, _, _ = kept
    fill(kept, 0, STATE, b"of step 6")
    fill(kept, 1, SlotContent(5, has_state=False, has_step=True), b"before step 6")
    before, after = (copies.state_of(0, boundary) for boundary in (6, 5))

    copies.note(1)

    assert before == copies.paths_for(1)[0]
    assert after == copies.state_of(0, 6) == copies.state_of(1, 6) == ""
    assert copies.serve(0) == Where()  # after a way back what is kept is void


def test_what_finds_no_room_is_refused_by_its_size_and_can_still_be_fetched(kept: Kept) -> None:
    copies, _, files = kept
    fill(kept, 0, STATE, bytes(1000))
    fill(kept, 1, STEP, bytes(1000))
    where = copies.serve(0)

    with pytest.raises(OSError, match=r"more than the 1999 bytes .*--buddy-memory"):
        fetch(where, files, 1999)

    assert fetch(where, files, 2000) == ([STATE, STEP], 2000)


def test_who_does_not_know_the_token_gets_nothing_and_others_get_what_is_whole(kept: Kept) -> None:
    copies, _, files = kept
    fill(kept, 0, EMPTY_SLOT, b"half of a state")
    fill(kept, 1, STEP, b"all")
    where = copies.serve(0)

    with socket.create_connection((where.address, where.port), 10) as sock:
        sock.sendall(b"0" * 32)
        assert sock.recv(1) == b""

    assert fetch(where, files, MIB)[0] == [EMPTY_SLOT, STEP]


def test_a_node_that_is_lost_while_it_serves_is_an_error(kept: Kept) -> None:
    _, _, files = kept
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = Where("127.0.0.1", listener.getsockname()[1], "0" * 32)

        def serve_half() -> None:
            with listener.accept()[0] as sock:
                sock.recv(32)
                sock.sendall(struct.pack("<qq", STEP.pack(), 1000) + bytes(500))

        thread = threading.Thread(target=serve_half)
        thread.start()
        with pytest.raises(OSError, match="ended before all had come"):
            fetch(where, files, MIB)
        thread.join(60)


@pytest.mark.parametrize(
    "where", [Where("127.0.0.1", 70000, "0" * 32), Where("127.0.0.1", -1, "0" * 32), Where("127.0.0.1", 80, "\udc80")]
)
def test_what_is_no_place_is_refused_as_one_that_does_not_answer(kept: Kept, where: Where) -> None:
    with pytest.raises(OSError, match="no place to fetch from"):
        fetch(where, kept[2], MIB)


def test_a_node_that_cannot_listen_serves_nothing_and_goes_on(kept: Kept) -> None:
    copies, _, _ = kept
    fill(kept, 1, STEP, b"all")
    copies._node.peers.address = "203.0.113.1"  # of no interface

    assert copies.serve(0) == Where()
