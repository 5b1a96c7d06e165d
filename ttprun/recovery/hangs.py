"""Who hangs: observations of the ranks in, verdicts out. No clock, no input or output.

Ranks wait for each other in collectives and in front of their optimizer steps. So when nothing moves, the guilty one is
not who waits, but who has not come: the rank that is least far (`Sight.place`). How long it may stay away depends on
what it does meanwhile (`Way`): a process that is stopped, or whose main thread neither runs bytecode nor uses the
processor, gets `hang_limit_s`; one that works gets `busy_limit_s`, since validation, a checkpoint or a long computation
on one rank looks just like that. A process that is stopped is guilty even if nobody waits for it yet.

If all ranks stand in the same collective and nothing moves, no rank is guilty, but the connection (`Stalled`).

Read `Watch.look` first, then `Limits`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

LEAST_LIMIT_S = 10.0  # learnt limits are never shorter
LEAST_STALL_S = 30.0
SETUP_LIMIT_S = 600.0  # before the first step nothing is known of the script
PAUSE_LIMIT_S = 120.0  # while a rank saves, or the others wait in a barrier: steps do not advance, and are no measure
BUSY_LIMIT_S = 600.0
FORGOTTEN_PULSE_S = 3.0  # the pulse comes every second
WORK_WINDOW_S = 1.0
WORK_SHARE = 0.05  # of one processor: less is no work, but what threads need that wait
LOOK_AWAY_S = 2.0  # longer between two looks, and the agent was itself held up
STRAGGLER_TIMES = 5.0
STRAGGLER_LEAST_S = 2.0


class Doing(StrEnum):
    """What a rank's main thread does, as far as its hooks can tell."""

    STARTING = "starting"
    SETUP = "setup"
    COMPUTING = "computing"
    COLLECTIVE = "collective"
    WAITING = "waiting"
    CONNECTING = "connecting"
    COMMITTING = "committing"
    STEPPING = "stepping"
    REPLAYING = "replaying"
    REPAIRING = "repairing"
    SAVING = "saving"
    FINISHED = "finished"


IN_COLLECTIVE = (Doing.COLLECTIVE, Doing.WAITING)
WAITING = (*IN_COLLECTIVE, Doing.CONNECTING, Doing.COMMITTING, Doing.FINISHED)


class Way(StrEnum):
    """How a rank does not get on. One in COLLECTIVE may still compute: DDP waits for its all-reduces later.

    One that is WAITING does not, though its main thread answers heartbeats: it runs the loop in which it waits.
    """

    STOPPED = "its process has been stopped by a signal"
    HELD = "a thread of it holds the GIL and does not get on"
    IDLE = "its main thread stands in a call that does not return"
    ASTRAY = "it waits at another place than the others"
    BUSY = "it works, but does not come"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A rank as the agent sees it at one moment.

    boundary      optimizer steps that it has completed
    meetings      collectives of the whole world that it has come to since
    operation     name of the newest collective
    seen_at_s     when its hooks last noted anything
    pulse_at_s    when its heartbeat's thread last got the GIL; 0 if it has never beaten
    beats         heartbeats that its main thread has answered
    cpu_s         processor time of the process so far
    is_stopped    by a signal, and not by a debugger
    is_in_io      its main thread waits for a disk or a file system
    """

    rank: int
    pid: int
    boundary: int
    meetings: int
    doing: Doing
    operation: str = ""
    seen_at_s: float = 0.0
    pulse_at_s: float = 0.0
    beats: int = 0
    cpu_s: float = 0.0
    is_stopped: bool = False
    is_in_io: bool = False

    @property
    def place(self) -> tuple[int, int, bool, bool]:
        """How far it is; a rank that others wait for has a lower place than they."""
        return self.boundary, self.meetings, self.doing is Doing.COMMITTING, self.doing is Doing.FINISHED

    @property
    def is_waiting(self) -> bool:
        """It can only get on when others do."""
        return self.doing in WAITING

    @property
    def where(self) -> str:
        """Its place in words: "in allreduce, number 3 of step 12"."""
        if self.doing is Doing.CONNECTING:
            return f"for its process group to be connected, in step {self.boundary}"
        if self.doing is Doing.COMMITTING:
            return f"in front of its optimizer step {self.boundary}"
        if self.doing in IN_COLLECTIVE:
            return f"in {self.operation}, number {self.meetings} of step {self.boundary}"
        return f"{self.doing}, in step {self.boundary}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A rank does not get on, and is known to be what the others wait for.

    for_s     since it last got on
    awaited   a rank that waits for it; None if nobody does yet
    """

    sight: Sight
    way: Way
    for_s: float
    limit_s: float
    awaited: Sight | None

    @property
    def reason(self) -> str:
        """For an operator."""
        told = f"{self.way}; it is {self.sight.where}, and has not got on for {self.for_s:.1f} s"
        if self.awaited is None:
            return told
        left_out = self.sight.is_waiting and self.sight.meetings < self.awaited.meetings
        how = ", which it has left out" if left_out else ""
        return f"{told}, while rank {self.awaited.rank} waits {self.awaited.where}{how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """All ranks stand in the same collective, and nothing moves."""

    boundary: int
    where: str
    for_s: float

    @property
    def reason(self) -> str:
        """For an operator."""
        return f"all ranks stand {self.where}, and nothing has moved for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank holds up the others for much longer than a step takes; it may yet come."""

    sight: Sight
    took_s: float
    usual_s: float

    @property
    def reason(self) -> str:
        """For an operator."""
        took = f"{self.took_s:.1f} s so far, {self.took_s / self.usual_s:.0f} times as long as usual"
        return f"rank {self.sight.rank} holds up step {self.sight.boundary}: {took}; it is {self.sight.where}"


