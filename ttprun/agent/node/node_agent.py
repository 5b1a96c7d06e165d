"""Carries out orders on this node's ranks, and reports what happens. Begin with `ORDERS` and `NodeAgent.report`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import structs

from ttprun.agent.base import life_signs, stack_dumps
from ttprun.agent.base.ground import FaultInjection
from ttprun.agent.base.loop import unwatch
from ttprun.agent.base.stored_states import NO_RECORD, UNUSABLE, Stored, open_checkpoint
from ttprun.agent.node.mirrors import Mirrors
from ttprun.agent.node.node import Node, Process
from ttprun.agent.node.process_watch import ProcessWatch
from ttprun.agent.node.rank_processes import RankHandler, StandbyHandler, command_of, kill_session
from ttprun.agent.node.standbys import Standbys, StandbyWatch
from ttprun.agent.node.state_copies import Memory, why_not_alike
from ttprun.agent.node.step_again import Again
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RankStack, StackReport, replace_file
from ttprun.protocol import channel, from_rank, node_messages, process_orders, to_rank
from ttprun.protocol.board import FINISHED, OPERATION_NAMES, Field, Phase
from ttprun.protocol.meeting import Legacy
from ttprun.protocol.rank_events import RankExited, SpawnFailed
from ttprun.protocol.reason import Reason
from ttprun.state.checkpoint import inspect
from ttprun.state.files import FileEntry, write_file

ReplaceHandler = Callable[[int, RankHandler], None]

# Order -> the method that carries it out, of the node's agent or of one of its parts.
ORDERS: dict[type[node_messages.Order], str] = {
    node_messages.Begin: "_begin",
    process_orders.SpawnRank: "_begin_process",
    process_orders.KillRank: "_kill",
    process_orders.ParkRank: "_park",
    process_orders.TakeBack: "_take_back",
    process_orders.Rewind: "_rewind",
    to_rank.Replay: "_replay",
    to_rank.KeepMirror: "mirrors.keep",
    to_rank.LoadMirror: "_load_mirror",
    node_messages.VoidEvidence: "_void_evidence",
    node_messages.VoidBeyond: "_void_beyond",
    node_messages.Broadcast: "_broadcast",
    node_messages.StorePart: "_store_part",
    node_messages.GiveRecords: "_give_records",
    node_messages.Strike: "injections.strike_here",
    node_messages.Recovered: "_recover",
    node_messages.TakeAgain: "again.carry_out",
}


@dataclass
class NodeAgent:
    """Carries out orders on this node's ranks, and reports what happens to them.

    replace_handler   lets torch's agent know of the new process of a local rank
    tell          passes on what has happened here, to whoever decides
    stored_of     what a rank goes back to, if it is decided in this agent: what is in memory has no name
    noted         what the next leader would have to know of them, as far as they and their ends have shown it; by rank
    catching_up   those whose processes run the script again, and are not as far as the others yet
    """

    node: Node
    injections: FaultInjection
    mirrors: Mirrors
    memory: Memory
    standbys: Standbys
    standby_watch: StandbyWatch
    watch: ProcessWatch
    again: Again
    replace_handler: ReplaceHandler
    tell: Callable[[node_messages.Report], None]
    stored_of: Callable[[int], Stored | None]
    noted: dict[int, Legacy] = field(init=False)
    catching_up: set[int] = field(default_factory=set, init=False)
    unwelcomed: set[int] = field(default_factory=set, init=False)
    parked: dict[int, tuple[Process, bytes, Legacy]] = field(default_factory=dict, init=False)  # with rows of the board
    _is_fetching: bool = field(default=False, init=False)  # mirrors, from another node
    _deferred: dict[int, to_rank.Replay] = field(default_factory=dict, init=False)  # until these are there

    def __post_init__(self) -> None:
        self.noted = {slot.rank: Legacy(slot.rank) for slot in self.node.here}

    def take_over(self, records: Mapping[int, node_messages.Records]) -> None:
        """This node has got a lost one's slots, with what its ranks had recorded: their first processes wait for Spawn.

        records   by rank
        """
        for slot in self.node.here:
            self.unwelcomed.add(slot.rank)
            if slot.rank in records and records[slot.rank].part:
                self.memory.take(slot, records[slot.rank].part)
        self._is_fetching = True
        self.mirrors.fetch({rank: record.mirror for rank, record in records.items()}, self._note_fetched)

    def _note_fetched(self) -> None:
        """The mirrors of the lost node are there, or will not come: replays that need them are ordered now."""
        self._is_fetching = False
        deferred, self._deferred = self._deferred, {}
        for order in deferred.values():
            if order.generation == self.node.generation:
                self._replay(order)

    def look(self) -> None:
        """Time has passed, a process is gone, or a standby is ready: ranks that wait for that get their process."""
        for slot in self.node.here:
            if slot.is_spawn_due:
                self._spawn(slot)

    def report(self, report: node_messages.Report) -> None:
        """Something has happened on this node: the agent that leads takes it; what is needed here is noted."""
        match report:
            case node_messages.Said(rank=rank, message=message):
                report = self._completed(report)
                self._note_said(self.node.process(rank), message)
            case RankExited(rank=rank, reason=reason):
                self.note(rank, code=report.exit_code, reason=reason, crashed_at=report.crashed_at)
        self.tell(report)

    def _completed(self, said: node_messages.Said) -> node_messages.Said:
        """What a rank reports, with what only its node knows."""
        if isinstance(said.message, from_rank.RankFrozen):
            return structs.replace(said, fingerprint=self.memory.fingerprint_of(said.rank, said.message.boundary))
        return said

    def note(self, rank: int, **changes: Any) -> None:
        """Something new is known of a rank."""
        self.noted[rank] = structs.replace(self.noted[rank], **changes)

    def _note_said(self, slot: Process, message: channel.Message) -> None:
        rank = slot.rank
        match message:
            case from_rank.Present(main_thread=main_thread):
                slot.greet(main_thread)
            case from_rank.ScriptError():
                slot.note_error(message)
            case from_rank.RankProtected():
                slot.protect()
            case from_rank.RankUnprotected(reason=reason):
                self.note(rank, unprotected=self.noted[rank].unprotected or reason)
            case from_rank.RankHindered(reason=reason):
                self.note(rank, hindrance=reason)
            case from_rank.RankTrainsAlone() | from_rank.RankJoined():
                self.note(rank, membership=message.membership)
            case from_rank.RankReissued():
                self.catching_up.discard(rank)
            case from_rank.RankFaulted():
                self.catching_up.add(rank)
                slot.lost_boundary = self.node.board.get(rank, Field.RECORDED)

    def carry_out(self, order: node_messages.Order) -> None:
        attrgetter(ORDERS[type(order)])(self)(order)

    def _begin(self, order: node_messages.Begin) -> None:
        self.node.note_generation(order.generation)
        for slot in self.node.here:
            self.watch.welcome(slot, is_replacement=order.is_resumed)

    def _void_evidence(self, order: node_messages.VoidEvidence) -> None:
        self.node.recorder_of(self.node.process(order.rank)).evidence.clear()

    def _void_beyond(self, order: node_messages.VoidBeyond) -> None:
        self.node.void_beyond(order.boundary, self.node.here)

    def _broadcast(self, order: node_messages.Broadcast) -> None:
        for rank, put in order.puts:
            for slot in self.node.here:
                if slot.rank != rank:
                    slot.send_if_present(put)

    def _give_records(self, order: node_messages.GiveRecords) -> None:
        for rank in order.ranks:
            self.node.report(node_messages.Records(rank, self.memory.give(rank), self.mirrors.copies.serve(rank)))

    def _recover(self, order: node_messages.Recovered) -> None:
        self.end_parked()
        self.node.first_failure.forget()
        self.node.domains.run("standbys", self.standby_watch.refill)

    def forward(self, rank: int, pid: int, message: channel.Order) -> None:
        """Send to the process of a rank, with what only its node knows; it is held until the process has greeted."""
        slot = self.node.process(rank) if self.node.is_here(rank) else None
        if slot is None or slot.pid != pid:
            return  # it is for a process that has ended
        if isinstance(message, to_rank.Freeze):
            self.node.note_generation(message.generation)
        elif isinstance(message, to_rank.Dump):
            message = structs.replace(message, mirrors=self.mirrors.located(message.mirrors, message.boundary))
        slot.send(message)

    def _begin_process(self, order: process_orders.SpawnRank) -> None:
        """Give a lost rank a process."""
        slot = self.node.process(order.rank)
        self.node.note_generation(order.generation)
        self.catching_up.add(order.rank)
        if slot.rank in self.unwelcomed:
            self.unwelcomed.discard(slot.rank)
            self.watch.welcome(slot, is_replacement=True)
        else:
            self._spawn(slot)

    def _spawn(self, slot: Process) -> None:
        """Give a lost rank a process: a standby, or a new one, once the old one has given back what it had.

        A standby on its way is waited for: a new process takes as long, and then none is left for the next fault.
        """
        node = self.node
        is_on_its_way = bool(node.domains.run("standbys", self._hurry_standbys))
        if slot.defer_spawn(is_on_its_way):
            return
        try:
            handler = self.start_process(self.standbys.preloads.start_of(slot.handler.start))
        except OSError as error:
            node.report(SpawnFailed(at_s=time.monotonic(), rank=slot.rank, reason=str(error)))
            return
        self.replace_handler(slot.local_rank, handler)
        slot.assign(handler)
        self.watch.welcome(slot, is_replacement=True)

    def _hurry_standbys(self) -> bool:
        is_on_its_way = self.standbys.is_on_its_way
        if is_on_its_way:
            self.standbys.hurry()
        return is_on_its_way

    def start_process(self, start: dict[str, Any]) -> RankHandler:
        """Start a process, or take one that stands by. Raises OSError."""
        standby = self.node.domains.run("standbys", lambda: self.standbys.take(start["local_rank_id"]))
        if standby is None:
            return RankHandler(start, str(self.node.run.path), is_new=False, is_python=True)
        unwatch(self.node.selector, standby.channel.sock)
        standby.channel.sock.setblocking(True)
        return StandbyHandler(start, standby)

    def _kill(self, order: process_orders.KillRank) -> None:
        """End a process whose rank is given to another one; that waits until it is gone, if it goes before long.

        What it has left on the board must not change any more: it is stopped at once, and killed when its stack is
        known, which may take seconds.
        """
        node, slot, reason = self.node, self.node.process(order.rank), order.reason
        handler, is_looked_at = slot.handler, order.is_late
        if is_looked_at:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGSTOP)
        else:
            slot.kill()
        life_signs.let_stop(slot.pid)
        self.watch.let_die(slot)
        slot.note_leavings(node.board)

        def kill(stack: str) -> None:
            node.log("rank_killed", rank=slot.rank, pid=handler.proc.pid, reason=reason, stack=stack)
            if not is_looked_at or handler.proc.poll() is not None:
                return
            kill_session(handler.proc.pid)
            if slot.lost_boundary < node.board.get(slot.rank, Field.RECORDED) < FINISHED and slot.handler is handler:
                # What it has done while it wrote its stack is void. FINISHED: the others train without it meanwhile.
                node.board.set(slot.rank, Field.RECORDED, slot.lost_boundary)

        if is_looked_at:

            def kill_unseen(error: Exception) -> None:
                node.domains.note("stacks", error)
                kill("")

            writer = stack_dumps.Writer(slot.pid, slot.stack_fd, node.board, slot.rank)
            node.in_background(partial(stack_dumps.take, writer, is_stopped=True), kill, kill_unseen)
        else:
            kill("")

    def _park(self, order: process_orders.ParkRank) -> None:
        """Stop a healthy process, and give its rank to another one, which gets a copy of its records."""
        node, slot = self.node, self.node.process(order.rank)
        for watched in (slot.pidfd, slot.handler.channel.sock):
            unwatch(node.selector, watched)
        os.kill(slot.pid, signal.SIGSTOP)  # not what it has started: that would not hear that it has died
        life_signs.let_stop(slot.pid)
        self.parked[slot.rank] = dataclasses.replace(slot), bytes(node.board.row(slot.rank)), self.noted[slot.rank]
        slot.record_fd = node.recorder_of(slot).copied()
        slot.pidfd, slot.is_lost = -1, True
        slot.note_leavings(node.board)
        node.log("rank_parked", rank=slot.rank, pid=slot.pid, reason=order.reason)

    def _take_back(self, order: process_orders.TakeBack) -> None:
        """Its replacement has failed: a parked process goes on, with its records and its row of the board."""
        node, slot = self.node, self.node.process(order.rank)
        if slot.rank not in self.parked:
            return
        old, row, self.noted[slot.rank] = self.parked.pop(slot.rank)
        self.standbys.preloads.given.pop(slot.local_rank, None)
        if slot.handler is not old.handler:
            slot.kill()
            life_signs.let_stop(slot.pid)
            self.watch.give_up(slot)
            self.replace_handler(slot.local_rank, old.handler)
        os.close(slot.record_fd)
        vars(slot).update(vars(old))
        node.board.row(slot.rank).cast("B")[:] = row
        self.catching_up.discard(slot.rank)
        self.watch.listen(slot)
        os.kill(slot.pid, signal.SIGCONT)  # it is not reaped, even if it has died meanwhile
        node.log("rank_taken_back", rank=slot.rank, pid=slot.pid, reason=order.reason)

    def end_parked(self) -> None:
        """The replacements have caught up, or the group ends: parked processes are not needed any more."""
        for slot, _, _ in self.parked.values():
            slot.kill()
            self.watch.give_up(slot)
            os.close(slot.record_fd)
            self.node.log("rank_killed", rank=slot.rank, pid=slot.pid, reason="its replacement trains", stack="")
        self.parked.clear()

    def _replay(self, order: to_rank.Replay) -> None:
        """Order a replacement up to where to run the script, once it is sure that its source replicates it."""
        node, slot = self.node, self.node.process(order.rank)
        why_not = why_not_alike(order, self.memory.fingerprint_of(order.rank, order.boundary))
        if order.from_mirror and not why_not:
            if self._is_fetching:
                self._deferred[order.rank] = order
                return
            mirror = self.mirrors.source_of(slot.rank, order.boundary, order.is_before_step)
            if mirror is None:
                why_not = Reason("state-of-one-rank", self.mirrors.why_not_held(order.rank, order.boundary))
            elif mirror.is_step:
                order = structs.replace(order, step_from=mirror.path)
            else:
                step = self.mirrors.path_of(slot.rank, order.boundary, "step")
                order = structs.replace(order, result=mirror.path, proof_from=step)
        if why_not:
            node.report_mismatch(order.rank, order.generation, why_not)
            return
        slot.send(order)

    def _load_mirror(self, order: to_rank.LoadMirror) -> None:
        slot = self.node.process(order.rank)
        mirror = self.mirrors.source_of(slot.rank, order.boundary, order.is_before_step)
        slot.send(structs.replace(order, path="" if mirror is None or mirror.is_step else mirror.path))

    def _rewind(self, order: process_orders.Rewind) -> None:
        """Put what was stored of ranks of this node in the place of what they have recorded since."""
        node, rank = self.node, order.ranks[0]
        node.note_generation(order.generation)
        try:
            stored = self._open(order) if node.peers.is_follower else self.stored_of(rank)
            for rank in order.ranks:
                if not order.is_own:  # what it keeps of itself is newer, and is refused, or was taken back
                    self.memory.note(rank)
                self._go_back(node.process(rank), stored, rank in order.trusted)
        except UNUSABLE as error:
            node.refuse_stored(rank, order.generation, error)

    def _open(self, order: process_orders.Rewind) -> Stored | None:
        """What another agent orders this node's ranks to go back to. Raises if it cannot be used."""
        stored = open_checkpoint(inspect(Path(order.place)), 0.0) if order.place else None
        if stored is not None and order.is_adapted:
            return dataclasses.replace(stored, of_others=())  # from whom each takes over, the leader says
        return stored

    def _go_back(self, slot: Process, stored: Stored | None, is_trusted: bool) -> None:
        """Let a rank be as it was at the boundary of a snapshot or checkpoint; of another run's ranks, have no past."""
        node = self.node
        self.mirrors.forget(slot.rank)
        boundary = 0 if stored is None else stored.boundary
        if stored is None or not stored.is_in_recorder:
            older = node.recorder_of(slot)
            recorder = node.new_recorder(slot)
            if stored is not None and stored.of_others is None:
                recorder.restore(stored.rank_part(slot.rank))
                if is_trusted:
                    recorder.evidence.take_over(older.evidence, boundary)
        slot.lost_boundary, slot.is_finished = boundary, False
        node.set_back(slot.rank, boundary)

    def _store_part(self, order: node_messages.StorePart) -> None:
        """Write what the records have of a rank, dead or alive."""
        node = self.node
        entry, why_not = FileEntry(bytes=0, xxh3="0" * 32), ""
        try:
            entry = write_file(Path(order.path), [self.memory.own_part(order.rank, order.boundary)])
        except KeyError:
            why_not = NO_RECORD
        except OSError as error:
            why_not = f"{order.path} cannot be written on {node.peers.name_of(node.peers.node)}: {error}"
        node.report(node_messages.PartStored(order.rank, order.boundary, entry.bytes, entry.xxh3, why_not))


