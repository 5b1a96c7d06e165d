"""Mirrors on the next node (`--buddy node`): the agent's memory for them, and how they come to who takes a lost node.

A rank keeps the mirror of the rank before it in the ring of records (`ttprun.rank.step.mirror_link`), and says on the
board what it holds. When that rank's node is lost, this agent serves the copy to the agent of the node that takes its
slots. Begin with `MirrorCopies.serve` and `fetch`.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ttprun.agent.core.node import Node
from ttprun.agent.core.rank_slot import RankSlot
from ttprun.agent.processes import shared_memory
from ttprun.protocol import file_stream
from ttprun.protocol.board import Field
from ttprun.protocol.meeting import Where
from ttprun.protocol.mirror_messages import NOTHING, SLOTS, Held, slot_that_gives, unpack

_CELLS = (Field.MIRROR_COPY_0, Field.MIRROR_COPY_1)
_HEAD = struct.Struct("<qq")  # what a slot holds, bytes that follow
_TOKEN_BYTES = 32
_TAKEN = b"\x01"  # the receipt of who has fetched all: what was only sent may have been refused
_SILENT_LIMIT_S = 10.0  # of the other end
_SERVE_LIMIT_S = 60.0  # for the other end to come


@dataclass
class MirrorCopies:
    """What this node keeps of the mirrors of the node before.

    limit_bytes   that all copies may take together
    """

    _node: Node
    limit_bytes: int = 0
    _slots: dict[int, list[int]] = field(default_factory=dict)  # by the rank of this node that keeps them

    def begin_group(self, limit_bytes: int) -> None:
        """All ranks are new. `limit_bytes`: as for the class; 0: no copies are kept."""
        for slots in self._slots.values():
            for fd in slots:
                os.close(fd)
        self.limit_bytes = limit_bytes
        here = self._node.here if limit_bytes else ()
        self._slots = {slot.rank: shared_memory.new("mirror-copy", SLOTS) for slot in here}

    def paths_for(self, slot: RankSlot) -> list[str]:
        """Where a rank keeps the mirror of another one; empty: nowhere."""
        return [shared_memory.path_of(fd) for fd in self._slots.get(slot.rank, ())]

    def forget(self, slot: RankSlot) -> None:
        """The ranks go back, or begin anew: what this one keeps of another one is void."""
        for cell in _CELLS:
            self._node.board.set(slot.rank, cell, NOTHING.pack())

    def serve(self, rank: int) -> Where:
        """Have what is kept of a lost rank's mirror ready for the one who knows the token, for a while.

        returns   where; port 0: nothing is kept
        """
        node, keeper = self._node, self._keeper_of(rank)
        if keeper not in self._slots or self._held_by(keeper) == [NOTHING] * SLOTS:
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
        keeper = self._keeper_of(rank)
        number = slot_that_gives(self._held_by(keeper), boundary, "state") if keeper in self._slots else None
        return "" if number is None else shared_memory.path_of(self._slots[keeper][number])

    def _keeper_of(self, rank: int) -> int:
        """The rank of this node that keeps what there is of that one's mirror."""
        return (rank + len(self._node.here)) % len(self._node.slots)

    def _held_by(self, keeper: int) -> list[Held]:
        return [unpack(self._node.board.get(keeper, cell)) for cell in _CELLS]

    def _serve(self, listener: socket.socket, token: str, keeper: int, fds: Sequence[int]) -> None:
        ends_s = time.monotonic() + _SERVE_LIMIT_S
        try:
            with listener, contextlib.suppress(OSError):
                while (left_s := ends_s - time.monotonic()) > 0:
                    listener.settimeout(left_s)
                    sock, _ = listener.accept()
                    with sock, contextlib.suppress(OSError):
                        sock.settimeout(_SILENT_LIMIT_S)
                        if hmac.compare_digest(file_stream.receive_exactly(sock, _TOKEN_BYTES), token.encode()):
                            self._send(sock, keeper, fds)
                            return
        finally:
            for fd in fds:
                os.close(fd)

    def _send(self, sock: socket.socket, keeper: int, fds: Sequence[int]) -> None:
        board = self._node.board

        def has_changed(cell: int, value: int) -> bool:
            return board.get(keeper, cell) != value

        for cell, fd in zip(_CELLS, fds, strict=True):
            value = board.get(keeper, cell)
            size = os.fstat(fd).st_size if value else 0
            sock.sendall(_HEAD.pack(value, size))
            file_stream.send(sock, fd, 0, size, partial(has_changed, cell, value))
        if file_stream.receive_exactly(sock, len(_TAKEN)) != _TAKEN:
            raise file_stream.DamagedError("what has come is no receipt")


def fetch(where: Where, fds: Sequence[int], limit_bytes: int) -> tuple[list[Held], int]:
    """Fetch what another node keeps of a lost rank's mirror.

    where         as `MirrorCopies.serve` returns it
    fds           memory for each slot; written
    limit_bytes   that they may take

    returns   what each slot holds, and the bytes that all take

    Blocks as long as something comes. Raises OSError, also if that is too much.
    """
    slots, taken = list[Held](), 0
    if not 0 < where.port < 1 << 16 or not where.token.isascii():
        raise OSError("that is no place to fetch from")
    with socket.create_connection((where.address, where.port), _SILENT_LIMIT_S) as sock:
        sock.sendall(where.token.encode())
        for fd in fds:
            cell, size = _HEAD.unpack(file_stream.receive_exactly(sock, _HEAD.size))
            taken += size
            if size < 0:
                raise file_stream.DamagedError("what has come is no slot")
            if taken > limit_bytes:
                raise OSError(f"it takes more than the {limit_bytes} bytes that are left for mirrors (--buddy-memory)")
            if size:
                os.ftruncate(fd, size)
                os.posix_fallocate(fd, 0, size)
            is_valid = file_stream.receive(sock, fd, 0, size)
            slots.append(unpack(cell) if is_valid else NOTHING)
        with contextlib.suppress(OSError):  # all is here, even if the other node is lost now
            sock.sendall(_TAKEN)
    return slots, taken