Verdict = Hung | Stalled | Straggler


@dataclass(slots=True)
class Track:
    """What is remembered of one process.

    progressed_at_s   when it last got on
    worked_at_s       when it last showed that it works: it got on, ran bytecode, or used the processor
    stopped_at_s      when it was first seen stopped, None if it is not
    """

    sight: Sight
    progressed_at_s: float
    worked_at_s: float
    stopped_at_s: float | None = None
    cpu: deque[tuple[float, float]] = field(default_factory=deque)

    def note(self, at_s: float, sight: Sight) -> None:
        """Compare with what was seen last."""
        before = self.sight
        self.sight = sight
        if (before.place, before.doing, before.seen_at_s) != (sight.place, sight.doing, sight.seen_at_s):
            self.progressed_at_s = at_s
        self.cpu.append((at_s, sight.cpu_s))
        while len(self.cpu) > 2 and self.cpu[1][0] <= at_s - WORK_WINDOW_S:
            self.cpu.popleft()
        since_s, used_s = self.cpu[0]
        is_working = used_s < sight.cpu_s - WORK_SHARE * max(at_s - since_s, WORK_WINDOW_S)
        if (
            is_working
            or sight.is_in_io
            or (before.beats != sight.beats and sight.doing is not Doing.WAITING)
            or self.progressed_at_s == at_s
            or not sight.pulse_at_s
        ):
            self.worked_at_s = at_s
        if not sight.is_stopped:
            self.stopped_at_s = None
        elif self.stopped_at_s is None:
            self.stopped_at_s = at_s

    def shift(self, by_s: float) -> None:
        """Time in which nobody looked does not count."""
        self.progressed_at_s += by_s
        self.worked_at_s += by_s
        self.stopped_at_s = None if self.stopped_at_s is None else self.stopped_at_s + by_s
        self.cpu.clear()


@dataclass(slots=True)
class Limits:
    """How long a rank may not get on, in seconds.

    hang_s   what the user has set; None: learnt from the steps so far
    """

    hang_s: float | None
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=200))

    @property
    def slowest_s(self) -> float:
        """The slowest recent step; with validation and checkpoints, if they lie within steps."""
        return max(self.steps_s, default=0.0)

    @property
    def usual_s(self) -> float | None:
        """What a step takes; None while too few are known."""
        return median(self.steps_s) if len(self.steps_s) >= 5 else None

    def hang_limit_s(self, sight: Sight, awaited: Sight | None = None) -> float:
        """For a rank that shows no sign of work.

        awaited   a rank that waits for it
        """
        if self.hang_s is not None:
            return self.hang_s
        if sight.boundary == 0:
            return SETUP_LIMIT_S
        is_pause = sight.doing is Doing.SAVING or (awaited is not None and awaited.operation == "barrier")
        return max(PAUSE_LIMIT_S, self.stop_limit_s) if is_pause else self.stop_limit_s

    @property
    def stop_limit_s(self) -> float:
        """For a process that has been stopped: a script has no reason to do that, whatever it is at."""
        return self.hang_s if self.hang_s is not None else max(LEAST_LIMIT_S, 5 * self.slowest_s)

    @property
    def busy_limit_s(self) -> float:
        """For a rank that works. It must be found some day, for it may be an endless loop."""
        return 10 * self.hang_s if self.hang_s is not None else max(BUSY_LIMIT_S, 10 * self.slowest_s)

    def stall_limit_s(self, boundary: int) -> float:
        """For a collective in which all stand: a slow network is no broken one."""
        if self.hang_s is not None:
            return self.hang_s
        return SETUP_LIMIT_S if boundary == 0 else max(LEAST_STALL_S, 3 * self.stop_limit_s)


