"""Groups without a rank: members of torch.distributed's groups of which a lost one is replaced in its first step.

The members meet in a store of the process that starts them. That process calls `begin_generation` when a member has
died, and starts another with its rank: it issues the collectives from the beginning, and the others issue theirs again.
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store

from tests.options import OPTIONS
from ttprun.groups import PATCHES, departure, generations, group_making
from ttprun.groups.agreement import Agreed
from ttprun.groups.connection import GIVEN_UP, Exchange, GenerationOverError, GivenUpError
from ttprun.groups.journal import EndedError, Journal
from ttprun.groups.results import Results
from ttprun.introspect.current_rank import Rank, begin, leave_in_children
from ttprun.introspect.patching import replace
from ttprun.protocol import from_rank
from ttprun.protocol.board import Board
from ttprun.protocol.codec import Message
from ttprun.protocol.from_rank import GroupJournal
from ttprun.protocol.reason import Reason

_ALWAYS = 1 << 30  # a generation that does not end
_LOOK_AGAIN_S = 0.02
_SHORTLY_S = 0.001
_SEEN_AFTER_S = 1.0  # by then whoever starts the members has seen that one is lost
_END_S = 1.0


class _Known(Message, frozen=True):
    """What a member reports to the others once it is frozen: what it has issued; {}: it is new."""

    journal: dict[str, GroupJournal]


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
    limit_s    for which the others are waited for, until a lost one is replaced
    """

    def __init__(self, store: Store, rank: int, size: int, limit_s: float = 600.0) -> None:
        self._limit_s = limit_s
        self._store = PrefixStore("ttprun", store)
        line: Any = _Line(self._store)
        self._exchange = StoreExchange(self._store, line)
        self.member = member = Rank(
            rank=rank,
            local_rank=rank,
            world_size=size,
            run_dir="",
            options=OPTIONS,
            channel=line,
            board=Board.create(size)[1],  # of this process alone
        )
        self._journal = Journal(1 << 40, diagnose=member.diagnose, report_broken=self._report_broken)
        member.parts.update({Journal: self._journal, Results: Results(_NoLog()), Exchange: self._exchange})
        self._orders: queue.Queue[int | None] = queue.Queue()
        self._is_ending = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ttprun-watching", daemon=True)
        self._working = threading.Thread(target=self._work, name="ttprun-recovery", daemon=True)
        group_making.register()
        replace(row for row in PATCHES if row.where != "imported" and row.attribute != "destroy_process_group")
        begin(member)
        leave_in_children()
        atexit.register(self.close)
        self._newest = _newest(self._store, 0)
        self._watching.start()
        if self._newest:
            self._take_place()
        self._working.start()

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
        departure.end(self.member, _END_S)

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
            except RuntimeError:  # a connection has broken again
                self._begin_after(generation)
            except Exception as error:
                self._fail(Reason(text=f"{type(error).__name__}: {error}"))

    def _survive(self, generation: int) -> None:
        """Another member is lost: stop, and issue again all that was issued so far."""
        member = self.member
        member.begin_generation(generation)
        generations.freeze(member)
        generations.break_connections(member, self._check_overtaken)
        self._hold(generation)
        self._agree(generation, generations.known(member))
        generations.issue_again(member, lambda: None)
        with member.changed:
            member.changed.notify_all()
        generations.complete(member, self._check_overtaken)

    def _take_place(self) -> None:
        """This process is new in the place of a lost one: it begins where all have begun."""
        while True:
            generation = self._newest
            self.member.begin_generation(generation)
            try:
                self._hold(generation)
                self._agree(generation, {})
                return
            except GenerationOverError:
                continue

    def _hold(self, generation: int) -> None:
        """Wait until all members are frozen, or new."""
        self._exchange.put(generation, f"held {self.member.rank}", b"")
        keys = [f"held {rank}" for rank in range(self.member.world_size)]
        self._exchange.wait(generation, keys, self._limit_s)

    def _agree(self, generation: int, journal: dict[str, GroupJournal]) -> None:
        """Note what all members know alike of the step."""
        mine = _Known(journal)
        self._exchange.put(generation, f"known to {self.member.rank}", msgspec.msgpack.encode(mine))
        ranks = range(self.member.world_size)
        packed = [self._exchange.get(generation, f"known to {rank}", self._limit_s) for rank in ranks]
        of_all = [msgspec.msgpack.decode(answer, type=_Known) for answer in packed]
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

    def _fail(self, reason: Reason) -> None:
        """The lost member cannot be replaced: whoever waits for that gets EndedError."""
        self.member.give_up_protection(reason)
        self._journal.end()
        self._exchange.end_before(_ALWAYS + 1)


class _NoLog:
    """Results are for replays, of which there are none."""

    def append_log(self, entry: bytes, share: int = 1) -> bool:
        """Keep nothing."""
        return True


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


def _key(generation: int, key: str) -> str:
    return f"{generation}/{key}"
