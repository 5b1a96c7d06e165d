"""A rank's part in a recovery, on a thread of its own, while the main thread waits.

Begin with `Recovery.take`. The agent's orders are in `protocol/to_rank.py`: `Freeze` (a rank is lost: stop before the
next commit, break the connections, report the boundary), `SendState` and `FetchState` (the repair), `LoadState` (from a
snapshot), `Dump` (a checkpoint), `Resume` (connect in the new generation and issue the journal again). A newer
generation interrupts an older one at every wait.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

from ttprun.device.interface import DeviceFailedError
from ttprun.protocol import from_rank, mindio, to_rank
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.channel import Message
from ttprun.protocol.from_rank import GroupJournal
from ttprun.protocol.snapshots import Dumped
from ttprun.rank import moments
from ttprun.rank.checks.proof import Proof
from ttprun.rank.checks.replay_guard import Expected
from ttprun.rank.comm import on_device
from ttprun.rank.comm.connection import GenerationOverError
from ttprun.rank.comm.entry import Entry
from ttprun.rank.comm.journal import REPORT_AFTER_S, has_ended
from ttprun.rank.comm.links import cut_all
from ttprun.rank.comm.process_group import ManagedGroup
from ttprun.rank.comm.reissue import issue_again
from ttprun.rank.session import Session
from ttprun.rank.weights import checkpoint_shards, mirror, replicated, sharded, state_places, state_transfer

LOOK_AGAIN_S = 0.05
_NO_MORE = sys.maxsize  # a generation above all others
_LET_FINISH_S = 0.05  # time for operations between living ranks to end by themselves
STUCK_AFTER_S = 2.0  # after a cut; an operation that can end does so within milliseconds
RETIRE_LIMIT_S = 30.0  # gloo needs 20 s to give up connecting


class JoinsTraining(NamedTuple):
    """The main thread of a replacement has reached its framework's train function: an order of our own (--mindio)."""

    generation: int


Ordered = to_rank.OfRecovery | mindio.OfRecovery | JoinsTraining


class OvertakenError(RuntimeError):
    """A newer generation has begun: the current order is void."""