class Watch:
    """Watches the ranks of one group.

    hang_s   what the user has set as limit; None: learnt
    """

    def __init__(self, hang_s: float | None) -> None:
        self.limits = Limits(hang_s)
        self._tracks: dict[int, Track] = {}
        self._looked_at_s: float | None = None
        self._boundary = 0
        self._stepped_at_s: float | None = None
        self._is_slow = False

    def look(self, at_s: float, sights: Sequence[Sight]) -> tuple[Verdict, ...]:
        """Judge the ranks while all train.

        sights    of the ranks that live and have not finished, in any order
        returns   ranks that hang, or a stalled connection, else stragglers; the agent acts on each at once
        """
        self._note(at_s, sights)
        self._learn(at_s, sights)
        hung = self.stopped(at_s) or self._absent(at_s)
        if hung:
            return hung
        return self._stalled(at_s) or self._stragglers(at_s)

    def look_at_repair(
        self, at_s: float, sights: Sequence[Sight], replaying: Sequence[int] = ()
    ) -> tuple[Verdict, ...]:
        """Judge the ranks during a recovery, in which their places say nothing; deadlines find whom this does not.

        replaying   ranks that must get on by themselves now: they wait for nobody
        """
        self._note(at_s, sights)
        self._stepped_at_s = None
        setup_limit_s = self.limits.hang_s if self.limits.hang_s is not None else SETUP_LIMIT_S
        idle = tuple(
            self._hung(at_s, track, Way.IDLE, setup_limit_s, None)
            for rank, track in self._tracks.items()
            if rank in replaying and self._way(at_s, track) is Way.IDLE and at_s - track.worked_at_s > setup_limit_s
        )
        dead = (
            track
            for track in self._tracks.values()
            if track.sight.pulse_at_s
            and not track.sight.is_stopped
            and self.is_silent(track.sight, at_s)
            and at_s - track.worked_at_s > self.limits.stop_limit_s
        )
        held = tuple(self._hung(at_s, track, Way.HELD, self.limits.stop_limit_s, None) for track in dead)
        return self.stopped(at_s) + held + idle

    def begin_anew(self, at_s: float) -> None:
        """A recovery has ended: nobody has been waited for yet."""
        for track in self._tracks.values():
            track.progressed_at_s = track.worked_at_s = at_s
        self._stepped_at_s = None

    @staticmethod
    def is_silent(sight: Sight, at_s: float) -> bool:
        """No thread of the process has got the GIL for a while."""
        return at_s - sight.pulse_at_s > FORGOTTEN_PULSE_S

    def stopped(self, at_s: float) -> tuple[Hung, ...]:
        """Processes that have been stopped for too long."""
        limit_s = self.limits.stop_limit_s
        return tuple(
            Hung(sight=track.sight, way=Way.STOPPED, for_s=stopped_s, limit_s=limit_s, awaited=self._ahead_of(track))
            for track in self._tracks.values()
            if track.stopped_at_s is not None and (stopped_s := at_s - track.stopped_at_s) > limit_s
        )

    def laggards(self) -> tuple[Sight, ...]:
        """Ranks that are less far than others; () if all are equally far. One that is done with its group is none."""
        tracks = self._laggards()
        return tuple(track.sight for track in tracks)

    def why_absent(self, at_s: float, rank: int) -> Hung:
        """A laggard whose absence has become a fault before its limit: the script's own time-out has passed."""
        track = self._tracks[rank]
        way = self._way(at_s, track)
        return self._hung(at_s, track, way, at_s - track.progressed_at_s, self._ahead_of(track))

    def _note(self, at_s: float, sights: Sequence[Sight]) -> None:
        if self._looked_at_s is not None and at_s - self._looked_at_s > LOOK_AWAY_S:
            away_s = at_s - self._looked_at_s
            for track in self._tracks.values():
                track.shift(away_s)
            self._stepped_at_s = None
        self._looked_at_s = at_s
        known = self._tracks
        self._tracks = {}
        for sight in sights:
            before = known.get(sight.rank)
            is_same = before is not None and before.sight.pid == sight.pid
            track = before if before is not None and is_same else Track(sight, at_s, at_s)
            track.note(at_s, sight)
            self._tracks[sight.rank] = track

    def _learn(self, at_s: float, sights: Sequence[Sight]) -> None:
        boundary = max((sight.boundary for sight in sights), default=0)
        steps = boundary - self._boundary
        if self._stepped_at_s is not None and steps <= 0:
            return
        if self._stepped_at_s is not None and self._boundary > 0:
            took_s = (at_s - self._stepped_at_s) / steps
            usual_s = self.limits.usual_s
            self._is_slow = self._is_slow and usual_s is not None and took_s > STRAGGLER_TIMES * usual_s
            self.limits.steps_s.extend([took_s] * min(steps, 5))
        self._boundary = boundary
        self._stepped_at_s = at_s

    def _laggards(self) -> tuple[Track, ...]:
        # A process whose hooks have not said anything yet cannot be placed.
        placed = [track for track in self._tracks.values() if track.sight.pulse_at_s]
        farthest = max((track.sight.place for track in placed), default=None)
        working = [track for track in placed if track.sight.doing is not Doing.FINISHED]
        least = min((track.sight.place for track in working), default=None)
        if least == farthest:
            return ()
        lagging = [track for track in working if track.sight.place == least]
        # In a group of a part of the ranks one may wait for the other: who does not wait is then the one to come.
        return tuple(track for track in lagging if not track.sight.is_waiting) or tuple(lagging)

    def _ahead_of(self, laggard: Track) -> Sight | None:
        """Who has waited longest for it."""
        ahead = [
            track
            for track in self._tracks.values()
            if track.sight.place > laggard.sight.place and track.sight.is_waiting and not track.sight.is_stopped
        ]
        return min(ahead, key=lambda track: track.progressed_at_s).sight if ahead else None

    def _way(self, at_s: float, track: Track) -> Way:
        if track.sight.is_stopped:
            return Way.STOPPED
        if track.sight.doing in (Doing.COMMITTING, Doing.CONNECTING):
            return Way.ASTRAY
        if at_s - track.worked_at_s < FORGOTTEN_PULSE_S:
            return Way.BUSY
        return Way.HELD if self.is_silent(track.sight, at_s) else Way.IDLE

    def _absent(self, at_s: float) -> tuple[Hung, ...]:
        found = []
        for track in self._laggards():
            awaited = self._ahead_of(track)
            # One that leaves out a collective before the first step may be one that does not step with the others.
            if awaited is None or (track.sight.is_waiting and track.sight.boundary == 0):
                continue
            awaited_s = at_s - self._tracks[awaited.rank].progressed_at_s
            way = self._way(at_s, track)
            busy_s = min(awaited_s, at_s - track.progressed_at_s)
            idle_s = busy_s if way is Way.ASTRAY else min(awaited_s, at_s - track.worked_at_s)
            limit_s = self.limits.hang_limit_s(track.sight, awaited)
            if track.sight.doing is Doing.WAITING:  # for data that others may still send it: a slow network is no fault
                limit_s = max(limit_s, self.limits.stall_limit_s(track.sight.boundary))
            if way is not Way.BUSY and idle_s > limit_s:
                found.append(self._hung(at_s, track, way, limit_s, awaited))
            elif busy_s > max(self.limits.busy_limit_s, limit_s):
                found.append(self._hung(at_s, track, way, self.limits.busy_limit_s, awaited))
        return tuple(found)

    def _hung(self, at_s: float, track: Track, way: Way, limit_s: float, awaited: Sight | None) -> Hung:
        for_s = at_s - track.progressed_at_s
        return Hung(sight=track.sight, way=way, for_s=for_s, limit_s=limit_s, awaited=awaited)

    def _stalled(self, at_s: float) -> tuple[Stalled, ...]:
        tracks = tuple(self._tracks.values())
        is_together = len({track.sight.place for track in tracks}) == 1
        if len(tracks) < 2 or not is_together or not all(track.sight.doing in IN_COLLECTIVE for track in tracks):
            return ()
        for_s = min(at_s - track.progressed_at_s for track in tracks)
        first = tracks[0].sight
        works = any(at_s - track.worked_at_s < FORGOTTEN_PULSE_S for track in tracks)
        if works or for_s <= self.limits.stall_limit_s(first.boundary):
            return ()
        return (Stalled(boundary=first.boundary, where=first.where, for_s=for_s),)

    def _stragglers(self, at_s: float) -> tuple[Straggler, ...]:
        usual_s = self.limits.usual_s
        if self._is_slow or usual_s is None or self._stepped_at_s is None:
            return ()
        took_s = at_s - self._stepped_at_s
        if took_s < max(STRAGGLER_LEAST_S, STRAGGLER_TIMES * usual_s, self.limits.slowest_s):
            return ()
        laggards = self._laggards()
        if not laggards or 2 * len(laggards) > len(self._tracks) or not all(map(self._ahead_of, laggards)):
            return ()
        self._is_slow = True
        return tuple(Straggler(sight=track.sight, took_s=took_s, usual_s=usual_s) for track in laggards)
