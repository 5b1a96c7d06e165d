"""The mirrors of ranks that hold what no other rank holds (`--buddy`): the agent's memory for them, and what is there.

A rank writes to its two slots in turns and says on the board what they hold (`ttprun.tensors.mirror`); a third
memory has what the collectives of its step have given to it. How much memory all ranks of a node may take together is
counted on that node; the agent that leads says which of them keep mirrors, and shares it out between them.

With `--buddy node` half of it is for copies: a rank keeps the mirror of the rank before it in the ring of records
(`ttprun.rank.step.copies`). When that rank's node is lost, this agent serves the copy to the agent of the node
that takes its slots. Begin with `Mirrors.keep` and `Mirrors.source_of`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from ttprun.agent.base import stored_states
from ttprun.agent.node.node import Node, Process
from ttprun.protocol import channel, to_rank
from ttprun.protocol.board import EMPTY_SLOT, SLOTS, Field, SlotContent, slot_that_gives, unpack_slot
from ttprun.protocol.meeting import Where
from ttprun.protocol.snapshot_messages import MirroredShare
from ttprun.state.cost_limits import parse_memory
from ttprun.tensors.memory import free_bytes

_HEAD = struct.Struct("<qq")  # what a slot holds, bytes that follow
_TOKEN_BYTES = 32
_TAKEN = b"\x01"  # the receipt of who has fetched all: what was only sent may have been refused
_SILENT_LIMIT_S = 10.0  # of the other end
_SERVE_LIMIT_S = 60.0  # for the other end to come


class Slots:
    """The two slots of each rank of this node in which it keeps a state, its own or another one's, and what is beside.

    cells   of the board, in the row of that rank: what the slots hold
    count   of files for each rank; the slots are the first ones
    """

    def __init__(self, node: Node, cells: tuple[int, int], name: str, count: int, here: Sequence[Process] = ()) -> None:
        self._node, self._cells, self._name, self._count = node, cells, name, count
        self._slots: dict[int, list[int]] = {}  # by rank: descriptors
        for slot in here:
            self.make(slot.rank)

    def make(self, rank: int) -> list[int]:
        """New memory for a rank, unless there is some."""
        if rank not in self._slots:
            self._slots[rank] = stored_states.new_memory(self._name, self._count)
        return self._slots[rank]

    def close(self) -> None:
        """The ranks are gone: give the memory back."""
        while self._slots:  # what is still being fetched for them belongs to nobody then
            for fd in self._slots.popitem()[1]:
                os.close(fd)

    def paths_for(self, rank: int) -> list[str]:
        """Where a rank keeps the state; empty: nowhere."""
        return [stored_states.path_of(fd) for fd in self._slots.get(rank, ())]

    def note(self, rank: int, contents: Sequence[SlotContent] = (EMPTY_SLOT,) * SLOTS) -> None:
        """Say what the slots of a rank hold: nothing, if the ranks go back, or begin anew."""
        for cell, content in zip(self._cells, contents, strict=True):
            self._node.board.set(rank, cell, content.pack())

    def held_by(self, rank: int) -> list[SlotContent]:
        """What the slots of a rank hold."""
        return [unpack_slot(self._node.board.get(rank, cell)) for cell in self._cells]

    def path_of(self, keeper: int, boundary: int, way: str = "state") -> str:
        """The slot of a rank that gives the state after the step of a boundary; "": none does.

        way   "state", or "step": the step to that boundary can be taken again from it
        """
        number = slot_that_gives(self.held_by(keeper), boundary, way) if keeper in self._slots else None
        return "" if number is None else self.paths_for(keeper)[number]


class MirrorCopies(Slots):
    """What this node keeps of the mirrors of the node before.

    limit_bytes   that all copies may take together; 0: none are kept
    """

    def __init__(self, node: Node, limit_bytes: int) -> None:
        cells = Field.MIRROR_COPY_0, Field.MIRROR_COPY_1
        super().__init__(node, cells, "mirror-copy", SLOTS, node.here if limit_bytes else ())
        self.limit_bytes = limit_bytes

    def serve(self, rank: int) -> Where:
        """Have what is kept of a lost rank's mirror ready for the one who knows the token, for a while.

        returns   where; port 0: nothing is kept
        """
        node, keeper = self._node, self._keeper_of(rank)
        if keeper not in self._slots or self.held_by(keeper) == [EMPTY_SLOT] * SLOTS:
            return Where()
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        with contextlib.ExitStack() as opened:
            try:
                listener = opened.enter_context(socket.create_server((node.peers.address, 0)))
                fds = [os.dup(fd) for fd in self._slots[keeper]]  # a new group closes the others
            except OSError as error:
                node.log("mirror_not_served", rank=rank, reason=str(error))
                return Where()
            opened.pop_all()
        threading.Thread(
            target=self._serve, args=(listener, token, keeper, fds), name="ttprun-mirror-copies", daemon=True
        ).start()
        return Where(node.peers.address, listener.getsockname()[1], token)

    def state_of(self, rank: int, boundary: int) -> str:
        """The memory with the state that a rank of the node before had after a step; "": it is not here."""
        return self.path_of(self._keeper_of(rank), boundary)

    def _keeper_of(self, rank: int) -> int:
        """The rank of this node that keeps what there is of that one's mirror."""
        return (rank + len(self._node.here)) % self._node.world_size

    def _serve(self, listener: socket.socket, token: str, keeper: int, fds: Sequence[int]) -> None:
        ends_s = time.monotonic() + _SERVE_LIMIT_S
        try:
            with listener, contextlib.suppress(OSError):
                while (left_s := ends_s - time.monotonic()) > 0:
                    listener.settimeout(left_s)
                    sock, _ = listener.accept()
                    with sock, contextlib.suppress(OSError):
                        sock.settimeout(_SILENT_LIMIT_S)
                        if hmac.compare_digest(channel.receive_exactly(sock, _TOKEN_BYTES), token.encode()):
                            self._send(sock, keeper, fds)
                            return
        finally:
            for fd in fds:
                os.close(fd)

    def _send(self, sock: socket.socket, keeper: int, fds: Sequence[int]) -> None:
        board = self._node.board

        def has_changed(cell: int, value: int) -> bool:
            return board.get(keeper, cell) != value

        for cell, fd in zip(self._cells, fds, strict=True):
            value = board.get(keeper, cell)
            size = os.fstat(fd).st_size if value else 0
            sock.sendall(_HEAD.pack(value, size))
            channel.send_part(sock, fd, 0, size, partial(has_changed, cell, value))
        if channel.receive_exactly(sock, len(_TAKEN)) != _TAKEN:
            raise channel.DamagedError("what has come is no receipt")


