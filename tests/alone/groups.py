"""Groups without ttprun's launcher: torch.distributed's process groups survive a member that is lost.

The members meet in a store of torch's that outlives each of them, such as a TCPStore of the process that starts them.
That process calls `begin_generation` when a member has died, and starts another with its rank. All members come to
`Groups.pass_boundary` together, once a step: a new one begins there, and the collectives since then are issued again.

What is safe for a lost member is safe for two, one after another or together, as long as one is left. Only gloo's
collectives have been tried this way. Begin with `Groups`.
"""

from __future__ import annotations

import atexit
import io
import math
import queue
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ttprun.groups import ending, generations, groups
from ttprun.groups.agreement import Agreed
from ttprun.groups.connection import GIVEN_UP, Exchange, GenerationOverError, GivenUpError
from ttprun.groups.host import Member, Training
from ttprun.groups.journal import EndedError, Journal
from ttprun.groups.patched import PATCHES
from ttprun.groups.process_group import groups_of
from ttprun.groups.results import Results
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.host import begin, leave_in_children
from ttprun.introspect.patching import replace
from ttprun.protocol import from_rank
from ttprun.protocol.board import Board
from ttprun.protocol.codec import Message
from ttprun.protocol.from_rank import GroupJournal

_ALWAYS = 1 << 30  # a generation that does not end
_LOOK_AGAIN_S = 0.02
_SHORTLY_S = 0.001
_SEEN_AFTER_S = 1.0  # by then whoever starts the members has seen that one is lost
_END_S = 1.0


class _Known(Message, frozen=True):
    """What a member reports to the others once it is frozen.

    boundary   the newest that it has passed
    journal    what it has issued since; {}: it is new
    """

    boundary: int
    journal: dict[str, GroupJournal]


class _Options:
    """What groups ask of a rank's options."""

    device_errors: dict[str, Any] = {}  # noqa: RUF012 - none of the user's own