@dataclass(frozen=True)
class Target:
    """A rank whose stack is taken, and what the board says of it at that moment.

    writer        its process
    main_thread   ident of its main thread
    row           by board.Field
    """

    rank: int
    pid: int
    writer: stack_dumps.Writer
    main_thread: int
    row: Sequence[int]

    @classmethod
    def of(cls, node: Node, slot: Process) -> Target:
        """That of a rank's process."""
        writer = stack_dumps.Writer(slot.pid, slot.stack_fd, node.board, slot.rank)
        return cls(slot.rank, slot.pid, writer, slot.main_thread, node.board_row(slot.rank))

    def stack(self, text: str) -> RankStack:
        """What is reported of it.

        text   stacks of all its threads, "" if they were not had
        """
        return RankStack(
            rank=self.rank,
            pid=self.pid,
            step=self.row[Field.APPLIED],
            doing=Phase(self.row[Field.PHASE]).name.lower(),
            operation=OPERATION_NAMES[self.row[Field.OPERATION]],
            main=stack_dumps.of_the_user(stack_dumps.main_thread_of(text, self.main_thread)),
            all_threads=text,
        )


class NodeEyes:
    """What of this node is seen without a message, by what is decided in the same agent (`rows.py`)."""

    def __init__(self, node: Node, memory: Memory) -> None:
        self._node = node
        self.newest, self.stored, self.own_part = memory.newest, memory.stored, memory.own_part

    def command(self) -> list[str]:
        """The script of the ranks, and its arguments."""
        return command_of(self._node.here[0].handler.start)

    def state_of(self, rank: int) -> tuple[str, float]:
        """State letter of the process of a rank, and its processor time; ("", 0.0) if there is none."""
        slot = self._node.process(rank)
        with contextlib.suppress(OSError, ValueError, IndexError):
            if slot.pid and not slot.is_buried:
                return life_signs.state_of(slot.pid)
        return "", 0.0

    def take_all(self, without: int | None = None) -> Callable[[], tuple[RankStack, ...]]:
        """A function that takes the stacks of this node's living ranks; it blocks, two seconds at most.

        without   a rank that is left out: it may not answer

        To be called on the supervisor's thread; what it returns is for another one.
        """
        slots = [slot for slot in self._node.here if slot.is_present and not slot.is_lost and not slot.is_finished]
        targets = [Target.of(self._node, slot) for slot in slots if slot.rank != without]

        def take() -> tuple[RankStack, ...]:
            texts = stack_dumps.ask_all([target.writer for target in targets])
            return tuple(target.stack(text) for target, text in zip(targets, texts, strict=True))

        return take

    def take_stack(self, rank: int, is_stopped: bool) -> Callable[[], RankStack]:
        """A function that takes the stack of one rank, which may hang; it blocks some seconds at most."""
        target = Target.of(self._node, self._node.process(rank))
        return lambda: target.stack(stack_dumps.take(target.writer, is_stopped))

    def end_at_once(self, rank: int) -> None:
        """Kill the process of a rank, and wait until it does nothing more."""
        slot = self._node.process(rank)
        slot.kill()
        life_signs.let_stop(slot.pid)

    def write_when_taken(self, number: int) -> None:
        """Have the stacks taken and written to the run's `stacks.json`, as report `number`; returns at once."""
        node, at, take = self._node, timestamp(), self.take_all()

        def work() -> str:
            try:
                replace_file(node.run.stacks, StackReport(number, at, take()).to_json())
            except OSError as error:
                return error.strerror or str(error)
            return ""

        def then(why_not: str) -> None:
            if why_not:
                node.log("stacks_not_written", error=why_not)

        node.in_background(work, then, partial(node.domains.note, "stacks"))