def fetch_copies(where: Where, fds: Sequence[int], limit_bytes: int) -> tuple[list[SlotContent], int]:
    """Fetch what another node keeps of a lost rank's mirror.

    where         as `MirrorCopies.serve` returns it
    fds           memory for each slot; written
    limit_bytes   that they may take

    returns   what each slot holds, and the bytes that all take

    Blocks as long as something comes. Raises OSError, also if that is too much.
    """
    slots, taken = list[SlotContent](), 0
    if not 0 < where.port < 1 << 16 or not where.token.isascii():
        raise OSError("that is no place to fetch from")
    with socket.create_connection((where.address, where.port), _SILENT_LIMIT_S) as sock:
        sock.sendall(where.token.encode())
        for fd in fds:
            cell, size = _HEAD.unpack(channel.receive_exactly(sock, _HEAD.size))
            taken += size
            if size < 0:
                raise channel.DamagedError("what has come is no slot")
            if taken > limit_bytes:
                raise OSError(f"it takes more than the {limit_bytes} bytes that are left for mirrors (--buddy-memory)")
            if size:
                os.ftruncate(fd, size)
                os.posix_fallocate(fd, 0, size)
            is_valid = channel.receive_part(sock, fd, 0, size)
            slots.append(unpack_slot(cell) if is_valid else EMPTY_SLOT)
        with contextlib.suppress(OSError):  # all is here, even if the other node is lost now
            sock.sendall(_TAKEN)
    return slots, taken


_UNKNOWN_BYTES = 1 << 62  # where the system does not tell how much is free

_LIMIT_SHARE = 0.2  # of a step's time, which a copy may take that nobody has asked for


class Source(NamedTuple):
    """Where a replacement gets its lost rank's state.

    path     of the slot
    is_step  the last step has to be taken again, from what was there before it
    """

    path: str
    is_step: bool


