"""Mirrors on the next node: what the ring keeps at each commit is what a lost node's ranks are replaced from."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import xxhash
from msgspec.structs import replace

from tests.rank.fakes import RECORD_BYTES, make_session
from tests.rank.test_copies import Line, Rank, all_keep_up, record
from ttprun.capture.records.recorder import Recorder
from ttprun.groups.connection import Exchange
from ttprun.introspect.current_rank import Rank as Session
from ttprun.protocol import from_rank
from ttprun.protocol.board import EMPTY_SLOT, SLOTS, Board, Field, SlotContent, slot_of, unpack_slot
from ttprun.rank.step.copies import Copies, MirrorLink
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.mirror_slots import Part

STATE, WHOLE = 3000, 5000  # bytes
CELLS = (Field.MIRROR_0, Field.MIRROR_1)
COPIES = (Field.MIRROR_COPY_0, Field.MIRROR_COPY_1)
LIMIT_S = 60.0


class NotingLine(Line):
    """Notes what is sent, too."""

    def send(self, message: object, fds: object = ()) -> None:
        self.sent.append(message)
        super().send(message, fds)


def new_paths() -> list[str]:
    return [f"/proc/{os.getpid()}/fd/{os.memfd_create('mirror')}" for _ in range(SLOTS)]


def content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@dataclass
class FakeMirror:
    """A mirror whose slots are filled with two numbers: the rank's, and the boundary."""

    board: Board
    rank: int
    paths: list[str] = field(default_factory=new_paths)

    def on_kept(self, part: Part) -> None: ...
    def keep_result(self, *_: object) -> bool: ...
    def give_result(self, *_: object) -> None: ...

    def held(self, boundary: int) -> SlotContent:
        held = unpack_slot(self.board.get(self.rank, CELLS[slot_of(boundary)]))
        return held if held.boundary == boundary else EMPTY_SLOT

    def parts(self, held: SlotContent) -> list[Part]:
        return [] if held == EMPTY_SLOT else [self.part(held._replace(has_step=False)), self.part(held)]

    def part(self, held: SlotContent) -> Part:
        at, end = (STATE, WHOLE) if held.has_step else (0, STATE)
        return Part(held, self.paths[slot_of(held.boundary)], at, end - at, WHOLE)

    def keep(self, boundary: int, has_step: bool) -> None:
        held = SlotContent(boundary, has_state=True, has_step=has_step)
        part = self.part(held)
        with open(part.path, "r+b") as file:
            file.truncate(WHOLE)
            file.seek(part.at)
            file.write(bytes([self.rank, boundary]) * (part.size // 2))
        self.board.set(self.rank, CELLS[slot_of(boundary)], held.pack())
        self.on_kept(part)


def new_rank(number: int, limit_bytes: int = SLOTS * WHOLE) -> Rank:
    """A rank on the node of its number, of three, that keeps a mirror for another one."""
    line, board = NotingLine(), Board.create(3)[1]
    mirror, exchange = FakeMirror(board, number), Exchange(line, "127.0.0.1")
    session = make_session(
        channel=line, board=board, rank=number, world_size=3, ranks_here=1, exchange=exchange, mirror=mirror
    )
    session.options = replace(session.options, mirror_copies=new_paths(), mirror_copies_bytes=limit_bytes)
    fd = Recorder.create(RECORD_BYTES)
    return Rank(session, Recorder(fd, RECORD_BYTES), Copies(session, fd))


def ring_of(ranks: list[Rank]) -> Iterator[list[Rank]]:
    for rank in ranks:
        others = [other.session[Exchange] for other in ranks if other is not rank]
        rank.session.channel.others = others  # type: ignore[attr-defined]
    yield ranks
    for rank in ranks:
        rank.copies.cut()
        rank.session.channel.close()


@pytest.fixture
def ring() -> Iterator[list[Rank]]:
    """Three nodes of one rank each."""
    yield from ring_of([new_rank(number) for number in range(3)])


@pytest.fixture
def small_ring() -> Iterator[list[Rank]]:
    """The same, but that of rank 1 has too little memory."""
    yield from ring_of([new_rank(0), new_rank(1, SLOTS * WHOLE - 1), new_rank(2)])


def mirror_of(rank: Rank) -> FakeMirror:
    found: FakeMirror = rank.session[Mirror]  # type: ignore[assignment]
    return found


def copied(session: Session) -> list[SlotContent]:
    return [unpack_slot(session.board.get(session.rank, cell)) for cell in COPIES]


def reports(rank: Rank) -> list[from_rank.MirrorCopied]:
    sent = rank.session.channel.sent  # type: ignore[attr-defined]
    return [message for message in sent if isinstance(message, from_rank.MirrorCopied)]


def commit(ranks: list[Rank], boundary: int, generation: int = 0) -> None:
    """As the hooks before a step do it."""
    for rank in ranks:
        if boundary > 1:
            mirror_of(rank).keep(boundary - 1, has_step=True)
        rank.session.generation = generation
        record(rank, boundary)
    all_keep_up(ranks, boundary, generation)


def pass_boundary(ranks: list[Rank], boundary: int) -> None:
    """As the hooks after a step do it."""
    for rank in ranks:
        mirror_of(rank).keep(boundary, has_step=False)


def test_at_each_commit_the_next_node_has_what_gives_the_boundary(ring: list[Rank]) -> None:
    for boundary in range(1, 7):
        commit(ring, boundary)
        for rank in ring:
            after = ring[(rank.session.rank + 1) % 3].session
            held = copied(after)[slot_of(boundary - 1)]
            assert held == mirror_of(rank).held(boundary - 1)
            assert held.gives(boundary) == ("step" if boundary > 1 else "")
            if boundary > 1:
                slot = slot_of(boundary - 1)
                assert content(after.options.mirror_copies[slot]) == content(mirror_of(rank).paths[slot])
        pass_boundary(ring, boundary)

    assert [(one.of, one.bytes, one.why_not) for one in reports(ring[1])] == [(0, SLOTS * WHOLE, "")]


def test_a_new_generation_sends_the_newest_state_and_step_again(ring: list[Rank]) -> None:
    commit(ring, 1)
    pass_boundary(ring, 1)
    commit(ring, 2)
    pass_boundary(ring, 2)
    for rank in ring:
        rank.copies.cut()
    before = mirror_of(ring[0]).paths[0]
    with open(before, "r+b") as file:
        file.write(b"another")  # as if the step had been taken again in another way

    commit(ring, 3, generation=1)

    assert copied(ring[1].session)[0] == SlotContent(2, has_state=True, has_step=True)
    assert content(ring[1].session.options.mirror_copies[0]) == content(before)


def test_a_copy_that_takes_too_much_memory_is_refused_with_its_size_and_nobody_waits_for_it(
    small_ring: list[Rank],
) -> None:
    for boundary in range(1, 6):
        commit(small_ring, boundary)
        pass_boundary(small_ring, boundary)

    assert copied(small_ring[1].session) == [EMPTY_SLOT] * SLOTS
    assert [content(path) for path in small_ring[1].session.options.mirror_copies] == [b""] * SLOTS
    whole, why = SLOTS * WHOLE, "too little memory"
    report = from_rank.MirrorCopied(of=0, boundary=1, bytes=whole, limit_bytes=whole - 1, why_not=why)
    assert reports(small_ring[1]) == [report]
    assert copied(small_ring[2].session)[slot_of(4)].gives(5) == "step"


HEAD, END = struct.Struct("<4q"), struct.Struct("<?Q")


def sent(boundary: int, has_step: bool, is_valid: bool = True) -> bytes:
    """A part of a slot as it crosses nodes."""
    at, end = (STATE, WHOLE) if has_step else (0, STATE)
    body = bytes([boundary]) * (end - at)
    head = HEAD.pack(SlotContent(boundary, has_state=True, has_step=has_step).pack(), at, end - at, WHOLE)
    return head + body + END.pack(is_valid, xxhash.xxh3_64_intdigest(body))


@dataclass
class ByHand:
    """What a rank keeps of what is sent to it by hand."""

    session: Session
    link: MirrorLink
    theirs: socket.socket

    def wait_for(self, boundary: int, has_step: bool) -> None:
        cell = SlotContent(boundary, has_state=True, has_step=has_step).pack()
        ends_s = time.monotonic() + LIMIT_S
        while not self.link.wait_for(cell, 0.2):
            assert time.monotonic() < ends_s


@pytest.fixture
def by_hand() -> Iterator[ByHand]:
    rank = new_rank(1)
    (ours, theirs), (to, other) = socket.socketpair(), socket.socketpair()
    with theirs, other:
        link = MirrorLink(rank.session, to, ours, 0)
        yield ByHand(rank.session, link, theirs)
        link.cut()
    rank.session.channel.close()
    for thread in threading.enumerate():
        if thread.name in ("ttprun-next-node", "ttprun-node-before"):
            thread.join(LIMIT_S)


def test_a_step_of_which_half_has_come_leaves_the_state(by_hand: ByHand) -> None:
    by_hand.theirs.sendall(sent(2, False) + sent(2, True) + sent(3, False) + sent(3, True)[:1000])
    by_hand.theirs.shutdown(socket.SHUT_WR)

    with pytest.raises(ConnectionResetError, match="ended before all had come"):
        by_hand.wait_for(3, has_step=True)

    ways = [[held.gives(boundary) for held in copied(by_hand.session)] for boundary in (3, 4)]
    assert ways == [["step", "state"], ["", ""]]


def test_a_state_of_which_half_has_come_is_not_used(by_hand: ByHand) -> None:
    by_hand.theirs.sendall(sent(1, False) + sent(1, True) + sent(2, False) + sent(2, True) + sent(3, False)[:1000])
    by_hand.theirs.shutdown(socket.SHUT_WR)

    with pytest.raises(ConnectionResetError, match="ended before all had come"):
        by_hand.wait_for(3, has_step=False)

    assert copied(by_hand.session) == [SlotContent(2, has_state=True, has_step=True), EMPTY_SLOT]


def test_what_was_overwritten_while_it_was_sent_is_not_used_nor_is_its_step(by_hand: ByHand) -> None:
    by_hand.theirs.sendall(sent(2, False, is_valid=False) + sent(2, True) + sent(3, False))

    by_hand.wait_for(3, has_step=False)

    assert copied(by_hand.session) == [EMPTY_SLOT, SlotContent(3, has_state=True, has_step=False)]


def test_what_differs_from_what_was_sent_breaks_the_connection(by_hand: ByHand) -> None:
    damaged = bytearray(sent(2, False))
    damaged[HEAD.size + 100] ^= 1

    by_hand.theirs.sendall(damaged)
    with pytest.raises(ConnectionResetError, match="differs from what was sent"):
        by_hand.wait_for(2, has_step=False)

    assert copied(by_hand.session) == [EMPTY_SLOT] * SLOTS
