"""What a node keeps of the mirrors of a lost one, and how it comes to who takes that one's slots."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent.node.mirrors import MirrorCopies
from ttprun.agent.node.mirrors import fetch_copies as fetch
from ttprun.agent.node.node import Process
from ttprun.protocol.board import EMPTY_SLOT, SLOTS, Board, Field, SlotContent
from ttprun.protocol.meeting import Where

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
    for fd in (*files, *copies.files):
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


def test_a_slot_that_was_being_written_when_the_node_was_lost_is_not_served(kept: Kept) -> None:
    copies, _, files = kept
    fill(kept, 0, EMPTY_SLOT, b"half of a state")
    fill(kept, 1, STEP, b"all")

    held, taken = fetch(copies.serve(0), files, MIB)

    assert held == [EMPTY_SLOT, STEP]
    assert taken == 3


def test_of_a_rank_of_which_nothing_is_kept_nothing_is_served(kept: Kept) -> None:
    copies, _, _ = kept

    assert copies.serve(0) == Where()


def test_only_a_state_that_is_whole_can_be_written_into_a_checkpoint(kept: Kept) -> None:
    copies, _, _ = kept
    fill(kept, 0, STATE, b"of step 6")
    fill(kept, 1, SlotContent(5, has_state=False, has_step=True), b"before step 6")
    before, after = (copies.state_of(0, boundary) for boundary in (6, 5))

    copies.forget(1)

    assert before == copies.paths_for(1)[0]
    assert after == copies.state_of(0, 6) == copies.state_of(1, 6) == ""


def test_what_finds_no_room_is_refused_by_its_size_and_can_still_be_fetched(kept: Kept) -> None:
    copies, _, files = kept
    fill(kept, 0, STATE, bytes(1000))
    fill(kept, 1, STEP, bytes(1000))
    where = copies.serve(0)

    with pytest.raises(OSError, match=r"more than the 1999 bytes .*--buddy-memory"):
        fetch(where, files, 1999)

    assert fetch(where, files, 2000) == ([STATE, STEP], 2000)


def test_who_does_not_know_the_token_gets_nothing_and_does_not_keep_others_from_it(kept: Kept) -> None:
    copies, _, files = kept
    fill(kept, 1, STEP, b"all")
    where = copies.serve(0)

    with socket.create_connection((where.address, where.port), 10) as sock:
        sock.sendall(b"0" * 32)
        came = sock.recv(1)
    held, _ = fetch(where, files, MIB)

    assert came == b""
    assert held == [EMPTY_SLOT, STEP]


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


def test_after_a_way_back_what_is_kept_is_void(kept: Kept) -> None:
    copies, _, _ = kept
    fill(kept, 1, STEP, b"all")

    copies.forget(1)

    assert copies.serve(0) == Where()