class Mirrors(Slots):
    """Of each rank of a node, the memory for its mirror.

    copies   what this node keeps of the mirrors of the node before
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node, (Field.MIRROR_0, Field.MIRROR_1), "mirror", SLOTS + 1)
        self._why_not_fetched: dict[int, str] = {}  # by rank whose mirror was to come from another node
        self._all_bytes = 0 if node.config.buddy == "off" else self._may_take()
        copies_bytes = self._all_bytes // 2 if node.keeps_mirrors_twice else 0
        self._all_bytes -= copies_bytes
        self.copies = MirrorCopies(node, copies_bytes)

    def close(self) -> None:
        """The ranks are gone: give the memory back."""
        super().close()
        self.copies.close()

    def _may_take(self) -> int:
        """Bytes that all mirrors of this node may take together, by what is free now."""
        wanted = 1.0 if self._node.config.buddy == "on" else parse_memory(self._node.config.buddy_memory)
        free = free_bytes()
        free = _UNKNOWN_BYTES if free is None else free
        return int(free * wanted) if isinstance(wanted, float) else min(free, wanted)

    def keep(self, order: to_rank.KeepMirror) -> None:
        """A rank of this node is to keep a mirror, in this share of its memory."""
        self.make(order.rank)
        limit_share = _LIMIT_SHARE if self._node.config.buddy == "auto" else 0.0
        paths, limit_bytes = tuple(self.paths_for(order.rank)), int(self._all_bytes * order.share)
        order = replace(order, paths=paths, limit_bytes=limit_bytes, limit_share=limit_share)
        self._node.process(order.rank).send_if_present(order)

    def source_of(self, rank: int, boundary: int, is_before_step: bool) -> Source | None:
        """Where a replacement gets the state that its rank had at a boundary; None: its mirror does not give it.

        is_before_step   the last step is to be taken again in any case
        """
        state = "" if is_before_step else self.path_of(rank, boundary)
        path = state or self.path_of(rank, boundary, "step")
        return Source(path, is_step=not state) if path else None

    def located(self, shares: Sequence[MirroredShare], boundary: int) -> list[MirroredShare]:
        """Those shares of a checkpoint for which this node has the state of its boundary, with where it is.

        Only the state itself: a step is taken again by its own rank alone.
        """
        is_here = self._node.is_here
        placed = (
            replace(share, slot=(self.path_of if is_here(share.rank) else self.copies.state_of)(share.rank, boundary))
            for share in shares
        )
        return [share for share in placed if share.slot]

    def forget(self, rank: int) -> None:
        """The rank goes back, or begins anew, and all others with it: what is kept here is void."""
        self.note(rank)
        self.copies.note(rank)

    def fetch(self, where: Mapping[int, Where], then: Callable[[], None]) -> None:
        """This node has got a lost one's slots: fetch its mirrors from the node that keeps copies; returns at once.

        where   by rank, where they are; port 0: nowhere
        then    called once they are there, or will not come
        """
        there = {rank: place for rank, place in where.items() if place.port}
        self._slots |= {rank: stored_states.new_memory(self._name, self._count) for rank in there}
        slots = {rank: self._slots[rank] for rank in there}
        files = {rank: [os.dup(fd) for fd in fds[:SLOTS]] for rank, fds in slots.items()}  # a new group closes those

        def fetch() -> dict[int, tuple[Sequence[SlotContent], str]]:
            fetched, left_bytes = dict[int, tuple[Sequence[SlotContent], str]](), self._all_bytes
            for rank, place in there.items():
                try:
                    contents, taken = fetch_copies(place, files[rank], left_bytes)
                except Exception as error:  # whatever it is, those that wait for it are to hear of it
                    fetched[rank] = (EMPTY_SLOT,) * SLOTS, f"{place.address}: {error}"
                else:
                    fetched[rank], left_bytes = (contents, ""), left_bytes - taken
                for fd in files[rank]:
                    os.close(fd)
            return fetched

        def note_fetched(fetched: Mapping[int, tuple[Sequence[SlotContent], str]]) -> None:
            for rank, (contents, why_not) in fetched.items():
                if self._slots.get(rank) is not slots[rank]:
                    continue  # all ranks are new
                self.note(rank, contents)
                self._why_not_fetched[rank] = why_not
                self._node.log(
                    "mirror_fetched", rank=rank, held=[content._asdict() for content in contents], why_not=why_not
                )
            then()

        self._node.in_background(fetch, note_fetched)

    def why_not_held(self, rank: int, boundary: int) -> str:
        """A sentence: the mirror of a rank of this node does not give its state of a boundary."""
        why = self._why_not_fetched.get(rank, "")
        more = f" (it could not be fetched from {why})" if why else ""
        return f"the mirror of rank {rank} does not hold its state of step {boundary}{more}"
