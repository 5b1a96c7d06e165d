"""A rank before it has imported torch: it answers the agent, and can be lost or take part in a recovery.

No torch here. When the script imports torch, the hooks take over the channel (`hand_over`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from ttprun.device.device_errors import DeviceErrors, DeviceFault, Diagnosis, diagnosis_of, is_out_of_memory
from ttprun.introspect.fail_open import session_now
from ttprun.protocol import from_rank, mindio, to_rank
from ttprun.protocol.board import LEADER, Board, Field
from ttprun.protocol.channel import Channel, Message
from ttprun.protocol.codec import Refused
from ttprun.rank import heartbeat, held_signals
from ttprun.rank.bootstrap import unhooked


class Presence:
    """What this process knows about itself, from the agent's welcome.

    It has nothing to stop or to rebuild: a freeze is answered with boundary 0, a resume at once.

    order               the agent's order that says where a replacement resumes
    is_rerun            an error has ended the script, which is run again in this process
    heard               set when messages of the agent are meant for the current run of the script
    has_script_failed   an exception has ended the script
    """

    def __init__(self, channel: Channel, welcome: to_rank.Welcome, fds: list[int]) -> None:
        self.channel, self.welcome, self.fds = channel, welcome, fds
        self.generation: int = welcome.generation
        self._early: list[Message] = []
        self.pid = os.getpid()
        self._heir: Callable[[Message], None] | None = None
        self._lock = threading.Lock()
        self.may_start = threading.Event()
        self.order: to_rank.Replay | mindio.Prepare | to_rank.Resume | mindio.Rollback | None = None
        self.is_rerun = False
        self.heard = threading.Event()
        self.heard.set()
        self.has_script_failed = False

    def start(self) -> None:
        """Read the agent's messages on a thread of its own."""
        threading.Thread(target=self._read, name="ttprun-channel", daemon=True).start()

    def greet(self, board: Board) -> None:
        """This process is the rank from now on; main thread only."""
        with contextlib.suppress(AttributeError):  # a C library without such locks
            heartbeat.hold(board, self.welcome.rank)
        self.channel.send(from_rank.Present(os.getpid(), threading.main_thread().ident or 0))

    def hand_over(self, heir: Callable[[Message], None], begin_in: Callable[[int], None]) -> None:
        """Pass all messages from now on to `heir`, first those that had to wait for it.

        begin_in   called before with the generation: an order answered here may have changed it since `heir` was made
        """
        with self._lock:
            begin_in(self.generation)
            for message in self._early:
                heir(message)
            self._heir = heir

    def take_back(self) -> None:
        """A run of the script is over: answer messages here again.

        Those that arrive before the agent has `heard` of it were meant for that run, except injected faults.
        """
        with self._lock:
            self.is_rerun = True
            self._heir = None
            self._early = []
            self.order = None
            self.may_start.clear()
            self.heard.clear()

    def is_ended_by_agent(self) -> bool:
        """Whether the agent has forwarded a signal to all ranks, which ends the job."""
        return Board(self.fds[0], self.welcome.world_size).get(LEADER, Field.ENDED_BY) != 0

    def _read(self) -> None:
        for message in self.channel.messages():
            if isinstance(message, Refused):
                self.channel.send(from_rank.Note(f"a message from the agent is ignored: {message.reason}"))
                continue
            if isinstance(message, to_rank.EndAsked):
                held_signals.let_end()
            with self._lock:
                heir = self._heir
                if heir is None:
                    self._answer(message)
            if heir is not None:
                heir(message)

    def _answer(self, message: Message) -> None:
        is_of_fault = isinstance(message, to_rank.InjectedFault | to_rank.FaultDone)
        if not (self.heard.is_set() or is_of_fault or isinstance(message, to_rank.Heard)):
            return
        match message:
            case to_rank.Heard():
                self.heard.set()
            case to_rank.Freeze(generation=generation):
                self._freeze(generation)
            case to_rank.Resume() | mindio.Rollback():
                self.generation = message.generation
                self.channel.send(from_rank.RankRebuilt(self.generation))
                if not (isinstance(message, to_rank.Resume) and any(message.expected.values())):
                    self.channel.send(from_rank.RankReissued(self.generation))
                self.order = message
                self.may_start.set()
            case to_rank.Replay() | mindio.Prepare():
                self.generation = message.generation
                self.order = message
                self.may_start.set()
            case to_rank.FaultDone():
                from ttprun.chaos import damage  # a companion

                damage.done_by_agent()
            case _:
                self._early.append(message)

    def _freeze(self, generation: int) -> None:
        """Answer with boundary 0, unless the script trains without our hooks: then its steps were not counted."""
        self.generation = generation
        why = unhooked.why()
        if why:
            self.channel.send(from_rank.RankUnprotected(why))
            return
        board = Board(self.fds[0], self.welcome.world_size)
        board.announce(self.welcome.rank, Field.HELD, self.generation)
        if self.welcome.address:
            self.channel.send(from_rank.RowChanged())
        self.channel.send(from_rank.RankFrozen(self.generation, boundary=0))


def diagnose(presence: Presence, error: BaseException) -> Diagnosis:
    """What an exception says about the device, by our table and the configuration's `device_errors`.

    A replacement that finds no memory before its boundary has come too early: its predecessor had room up to there.
    """
    session = session_now()
    table = DeviceErrors(presence.welcome.options.device_errors)
    diagnosis = table.diagnose(error, session.updates if session is not None else None)
    is_behind = presence.welcome.is_replacement and (session is None or not session.mode.is_live)
    if is_behind and not diagnosis.is_known and is_out_of_memory(error):
        return diagnosis_of(DeviceFault.DEVICE_BUSY)
    return diagnosis
