"""The node's standbys: a copy of one is taken when a rank is lost, or one itself, which is refilled afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ttprun.agent.processes.preloads import Preloaded, Preloads
from ttprun.agent.processes.rank_processes import Standby, StandbyCopy, kill_session


class Standbys:
    """Up to `wanted` processes that wait to become ranks.

    follow      see Preloads
    may_start   False: the ranks prepare their first step, for which they need the processors themselves
    """

    def __init__(self, wanted: int, run_dir: str, follow: Sequence[str] = ()) -> None:
        self._wanted = wanted
        self._run_dir = run_dir
        self._waiting: list[Standby] = []
        self._warmth: tuple[list[str], list[str]] = ([], [])
        self.may_start = False
        self.preloads = Preloads(follow)

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
            return f"ready, {self.preloads.state}"
        return "being prepared" if self.is_on_its_way else "none could be started; a lost rank gets a new process"

    def take(self) -> Standby | StandbyCopy | None:
        """A process for a lost rank: a copy of a ready standby, which stays; else one itself. None if none is ready."""
        copy = self.copy()
        if copy is not None:
            return copy
        single_use = [standby for standby in self._ready() if not standby.is_copyable]
        if not single_use:
            return None
        self._waiting.remove(single_use[0])
        single_use[0].hurry()
        return single_use[0]

    def copy(self) -> StandbyCopy | None:
        """A copy of a ready standby; None if there is none that can be copied."""
        preloaded = self.preloads.ready
        copy = preloaded.copy() if preloaded is not None else None
        for standby in self._ready() if copy is None else ():
            copy = standby.copy() if standby.is_copyable else None
            if copy is not None:
                break
        return copy

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
        given_up = [*self._waiting, *filter(None, [self.preloads.give_up()])]
        self._waiting = []
        return given_up

    def end(self) -> None:
        """Kill those that were not needed."""
        self.preloads.end()
        for standby in self._waiting:
            standby.end()
        self._waiting.clear()
