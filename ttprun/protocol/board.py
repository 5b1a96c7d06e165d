"""The board: a small page of shared memory per node with the progress of each rank of the job.

Every field has one writer (the rank of the row; the agent only before a process starts and after it has ended), so no
lock is needed. A rank may sleep until a field of another rank changes (futex on the field's low 32 bits): that is the
commit barrier before each optimizer step, see `ttprun.rank.step.step_hooks`.

On several nodes each has a board with a row for every rank. The agent copies the rows of the other nodes' ranks into it
(SHARED), some time after they have changed; the fields of LEADER's row that the agent writes are this node's alone.

The board is a memfd that the agent makes and every rank inherits: nothing is left over, however they end.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

ROW_FIELDS = 56  # whole cache lines
LEADER = 0  # local rank whose row has the node's own fields
FINISHED = 1 << 62  # RECORDED of a rank that has ended well: no rank waits for it


class Field:
    """Columns of a rank's row; all are int64. Not an enum, as those are slow in Python 3.11."""

    RECORDED = 0  # newest boundary whose record is complete
    APPLIED = 1  # boundaries passed: optimizer steps that have run to their end (collective ones: that have begun)
    PHASE = 2  # value of Phase
    COLLECTIVES = 3  # issued since the process started
    SEEN_NS = 4  # time.monotonic_ns() of the last sign of life
    HELD = 5  # generation in which the rank last stopped before its commit
    OWN_STATE = 6  # of a rank alone: what it keeps of its state in its slots (two cells), as in MIRROR_0
    LEAVING = 8  # how often the script has destroyed its default process group
    OPERATION = 9  # the newest collective: its index in OPERATION_NAMES
    MEETINGS = 10  # collectives of the whole world, and connecting to it, since the newest boundary
    PULSE_NS = 11  # time.monotonic_ns() of the heartbeat's thread: it got the GIL
    MAIN_BEATS = 12  # heartbeats that the main thread has answered: it runs bytecode; a semaphore (four cells)
    LIFE = 16  # held by the main thread as long as it lives; a lock (six cells), see `ttprun.rank.heartbeat`
    SNAPSHOT_ASKED = 22  # leader: number of the requested snapshot; the agent writes it
    SNAPSHOT_NUMBER = 23  # leader: number of the snapshot that is taken at SNAPSHOT_AT
    SNAPSHOT_AT = 24  # leader: the boundary at which all ranks take it
    PAUSE_ASKED = 25  # leader: number of the requested pause, 0: none; the agent writes it
    PAUSE_AT = 26  # leader: the boundary after which all ranks wait
    ENDED_BY = 27  # leader: the signal that the agent sends to all ranks to end them; the agent writes it
    QUIESCE_ASKED = 28  # leader: 1 while the agent waits for a boundary that is not open; the agent writes it
    OPEN_AT = 29  # leader: the newest open boundary (`ttprun.tensors.open_boundaries`), 0: none so far
    END_ASKED = 30  # leader: 1 once the launcher has got a signal that ends the job; the agent writes it
    ALL_NODES_AT = 32  # of a node's first rank: what all nodes have recorded (`ttprun.rank.step.commit_barrier`)
    MIRROR_0 = 33  # what this rank's mirror holds in its first slot, see `ttprun.protocol.board`
    MIRROR_1 = 34  # and in the second one
    COPIED = 35  # of which boundary this rank keeps a copy of another's records (`ttprun.rank.step.copies`)
    AGENT_NS = 36  # leader: time.monotonic_ns() when the agent's supervisor last came by; the agent writes it
    ENDED = 37  # 1: the script has come to its end, exit handlers included, and its process stays for the others
    STEPPED = 39  # the newest boundary whose optimizer step has run to its end
    REHEARSED = 38  # the newest boundary whose record was read back, see `ttprun.capture.recording`; 0: none so far
    MIRROR_COPY_0 = 40  # what this rank keeps of the mirror of a rank of the node before, in its first slot
    MIRROR_COPY_1 = 41  # and in the second one
    MIRROR_COPY_BYTES = 42  # memory that both take
    NONE_IN_FLIGHT = 51  # 1: at its last heartbeat no collective of the rank was under way, whatever PHASE says
    COST = 44  # what we take of a step (seven cells), see `ttprun.introspect.costs`
    STACK_ASKED = 43  # when the agent asked this process for its stacks (ns), 0: it does not; the agent writes it


# What the ranks and the agents of other nodes may see of a rank, in the order in which it is sent.
SHARED = (
    Field.RECORDED,
    Field.APPLIED,
    Field.PHASE,
    Field.COLLECTIVES,
    Field.SEEN_NS,
    Field.HELD,
    Field.LEAVING,
    Field.ENDED,
    Field.OPERATION,
    Field.MEETINGS,
    Field.PULSE_NS,
    Field.MAIN_BEATS,
    Field.REHEARSED,
    Field.STEPPED,
    Field.NONE_IN_FLIGHT,
)
AWAITED = (Field.RECORDED, Field.HELD, Field.LEAVING, Field.ENDED)  # ranks sleep until these change


class Phase(enum.IntEnum):
    """What a rank's main thread is doing, as far as the hooks know."""

    STARTING = 0
    SETUP = 1
    COMPUTING = 2
    COLLECTIVE = 3
    COMMITTING = 4
    STEPPING = 5
    FROZEN = 6
    REPLAYING = 7
    REPAIRING = 8
    FINISHED = 9
    CONNECTING = 10
    SAVING = 11
    WAITING = 12  # for the end of a collective: the main thread only runs our waiting loop


# The collectives of all tested versions of torch; "connect" is ours: the group itself is being made.
OPERATION_NAMES = (
    "none",
    "connect",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "gather",
    "gather_single",
    "gather_into_tensor",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
)