class _Line:
    """Takes the part of the line to an agent: what a member reports."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def send(self, message: Any) -> None:
        """A broken connection begins the next generation; whatever else matters to the user is a warning."""
        match message:
            case from_rank.Broken(generation=generation):
                _begin(self._store, generation + 1)
            case from_rank.RankUnprotected(reason=reason):
                warnings.warn(f"a member that is lost cannot be replaced from now on: {reason}", stacklevel=2)


class StoreExchange(Exchange):
    """An exchange whose values are in a store, where a new member finds them."""

    def __init__(self, store: Store, line: Any, address: str = "") -> None:
        super().__init__(line, address)
        self._store = store

    def put(self, generation: int, key: str, value: bytes) -> None:
        """As in Exchange."""
        self._store.set(_key(generation, key), value)  # type: ignore[arg-type]  # or any bytes

    def drop(self, generation: int, key: str) -> None:
        """Nobody will ask for this key again."""
        self._store.delete_key(_key(generation, key))

    def has(self, generation: int, key: str) -> bool:
        """As in Exchange."""
        return self.has_all(generation, [key])

    def has_all(self, generation: int, keys: Sequence[str]) -> bool:
        """Whether all of these keys have come."""
        return bool(self._store.check([_key(generation, key) for key in keys]))

    def get(self, generation: int, key: str, limit_s: float) -> bytes:
        """As in Exchange."""
        self.wait(generation, [key], limit_s)
        value: bytes = self._store.get(_key(generation, key))
        return value

    def wait(self, generation: int, keys: Sequence[str], limit_s: float = math.inf) -> None:
        """Wait until all of these keys have come; raises as `get` does."""
        began_s = time.monotonic()
        while not self.has_all(generation, keys):
            self.is_given_up = self.is_given_up or self.has(generation, GIVEN_UP)
            waited_s = time.monotonic() - began_s
            with self._changed:
                if generation < self._over_before:
                    raise GenerationOverError(f"generation {generation} is over")
                if self.is_given_up and generation != _ALWAYS:
                    raise GivenUpError
                if waited_s > limit_s:
                    missing = [key for key in keys if not self.has(generation, key)]
                    raise TimeoutError(f"nobody has reported '{', '.join(missing)}' within {limit_s:.0f} s")
                self._changed.wait(min(_SHORTLY_S + waited_s / 10, _LOOK_AGAIN_S))


class Groups:
    """This process is a member: from now on torch.distributed makes groups that survive a lost peer. Once per process.

    store      that all members share, and that none of them serves
    rank       of this process among `size`
    training   what groups ask and report; see host.py
    limit_s    for which the others are waited for: in a step, and until a lost one is replaced
    """

    def __init__(
        self, store: Store, rank: int, size: int, training: Training | None = None, limit_s: float = 600.0
    ) -> None:
        self._limit_s = limit_s
        self._store = PrefixStore("ttprun", store)
        line: Any = _Line(self._store)
        self._exchange = StoreExchange(self._store, line)
        self.member = member = Member(
            rank=rank,
            local_rank=rank,
            world_size=size,
            run_dir="",
            options=cast("Any", _Options()),
            channel=line,
            board=Board.create(size)[1],  # of this process alone
            training=training or Training(),
        )
        self._journal = Journal(1 << 40, diagnose=member.diagnose, report_broken=self._report_broken)
        member.parts.update(
            {
                Journal: self._journal,
                Results: Results(_NoLog()),
                Exchange: self._exchange,
            }
        )
        self.state: Any = None
        self._orders: queue.Queue[int | None] = queue.Queue()
        self._is_ending = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ttprun-watching", daemon=True)
        self._working = threading.Thread(target=self._work, name="ttprun-recovery", daemon=True)
        groups.register()
        replace(row for row in PATCHES if row.where != "imported" and row.attribute != "destroy_process_group")
        begin(member)
        leave_in_children()
        atexit.register(self.close)
        self._newest = _newest(self._store, 0)
        self._watching.start()
        if self._newest:
            self._take_place()
        self._working.start()

    @property
    def boundary(self) -> int:
        """How many times this member, or the lost one whose place it takes, has passed a boundary."""
        return self.member.applied

    def pass_boundary(self, state: Any = None) -> None:
        """Wait until all members have come here: what was issued before is not issued again.

        state   what a process would begin with here, in the place of this one, as its `state`: None, a tensor, or
                dictionaries and lists of tensors, numbers and strings

        All operations must have been waited for. Raises EndedError if a lost member could not be replaced, TimeoutError
        if a member does not come within the limit.
        """
        boundary = self.boundary + 1
        packed = _packed(state)
        if boundary == 1:
            _check(packed)
        for entry in self._journal.unfinished():
            self._journal.wait(entry)
        with self._journal.changed:
            self._wait_for_thaw()
            self._note_announced(boundary)
            self._exchange.put(_ALWAYS, _passing(boundary, self.member.rank), packed)
        try:
            self._exchange.wait(_ALWAYS, self._passing_all(boundary), self._limit_s)
        except GenerationOverError:
            raise EndedError from None
        with self._journal.changed:
            self._wait_for_thaw(boundary)
            if self.boundary < boundary:
                self._pass(boundary)
        # Whoever announces a boundary has passed the one before.
        self._exchange.drop(_ALWAYS, _passing(boundary - 1, self.member.rank))

    def _wait_for_thaw(self, boundary: int = _ALWAYS) -> None:
        """Wait for the end of a recovery, if one is under way; or until that has passed the boundary."""
        journal = self._journal
        while journal.is_frozen and self.boundary < boundary and not journal.is_ended:
            journal.changed.wait()
        if journal.is_ended:
            raise EndedError

    def _pass(self, boundary: int) -> None:
        """All have come to a boundary. The caller holds the journal's lock."""
        member = self.member
        for group in groups_of(member):
            group.end_step()
        self._journal.clear()
        member[Results].begin_step(boundary)
        member.pass_boundary()
        self._journal.changed.notify_all()

    def close(self) -> None:
        """End the connections; called at the process's exit."""
        atexit.unregister(self.close)
        self._is_ending.set()
        self._newest = _ALWAYS
        self._orders.put(None)
        self._exchange.end_before(_ALWAYS)
        for thread in (self._watching, self._working):
            if thread.is_alive():
                thread.join(_END_S)
        ending.end(self.member, _END_S)

    # A member is lost.

    def _watch(self) -> None:
        """Look for new generations: they interrupt what is done for older ones."""
        while not self._is_ending.wait(_LOOK_AGAIN_S):
            try:
                newest = _newest(self._store, self._newest)
            except RuntimeError:  # whoever serves the store has ended
                return
            if newest > self._newest:
                self._newest = newest
                self._exchange.end_before(newest)
                self._orders.put(newest)

    def _work(self) -> None:
        while (generation := self._orders.get()) is not None:
            try:
                if self.member.generation < generation == self._newest:
                    self._survive(generation)
            except (GenerationOverError, EndedError):
                continue
            except NotRepairableError as error:
                self._fail(str(error))
            except RuntimeError:  # a connection has broken again
                self._begin_after(generation)
            except Exception as error:
                self._fail(f"{type(error).__name__}: {error}")

    def _survive(self, generation: int) -> None:
        """Another member is lost: stop, come to one boundary with the others, and issue again what is since then."""
        member, exchange = self.member, self._exchange
        member.begin_generation(generation)
        generations.freeze(member)
        generations.break_connections(member, self._check_overtaken)
        self._hold(generation)
        # Nobody announces a boundary while it is held, so all see the same here.
        if exchange.has_all(_ALWAYS, self._passing_all(self.boundary + 1)):
            with self._journal.lock:
                self._pass(self.boundary + 1)
        self._agree(generation, generations.known(member))
        generations.issue_again(member, lambda: None)
        with member.changed:
            member.changed.notify_all()
        generations.complete(member, self._check_overtaken)

    def _take_place(self) -> None:
        """This process is new in the place of a lost one: begin at the boundary that the others are at."""
        member, exchange = self.member, self._exchange
        while True:
            generation = self._newest
            member.begin_generation(generation)
            try:
                self._hold(generation)
                # Nobody has gone further than the boundary that the lost one has announced, and it not without them.
                boundary = self._announced()
                if boundary and not exchange.has_all(_ALWAYS, self._passing_all(boundary)):
                    exchange.drop(_ALWAYS, _passing(boundary, member.rank))
                    boundary -= 1
                    self._note_announced(boundary)
                member.stand_at(boundary)
                self._agree(generation, {})
                break
            except GenerationOverError:
                continue
        if member.applied:
            self.state = _unpacked(exchange.get(_ALWAYS, _passing(member.applied, member.rank), self._limit_s))

    def _announced(self) -> int:
        """The newest boundary that this rank has announced, or was about to; 0: none."""
        key = _announcing(self.member.rank)
        return int(self._exchange.get(_ALWAYS, key, 0.0)) if self._exchange.has(_ALWAYS, key) else 0

    def _note_announced(self, boundary: int) -> None:
        self._exchange.put(_ALWAYS, _announcing(self.member.rank), str(boundary).encode())

    def _hold(self, generation: int) -> None:
        """Wait until all members are frozen, or new."""
        self._exchange.put(generation, f"held {self.member.rank}", b"")
        keys = [f"held {rank}" for rank in range(self.member.world_size)]
        self._exchange.wait(generation, keys, self._limit_s)

    def _agree(self, generation: int, journal: dict[str, GroupJournal]) -> None:
        """Note what all members know alike of the step. Raises NotRepairableError if they are not at one boundary."""
        mine = _Known(self.boundary, journal)
        self._exchange.put(generation, f"known to {self.member.rank}", msgspec.msgpack.encode(mine))
        ranks = range(self.member.world_size)
        packed = [self._exchange.get(generation, f"known to {rank}", self._limit_s) for rank in ranks]
        of_all = [msgspec.msgpack.decode(answer, type=_Known) for answer in packed]
        if {theirs.boundary for theirs in of_all} != {mine.boundary}:
            raise NotRepairableError(f"the members are at boundaries {[theirs.boundary for theirs in of_all]}")
        self._journal.note_agreed(*Agreed.of(self.member.rank, {rank: of_all[rank].journal for rank in ranks}))

    def _begin_after(self, generation: int) -> None:
        """Begin the next generation, unless somebody who knows why it is needed does so before."""
        end_s = time.monotonic() + _SEEN_AFTER_S
        while self._newest <= generation and time.monotonic() < end_s:
            time.sleep(_LOOK_AGAIN_S)
        if self._newest <= generation:
            _begin(self._store, generation + 1)

    def _check_overtaken(self) -> None:
        if self._newest > self.member.generation:
            raise GenerationOverError(f"generation {self.member.generation} is over")

    def _report_broken(self, entry: Any, after_s: float) -> None:
        """A connection has broken, and nobody has begun a generation since."""
        self.member.report_broken(self.member.generation, "", after_s)

    def _fail(self, reason: str) -> None:
        """The lost member cannot be replaced: whoever waits for that gets EndedError."""
        self.member.give_up_protection(reason)
        self._journal.end()
        self._exchange.end_before(_ALWAYS + 1)

    def _passing_all(self, boundary: int) -> list[str]:
        return [_passing(boundary, rank) for rank in range(self.member.world_size)]


