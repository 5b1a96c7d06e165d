"""The node's standbys: when they are started, what they send, how a lost rank gets one, and their end.

A copy of one is taken when a rank is lost, or one itself, which is refilled afterwards. Begin with `Standbys.take` and
`StandbyWatch.look`.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ttprun.agent.base.loop import unwatch
from ttprun.agent.node.node import Node, Process
from ttprun.agent.node.preloads import HANG_S, Preloaded, Preloads
from ttprun.agent.node.rank_processes import Standby, StandbyCopy, kill_session
from ttprun.errors import counted
from ttprun.observe.status import BEING_PREPARED
from ttprun.protocol.standby_messages import Imported, Ready, Report, WarmUp


class WithContext(Standby):
    """A copy of a standby with a context on the device of one rank, whose place alone it can take.

    began_s   when it was made; HANG_S later it is given up if it has none
    took_s    from then until it had its context
    """

    def __init__(self, copy: StandbyCopy) -> None:
        self.become(copy)
        self.began_s, self.took_s = time.monotonic(), 0.0


class Standbys:
    """Up to `wanted` processes that wait to become ranks.

    follow      see Preloads
    contexts    one more for each local rank has a context on its device
    may_start   False: the ranks prepare their first step, for which they need the processors themselves
    """

    def __init__(self, wanted: int, run_dir: str, follow: Sequence[str] = (), contexts: bool = False) -> None:
        self._wanted = wanted
        self._contexts: dict[int, WithContext] | None = {} if contexts and wanted else None
        self._run_dir = run_dir
        self._waiting: list[Standby] = []
        self._warmth: tuple[list[str], list[str]] = ([], [])
        self.may_start = False
        self._follow = follow
        self.preloads = Preloads(follow)

    def begin_preloads(self, loops: list[str] | None) -> None:
        """All ranks are new: what they import is still to be seen. `loops`: see Preloads."""
        for copy in self._give_up_copies():
            kill_session(copy.process.pid)
        self.preloads = Preloads(self._follow, loops, self.preloads.refusals)

    def warm_up(self, modules: list[str], files: list[str]) -> None:
        """Have the standbys import what the ranks have imported of torch by their first step, and compile the rest.

        files   of the user's modules
        """
        if self._warmth == (modules, files):  # another leader says the same: they are as warm as they can be
            return
        self._warmth = (modules, files)
        for standby in self._waiting:
            standby.warm_up(modules, files)

    def forget_warmth(self) -> None:
        """A standby has ended while it did so: the next ones do without."""
        self._warmth = ([], [])

    @property
    def ready(self) -> int:
        """How many have torch imported by now."""
        return sum(standby.is_ready and standby.is_alive for standby in self._waiting)

    def refill(self, watch: Callable[[Standby], None], environment: Mapping[str, str]) -> None:
        """Start as many as are missing. Raises OSError if one cannot be had.

        watch         called with each new one
        environment   see Standby
        """
        self._waiting = [standby for standby in self._waiting if standby.is_alive]
        while len(self._waiting) < self._wanted:
            standby = Standby(self._run_dir, environment)
            if any(self._warmth):
                standby.warm_up(*self._warmth)
            self._waiting.append(standby)
            watch(standby)

    @property
    def is_on_its_way(self) -> bool:
        """None is ready, but one will be."""
        alive = [standby for standby in self._waiting if standby.is_alive]
        return bool(alive) and not any(standby.is_ready for standby in alive)

    def look(self, watch: Callable[[Preloaded], None]) -> None:
        """Have a copy import what the ranks have imported, once that is known and a standby can be copied."""
        able = (standby for standby in self._waiting if standby.is_ready and standby.is_copyable and standby.is_alive)
        self.preloads.look(next(able, None), watch)

    def look_for_contexts(self, watch: Callable[[int, WithContext], None]) -> None:
        """Have one copy more make its context, once the copies are as they will be; `watch` is called with it."""
        if self._contexts is None or not self.is_complete:
            return
        for local_rank, index in self.preloads.devices.items() - self.preloads.moved.items():
            held = self._contexts.get(local_rank)
            if (
                held is not None
                and not held.is_ready
                and not (held.is_alive and time.monotonic() - held.began_s < HANG_S)
            ):
                del self.preloads.devices[local_rank]  # the next one would end, or take as long, as well
                kill_session(held.process.pid)
                what = "a standby could make no context on the device of local rank %d: a replacement makes its own"
                logger.warning(what, local_rank)
            elif (held is None or not held.is_alive) and (copy := self.copy(index)) is not None:
                held = self._contexts[local_rank] = WithContext(copy)
                watch(local_rank, held)
                return

    def _give_up_copies(self) -> list[Standby]:
        given_up = [*filter(None, [self.preloads.give_up()]), *(self._contexts or {}).values()]
        self._contexts = self._contexts and {}
        return given_up

    def hurry(self) -> None:
        """A lost rank waits for one."""
        for standby in self._waiting:
            standby.hurry()

    @property
    def is_complete(self) -> bool:
        """One is ready, and with all that it will have imported."""
        return self.ready > 0 and (self.preloads.ready is not None or bool(self.preloads.why_not))

    @property
    def is_wanted(self) -> bool:
        """The node is to have one."""
        return self._wanted > 0

    @property
    def state(self) -> str:
        """How the standbys stand, for people; "" if none are wanted."""
        if not self._wanted:
            return ""
        if not self.may_start:
            return "starts after step 1"
        if self.ready:
            made_s = [one.took_s for one in (self._contexts or {}).values() if one.is_ready]
            contexts = f", {counted(len(made_s), 'device context')} (made in {max(made_s):.1f} s)" if made_s else ""
            return f"ready, {self.preloads.state}{contexts}"
        return BEING_PREPARED if self.is_on_its_way else "none could be started; a lost rank gets a new process"

    def take(self, local_rank: int = -1) -> Standby | StandbyCopy | None:
        """A process for a lost rank: a copy of a ready standby, which stays; else one itself. None if none is ready."""
        held = None if self._contexts is None else self._contexts.pop(local_rank, None)
        if held is not None and held.is_ready and held.is_alive and local_rank not in self.preloads.moved:
            held.hurry()
            return held
        if held is not None:
            kill_session(held.process.pid)
        if (copy := self.copy()) is not None:
            return copy
        single_use = [standby for standby in self._ready() if not standby.is_copyable]
        if not single_use:
            return None
        self._waiting.remove(single_use[0])
        single_use[0].hurry()
        return single_use[0]

    def copy(self, device: int | None = None) -> StandbyCopy | None:
        """A copy of a ready standby, see Standby.copy; None if there is none that can be copied."""
        for standby in (*filter(None, [self.preloads.ready]), *self._ready()):
            if standby.is_copyable and (copy := standby.copy(device)) is not None:
                return copy
        return None

    def _ready(self) -> list[Standby]:
        return [standby for standby in self._waiting if standby.is_ready and standby.is_alive]

    def kill_one(self) -> int | None:
        """SIGKILL to a standby, as a fault; returns its pid, None if there is none alive."""
        alive = [standby for standby in self._waiting if standby.is_alive]
        if not alive:
            return None
        kill_session(alive[0].process.pid)
        return alive[0].process.pid

    def give_up(self) -> list[Standby]:
        """Know nothing of any of them from now on; whoever asks for this ends them."""
        given_up = [*self._waiting, *self._give_up_copies()]
        self._waiting = []
        return given_up

    def end(self) -> None:
        """Kill those that were not needed."""
        self.preloads.end()
        for standby in (*self._waiting, *(self._contexts or {}).values()):
            standby.end()
        self._waiting.clear()


PART = "standbys"
LATE_S = 30.0  # from their start; on a quiet machine they are ready long before
STEPLESS_S = 60.0  # from a rank's import of torch; most first steps are done by then

logger = logging.getLogger("ttprun")


class StandbyWatch:
    """Watches a node's standbys, by its selector."""

    def __init__(self, node: Node, standbys: Standbys) -> None:
        self._node = node
        self._standbys = standbys
        self._protected_at_s = 0.0
        self._is_due = False  # all were ended, for something of them had failed
        self._late_at_s = 0.0  # a line says what there is by then
        self._is_announced = self._is_absence_said = False

    def refill(self) -> None:
        """Start the standbys that are missing; without one a lost rank gets a new process."""
        if self._standbys.may_start:
            self._refill(self._node.here[0].handler.start["env"])

    def _refill(self, environment: Mapping[str, str]) -> None:
        try:
            self._standbys.refill(self._watch, environment)
        except OSError as error:
            self._node.log("standby_failed", reason=str(error))

    def prepare(self) -> None:
        """This node has no ranks yet, but may have some at any moment: a spare."""
        self._standbys.may_start = True
        self._refill({})
        self._standbys.hurry()  # it disturbs nobody here

    def start(self) -> None:
        """The ranks have done their first step, or are not about to: the standbys' imports no longer disturb them.

        Not in an incident, after which the standbys are refilled anyway.
        """
        self._standbys.may_start = True
        if not self._node.is_in_incident:
            self.refill()

    def take(self, slot: Process, message: Report) -> None:
        """A rank reports what standbys can do as well."""
        match message:
            case WarmUp(modules=modules, files=files):
                self._standbys.warm_up(modules, files)
                if self._node.peers.pool is not None:
                    self._node.peers.pool.warm_up(message)
                self.start()
            case Imported():
                started = [other.handler.start for other in self._node.here]
                self._standbys.preloads.note(slot.local_rank, message, started)
            case Ready():
                """It was needed before it was ready."""

    def look(self) -> None:
        """Start the standbys of ranks that take no step for long: by hand, not at all, or after a long set-up."""
        if not self._node.is_in_incident:
            if self._is_due:
                self._is_due = False
                self.refill()
            self._standbys.look(self._watch_preloaded)
            self._standbys.look_for_contexts(self._watch_context)
            self._announce()
        if self._standbys.may_start or not all(slot.is_protected for slot in self._node.here):
            return
        if self._protected_at_s == 0.0:
            self._protected_at_s = time.monotonic()
        elif time.monotonic() - self._protected_at_s > STEPLESS_S:
            self.start()

    def _announce(self) -> None:
        """Say once that a standby is ready, and before it, if that takes long, what a lost rank costs meanwhile."""
        is_wanted = self._standbys.is_wanted and not self._node.is_unprotected
        if self._is_announced or not (self._standbys.may_start and is_wanted):
            return
        now = time.monotonic()
        is_late = 0.0 < self._late_at_s < now
        if self._node.peers.node:  # each node has its own; the first one speaks
            self._is_announced = True
        elif self._standbys.is_complete or (is_late and self._standbys.ready):
            self._is_announced = True
            what = "a lost rank is now replaced in about a second"
            logger.warning("standby ready (%s): %s", self._standbys.state.removeprefix("ready, "), what)
        elif not self._late_at_s:
            self._late_at_s = now + LATE_S
        elif is_late and not self._is_absence_said:
            self._is_absence_said = True
            import_s = max(slot.import_s for slot in self._node.here)
            logger.warning(
                "no standby is ready yet: until one is, a lost rank's new process imports torch first (%.0f s at the "
                "start of this job), and then what the script imports",
                import_s,
            )

    def begin_anew(self) -> None:
        """Something of them has failed: end all, so that the next ones owe nothing to what these have become."""
        self._is_due = True
        for standby in self._standbys.give_up():
            unwatch(self._node.selector, standby.channel.sock)
            kill_session(standby.process.pid)
            self._node.in_background(standby.bury, failed=partial(self._node.domains.note, PART))

    def _listen(self, standby: Standby, came: Callable[[], None], lost: Callable[[], None]) -> None:
        """Read what it sends: call `came` after that, and `lost` when it has hung up."""
        node = self._node
        give_up = partial(unwatch, node.selector, standby.channel.sock)

        def on_message() -> None:
            try:
                standby.read()
            except (EOFError, OSError):
                give_up()
                lost()
                node.in_background(standby.bury, failed=partial(node.domains.note, PART))
            else:
                came()

        # What it has sent would be read again and again.
        on_ready = partial(node.domains.run, PART, on_message, give_up)
        node.selector.register(standby.channel.sock, selectors.EVENT_READ, on_ready)

    def _watch_preloaded(self, preloaded: Preloaded) -> None:
        preloads, began_s = self._standbys.preloads, time.monotonic()

        def came() -> None:
            is_usable = preloads.came(preloaded)
            fields = {"is_usable": is_usable, "refused": preloaded.refused or preloads.refused}
            took_s = time.monotonic() - began_s
            self._node.log("standby_preloaded", pid=preloaded.process.pid, took_s=took_s, **fields)

        self._listen(preloaded, came, partial(preloads.lost, preloaded))

    def _watch_context(self, local_rank: int, standby: WithContext) -> None:
        log = partial(self._node.log, "standby_context", rank=self._node.here[local_rank].rank, pid=standby.process.pid)

        def came() -> None:
            standby.took_s = time.monotonic() - standby.began_s
            log(took_s=standby.took_s)

        self._listen(standby, came, lambda: None)

    def _watch(self, standby: Standby) -> None:
        def lost() -> None:
            self._node.log("standby_lost", pid=standby.process.pid, was_ready=standby.has_started)
            if not standby.is_ready:
                self._standbys.forget_warmth()
            if standby.has_started:  # one that could not start would not start the next time either
                self.refill()

        self._listen(standby, lambda: None, lost)