class Recovery:
    """Reads the agent's messages and carries them out."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._orders: queue.Queue[Ordered | None] = queue.Queue()
        self._newest_generation = session.generation
        self._issued_again: list[tuple[Entry, Any]] = []
        self._thread = threading.Thread(target=self._work, name="ttprun-recovery", daemon=True)

    def begin_in(self, generation: int) -> None:
        """Before the first message: a freeze may have been answered, and a generation begun, since this was made."""
        self._session.generation = self._newest_generation = generation

    def start(self) -> None:
        """Start the working thread, which may block; `take` is called from the reading thread."""
        self._thread.start()

    def retire(self) -> None:
        """The run of the script is over: the current order is void. Does not wait."""
        self._newest_generation = _NO_MORE
        self._orders.put(None)
        self._session.exchange.end_before(_NO_MORE)

    def join(self, limit_s: float) -> None:
        """After `retire`: wait `limit_s` at most for the thread's end."""
        self._thread.join(limit_s)

    def finish(self) -> None:
        """After `retire`: wait until the thread has ended, and no operation touches a tensor any more.

        Raises TimeoutError after RETIRE_LIMIT_S.
        """
        self._thread.join(_LET_FINISH_S)
        if self._thread.is_alive():
            cut_all(group.links for group in self._groups())
        self._thread.join(RETIRE_LIMIT_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the recovery thread has not ended within {RETIRE_LIMIT_S:.0f} s")
        self._break_connections()
        with self._session.journal.lock:
            self._session.journal.is_frozen = False
        self._session.journal.clear()

    def take(self, message: Message) -> None:
        """Handle a message: at once if that cannot block, otherwise on the working thread."""
        session = self._session
        match message:
            case from_rank.Put(generation=generation, key=key, value=value):
                session.exchange.deliver(generation, key, value)
            case from_rank.Unprotected(reason=reason):
                with session.changed:
                    session.unprotected = session.unprotected or reason
                    session.changed.notify_all()
            case to_rank.EndAsked():
                session.journal.end()
                with session.changed:
                    session.changed.notify_all()
            case to_rank.NotAlike(owners=owners):
                session.snapshots.owners = owners
            case to_rank.KeepMirror():
                session.mirror.is_wanted = True
            case to_rank.LookAt(boundary=boundary):
                session.verifier.look_at(boundary)
            case to_rank.StandAside():
                session.verifier.mark_divergent()
            case (
                to_rank.Freeze()
                | to_rank.Replay()
                | to_rank.SendState()
                | to_rank.FetchState()
                | to_rank.LoadMirror()
                | to_rank.LoadState()
                | to_rank.Dump()
                | to_rank.Resume()
            ):
                self.leave_to_thread(message)
            case _:
                session.channel.send(from_rank.Note(f"a message from the agent is ignored: {message}"))

    def leave_to_thread(self, order: Ordered) -> None:
        """Queue an order that may block; one of a newer generation interrupts those before it."""
        self._newest_generation = max(self._newest_generation, order.generation)
        if isinstance(order, to_rank.Freeze):
            self._session.exchange.end_before(order.generation)
        self._orders.put(order)

    def _work(self) -> None:
        session = self._session
        while (order := self._orders.get()) is not None:
            if order.generation < self._newest_generation:
                continue
            try:
                self._carry_out(order)
            except (OvertakenError, GenerationOverError):
                continue
            except DeviceFailedError as error:
                on_device.give_up_process(session, error)
            except Exception as error:
                if self._newest_generation > order.generation:
                    continue
                is_refusal = isinstance(error, replicated.NotRepairableError)
                is_resume = isinstance(order, to_rank.Resume | mindio.Rollback)
                if is_resume and isinstance(error, RuntimeError | OSError) and not is_refusal:
                    # These errors only mean that another rank is lost or a connection has broken.
                    if not self._is_overtaken_soon(order.generation):
                        fault = next(filter(None, (group.links.device_fault_of(error) for group in self._groups())), "")
                        session.report_broken(order.generation, str(error), REPORT_AFTER_S, fault)
                    continue
                detail = "" if is_refusal else traceback.format_exc()
                reason = f"rank {session.rank}, {type(order).__name__}: {error}"
                session.channel.send(from_rank.Mismatch(order.generation, reason, detail))

    def _carry_out(self, order: Ordered) -> None:
        on_device.enter()
        match order:
            case to_rank.Freeze():
                self._freeze(order)
            case to_rank.SendState():
                self._send_state(order)
            case to_rank.FetchState():
                self._fetch_state(order)
            case to_rank.LoadMirror():
                self._load_mirror(order)
            case to_rank.LoadState():
                self._load_state(order)
            case to_rank.Dump():
                self._dump(order)
            case to_rank.Resume():
                self._resume(order)
            case _:
                raise RuntimeError(f"a rank that trains cannot carry out {order}")

    def _is_overtaken_soon(self, generation: int) -> bool:
        """Whether a newer generation begins within REPORT_AFTER_S, as the agent has noticed the fault itself."""
        give_up_at_s = time.monotonic() + REPORT_AFTER_S
        while self._newest_generation <= generation and time.monotonic() < give_up_at_s:
            time.sleep(LOOK_AGAIN_S)
        return self._newest_generation > generation

    def _check_overtaken(self) -> None:
        if self._newest_generation > self._session.generation:
            raise OvertakenError

    # Freeze.

    def _freeze(self, order: to_rank.Freeze) -> None:
        session = self._session
        moments.reached("freeze")
        with session.journal.lock:
            session.journal.is_frozen = True
        with session.changed:
            session.generation = order.generation
            session.is_holding = True
            session.settle_at = 0
            session.changed.notify_all()
        self._break_connections()
        self._let_step_end()
        self._settle(order)
        on_device.settle()
        frozen = from_rank.Frozen(
            session.generation,
            session.applied,
            digest=replicated.digest() if session.applied else "",
            has_group=bool(session.groups),
            journal=self._signatures(),
        )
        session.channel.send(frozen)

    def _let_step_end(self) -> None:
        """Wait for the end of the running optimizer step, if there is one."""
        session = self._session
        with session.changed:
            while session.is_applying:
                session.changed.wait(LOOK_AGAIN_S)
                self._check_overtaken()

    def _break_connections(self) -> None:
        """Cut every connection, and wait until no operation of the old generation touches a tensor any more.

        Operations between living ranks first get _LET_FINISH_S: one that is cut with messages in flight may never end.
        """
        session = self._session
        groups = self._groups()
        works = [(entry, entry.inner) for entry in session.journal.entries if entry.inner is not None]
        works += self._issued_again
        self._issued_again = []
        end_s = time.monotonic() + _LET_FINISH_S
        for _, inner in works:
            has_ended(inner, end_s - time.monotonic())
        cut_all(group.links for group in groups)
        if session.crossing is not None:
            session.crossing.cut()
        on_device.settle()
        end_s = time.monotonic() + STUCK_AFTER_S
        for entry, inner in works:
            if not has_ended(inner, end_s - time.monotonic()):
                entry.group.links.abandon()
                continue
            with contextlib.suppress(Exception):
                inner.wait()
                entry.group.complete(entry, inner)
        for entry in session.journal.unfinished():
            session.journal.attach(entry, None)
        for group in groups:
            group.links.forget()

    def _settle(self, order: to_rank.Freeze) -> None:
        """Bring all survivors to one boundary.

        Each has stopped before its next commit. If one of them has stepped already, every rank had recorded that
        boundary, so those that wait before it may step too. The lost rank may be the one that has stepped: if the
        survivors stayed where they are, it would have to take that step again, without the gradients of a step of
        several optimizers, which are in no record.
        """
        session = self._session
        board = session.board
        board.announce(session.rank, Field.HELD, session.generation)
        session.share_row()
        for row in order.survivors:
            while (held := board.get(row, Field.HELD)) < session.generation:
                board.wait_for_change(row, Field.HELD, held, LOOK_AGAIN_S)
                self._check_overtaken()
        boundary = max(order.committed, *(board.get(row, Field.APPLIED) for row in order.survivors))
        with session.changed:
            session.settle_at = boundary
            session.changed.notify_all()
            while session.applied < boundary or session.is_applying:
                session.changed.wait(LOOK_AGAIN_S)
                self._check_overtaken()

    def _signatures(self) -> dict[str, GroupJournal]:
        """By group and lane: ranks, operations since the boundary, and what of them need not be issued again."""
        found: dict[str, GroupJournal] = {}
        with self._session.journal.lock:
            for entry in self._session.journal.entries:
                group = found.setdefault(entry.lane, GroupJournal(list(entry.members), []))
                if entry.digest and len(group.received) == len(group.issued):
                    group.received.append(entry.digest)
                if entry.held is not None and entry.is_done and entry.held.is_kept:
                    group.results.append(len(group.issued))
                group.issued.append(entry.signature)
        return found

    # Repair.

    def _send_state(self, order: to_rank.SendState) -> None:
        session = self._session
        moments.reached("transfer")
        digest = state_transfer.serve(self._place_of(order), order.receivers, order.limit_s, self._check_overtaken)
        session.channel.send(from_rank.StateSent(order.generation, digest))

    def _fetch_state(self, order: to_rank.FetchState) -> None:
        session = self._session
        session.touch(Phase.REPAIRING)
        moments.reached("transfer")
        digest = state_transfer.fetch(self._place_of(order), order.limit_s)
        session.channel.send(from_rank.Repaired(order.generation, digest))

    def _place_of(self, order: to_rank.SendState | to_rank.FetchState) -> state_places.Place:
        """Where the source and the receivers meet."""
        session = self._session
        if not session.address:
            return state_places.InDirectory(session.run_dir, order.name)
        return state_places.OverNodes(session.exchange, order.generation, order.name, order.limit_s)

    def _load_mirror(self, order: to_rank.LoadMirror) -> None:
        session = self._session
        session.touch(Phase.REPAIRING)
        moments.reached("transfer")
        if order.path:
            mirror.load(order.path)
        else:
            sharded.forget_gathered()
        session.channel.send(from_rank.Repaired(order.generation, replicated.digest()))

    def _load_state(self, order: to_rank.LoadState) -> None:
        session = self._session
        session.touch(Phase.REPAIRING)
        moments.reached("transfer")
        apart = checkpoint_shards.Apart(order.owners, session.rank, ())
        checkpoint_shards.load(order.header, order.files, apart)
        session.channel.send(from_rank.Repaired(order.generation, replicated.digest()))

    def _dump(self, order: to_rank.Dump) -> None:
        """Write this rank's share of the survivors' state; the main thread waits meanwhile."""
        session = self._session
        moments.reached("persist")
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        share, why_not = None, ""
        try:
            apart = checkpoint_shards.Apart(order.owners, session.rank, order.writers)
            share = checkpoint_shards.write(order.path, order.share, order.of, main, apart)
        except (replicated.NotRepairableError, OSError) as error:  # only the checkpoint is lost
            why_not = f"rank {session.rank}: {error}"
        is_handled = _handles_end_signals()
        session.channel.send(Dumped(order.generation, why_not, is_handled, share))

    # Resume.

    def _resume(self, order: to_rank.Resume) -> None:
        session = self._session
        moments.reached("rebuild")
        if session.replay is not None:
            self._go_live(order)
            return
        session.journal.givers, session.journal.received = givers_of(order), order.received
        groups = self._groups()
        again = self._issued_again = []
        is_connected = False
        # A replacement connects these before it issues anything, and a backend may connect within an operation.
        for group in groups:
            if group.links.is_joined and group.number <= session.groups_at_boundary:
                group.links.connect_in(session.generation)
        while True:
            with session.journal.lock:
                entries, at = session.journal.entries, len(again)
                entry = entries[at] if at < len(entries) else None
                if entry is None and is_connected:
                    session.journal.is_frozen = False
                    session.journal.news.notify_all()
                    break
            if entry is None:
                self._connect_up_to(None)
                session.channel.send(from_rank.Rebuilt(session.generation))
                is_connected = True
                continue
            if not entry.group.links.are_of(session.generation):
                self._connect_up_to(entry.group)
            inner = issue_again(session, entry)
            again.append((entry, inner))
            moments.reached("reissue")
            if not entry.is_done:
                session.journal.attach(entry, inner)
                if entry.future is not None:
                    entry.group.bridge(entry, inner)
        session.verifier.prove_from(session.applied)
        with session.changed:
            session.is_holding = False
            session.changed.notify_all()
        moments.reached("thaw")
        for entry, inner in again:
            while not has_ended(inner, LOOK_AGAIN_S):
                self._check_overtaken()
            inner.wait()
            entry.group.complete(entry, inner)
        self._check_overtaken()
        self._issued_again = []
        session.channel.send(from_rank.Reissued(session.generation))

    def _groups(self) -> list[ManagedGroup]:
        """All groups that exist or that the journal needs, including destroyed ones, in the order of their making."""
        with self._session.journal.lock:
            found = {entry.group for entry in self._session.journal.entries}
        return sorted(found | set(self._session.groups.values()), key=lambda group: group.number)

    def _connect_up_to(self, newest: ManagedGroup | None) -> None:
        """Connect the groups made before this one, and this one; None: all.

        Not before the journal needs them: a replacement that runs from the top makes a group only after it has issued
        the operations before that. A group that was never connected is left to the main thread.
        """
        for group in self._groups():
            if group.links.is_joined and (newest is None or group.number <= newest.number):
                group.links.connect_in(self._session.generation)

    def _go_live(self, order: to_rank.Resume) -> None:
        session = self._session
        replay = session.replay
        assert replay is not None
        for group in list(session.groups.values()):
            group.links.connect_in(session.generation)
            group.links.is_joined = True
        session.channel.send(from_rank.Rebuilt(session.generation))
        session.expected = Expected(session.channel, session.generation, order.expected)
        session.journal.givers, session.journal.received = givers_of(order), order.received
        session.verifier.prove_from(replay.boundary)
        if replay.is_alone:
            session.proof = Proof.of(session, replay.boundary)
        replay.live.set()


def _handles_end_signals() -> bool:
    """Whether the script has a handler of its own for a signal that ends jobs."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    return any(callable(handler) and handler is not signal.default_int_handler for handler in handlers)


def givers_of(order: to_rank.Resume) -> dict[tuple[str, int], int]:
    """The ranks that broadcast results, by the agent's order: see Journal.givers."""
    return {(name, number): rank for name, number, rank in order.given}