class _NoLog:
    """Results are for replays, of which there are none."""

    def append_log(self, entry: bytes) -> bool:
        """Keep nothing."""
        return True


def _packed(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _check(packed: bytes) -> None:
    try:
        _unpacked(packed)
    except Exception as error:
        cure = "give tensors, numbers and strings, in lists and dictionaries"
        raise TypeError(f"a process in the place of this one could not read the state ({cure})") from error


def _unpacked(packed: bytes) -> Any:
    """A state; of what another process has written nothing but data is read."""
    return torch.load(io.BytesIO(packed), weights_only=True)


def begin_generation(store: Store) -> None:
    """A member has died, or is about to be replaced: the others stop, and wait for the new one.

    store   as in Groups
    """
    prefixed = PrefixStore("ttprun", store)
    _begin(prefixed, _newest(prefixed, 0) + 1)


def _begin(store: Store, generation: int) -> None:
    store.set(_generation(generation), "")


def _newest(store: Store, generation: int) -> int:
    """The newest generation that has begun."""
    while store.check([_generation(generation + 1)]):
        generation += 1
    return generation


def _generation(number: int) -> str:
    return f"generation {number}"


def _passing(boundary: int, rank: int) -> str:
    return f"rank {rank} at boundary {boundary}"


def _announcing(rank: int) -> str:
    return f"rank {rank} announces"


def _key(generation: int, key: str) -> str:
    return f"{generation}/{key}"