FUTEX_WAIT = 0
FUTEX_WAKE = 1
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, 202)


_FUTEX_ARGUMENTS: Any = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    *[ctypes.c_void_p] * 2,
    ctypes.c_int,
)


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


# What a process leaves there that says something of it alone.
_OF_PROCESS = (
    *(Field.PHASE, Field.SEEN_NS, Field.OPERATION, Field.MEETINGS, Field.PULSE_NS, Field.MAIN_BEATS),
    *(Field.LEAVING, Field.ENDED),
)


class Board:
    """The rows of all ranks of this node, mapped.

    fd     a memfd of at least `Board.size_bytes(n_ranks)` bytes
    n_ranks  rows (local ranks)
    """

    def __init__(self, fd: int, n_ranks: int) -> None:
        self.n_ranks = n_ranks
        self._map = mmap.mmap(fd, self.size_bytes(n_ranks))
        self.cells = memoryview(self._map).cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._sleep = ctypes.CDLL(None).syscall
        self._wake = ctypes.PyDLL(None).syscall  # keeps the GIL: waking is quicker than releasing it
        for call in (self._sleep, self._wake):
            call.restype = ctypes.c_long
            call.argtypes = _FUTEX_ARGUMENTS

    @staticmethod
    def size_bytes(n_ranks: int) -> int:
        """Bytes of a board of `n_ranks` rows."""
        return max(1, n_ranks) * ROW_FIELDS * 8

    @classmethod
    def create(cls, n_ranks: int) -> tuple[int, Board]:
        """Make a new board in a memfd; returns (fd, board)."""
        fd = os.memfd_create("ttprun-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, cls.size_bytes(n_ranks))
        return fd, cls(fd, n_ranks)

    def get(self, rank: int, field: int) -> int:
        """One field of a rank's row."""
        return self.cells[rank * ROW_FIELDS + field]

    def set(self, rank: int, field: int, value: int) -> None:
        """Write one field, without waking waiters.

        rank    local rank: the row
        field   see `Field`
        value   signed, 64 bits
        """
        self.cells[rank * ROW_FIELDS + field] = value

    def announce(self, rank: int, field: int, value: int) -> None:
        """Write one field and wake its waiters.

        The arguments are as of `set`.
        """
        cell = rank * ROW_FIELDS + field
        self.cells[cell] = value
        self._wake(SYS_FUTEX, self._address + cell * 8, FUTEX_WAKE, 1 << 30, None, None, 0)

    def wait_for_change(self, rank: int, field: int, seen: int, limit_s: float) -> None:
        """Sleep until the field no longer holds `seen`, at most `limit_s` seconds; may return early.

        rank, field   as for `set`
        seen          the value that was read before; its low 32 bits are compared
        """
        cell = rank * ROW_FIELDS + field
        limit = _Timespec(int(limit_s), int((limit_s % 1.0) * 1e9))
        address = self._address + cell * 8
        self._sleep(SYS_FUTEX, address, FUTEX_WAIT, _low_word(seen), ctypes.byref(limit), None, 0)

    def forget_process(self, rank: int) -> None:
        """A process has ended: clear its signs of life, and keep its progress."""
        for field in _OF_PROCESS:
            self.set(rank, field, 0)

    def address_of(self, rank: int, field: int) -> int:
        """The address of a field in this process's memory."""
        return self._address + (rank * ROW_FIELDS + field) * 8

    def row(self, rank: int) -> memoryview:
        """The fields of one rank, to read, and to write without waking waiters."""
        return self.cells[rank * ROW_FIELDS : (rank + 1) * ROW_FIELDS]

    def column(self, field: int) -> memoryview:
        """One field of every rank."""
        return self.cells[field::ROW_FIELDS]


def _low_word(value: int) -> int:
    """The 32 bits on which the kernel compares, as a signed int."""
    low = value & 0xFFFFFFFF if sys.byteorder == "little" else (value >> 32) & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


SLOTS = 2  # for states; a third memory has results of collectives
_HAS_STATE = 1
_HAS_STEP = 2


class SlotContent(NamedTuple):
    """The content of one slot.

    boundary   of which it holds the state; 0: it holds nothing
    has_state  the state after that boundary's step is complete
    has_step   what the next step needs is complete, too: the state that it begins with, and the gradients
    """

    boundary: int
    has_state: bool
    has_step: bool

    def pack(self) -> int:
        """The board's cell."""
        return self.boundary << 2 | self.has_state * _HAS_STATE | self.has_step * _HAS_STEP

    def gives(self, boundary: int) -> str:
        """How the state of a boundary comes from it: "state", by taking the "step" again, or "" if it does not."""
        if self.has_state and self.boundary == boundary:
            return "state"
        return "step" if self.has_step and self.boundary + 1 == boundary else ""

    def has_all_of(self, other: SlotContent) -> bool:
        """Whether whatever the other one gives comes from it, too."""
        return self.boundary == other.boundary and self.has_state >= other.has_state and self.has_step >= other.has_step


EMPTY_SLOT = SlotContent(0, False, False)


def unpack_slot(cell: int) -> SlotContent:
    """The content that a cell of the board stands for."""
    return SlotContent(cell >> 2, bool(cell & _HAS_STATE), bool(cell & _HAS_STEP))


def slot_that_gives(slots: Sequence[SlotContent], boundary: int, way: str) -> int | None:
    """The number of the slot that gives a boundary's state in this way (`SlotContent.gives`); None if none does."""
    return next((number for number, slot in enumerate(slots) if slot.gives(boundary) == way), None)


def slot_of(boundary: int) -> int:
    """The slot for the state of a boundary: its neighbours are in the other one."""
    return boundary % SLOTS
