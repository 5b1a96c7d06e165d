"""Which rank hangs: observations of the ranks in, verdicts out. No clock, no input or output.

Ranks wait for each other in collectives and before their optimizer steps. So when nothing moves, the suspect is the
rank that is missing there: the one with the least progress (`Observation.place`), and of equals, which have met in
groups of some of the ranks, the one that waits for nobody. How long it may be missing depends on
what it does (`Way`). One that is shown to be stuck (its process is stopped, or it waits elsewhere than the others) gets
`hang_limit_s`. One in a call of its own (an upload, a lock, a child process) is only named then: it gets `own_limit_s`,
and one that works `busy_limit_s`. A stopped process is a suspect even if no rank waits for it yet.

If all ranks are in a collective and nothing moves, the connection is the suspect (`Stalled`), or the script, if they
are in different ones.

Read `HangWatch.look` first, then `hang_observations.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from ttprun.recovery.hang_observations import (
    IN_COLLECTIVE,
    LEAST_LIMIT_S,
    PAUSE_LIMIT_S,
    SETUP_LIMIT_S,
    Doing,
    HangLimits,
    Observation,
    Track,
)

FORGOTTEN_PULSE_S = 3.0  # the pulse comes every second
LOOK_AWAY_S = 2.0  # a longer time between two looks means that the agent itself was blocked
STRAGGLER_TIMES = 5.0
STRAGGLER_LEAST_S = 2.0


class Way(StrEnum):
    """Why a rank makes no progress. One in COLLECTIVE may still compute: DDP waits for its all-reduces later.

    One that is WAITING does not, though its main thread answers heartbeats: it runs our waiting loop.
    """

    STOPPED = "its process was stopped by a signal"
    HELD = "one of its threads holds the GIL and makes no progress"
    IDLE = "its main thread is in a call that does not return"
    ASTRAY = "it waits elsewhere than the others"
    BUSY = "it works, but does not arrive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A rank makes no progress, and the others wait for it.

    for_s       since its last progress
    limit_s     how long it may
    awaited     a rank that waits for it; None if none does yet
    is_due      False: the limit is not over, and the rank is only named
    is_overdue  the process group's own time limit is over
    """

    observation: Observation
    way: Way
    for_s: float
    limit_s: float
    awaited: Observation | None
    is_due: bool = True
    is_overdue: bool = False

    @property
    def reason(self) -> str:
        """For an operator."""
        state = f"{self.way}; it is {self.observation.where}, and has made no progress for {self.for_s:.1f} s"
        if self.awaited is None:
            return state
        has_skipped = self.observation.is_waiting and self.observation.meetings < self.awaited.meetings
        how = ", which it has skipped" if has_skipped else ""
        return f"{state}, while rank {self.awaited.rank} waits {self.awaited.where}{how}"

    def late(self, where: str, is_again: bool, is_replaceable: bool) -> str:
        """The line about a rank for which all wait, because nothing shows that it is stuck.

        where           the innermost line of the script, or else its phase
        is_again        the process before it came to the same call
        is_replaceable  it will be replaced when its limit is over
        """
        other = f"rank {self.awaited.rank} waits" if self.awaited is not None else "the others wait"
        late = f"rank {self.observation.rank} has not come for {self.for_s:.0f} s, and {other} for it: it is in {where}"
        if is_again:
            return (
                f"{late}. The process before it stood there too, so this call is slow, or hangs for good: all wait "
                "until the time limit of their process group, as under torchrun"
            )
        if not is_replaceable:
            return f"{late}. It cannot be replaced, so all wait for it, as under torchrun"
        return f"{late}. After {self.limit_s:.0f} s it is replaced (--hang-timeout-s SECONDS sets that limit)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    """All ranks are in a collective, and nothing moves.

    apart   one rank for each collective, if they are in different ones: rank -> its name; else empty
    """

    boundary: int
    where: str
    for_s: float
    apart: Mapping[int, str]

    def described(self, frames: Mapping[int, str]) -> str:
        """For an operator.

        frames   rank -> the line of the script at which it stands, "" if unknown
        """
        if not self.apart:
            return f"all ranks are {self.where}, and none has made progress for {self.for_s:.1f} s"
        places = [(rank, name, frames.get(rank)) for rank, name in self.apart.items()]
        each = ", rank ".join(f"{rank} in {name}" + (f" ({at})" if at else "") for rank, name, at in places)
        is_in = each.replace(" in ", " is in ", 1)
        return f"rank {is_in}, after step {self.boundary}: they have waited for each other for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank delays the others for much longer than a step takes."""

    observation: Observation
    took_s: float
    usual_s: float

    @property
    def reason(self) -> str:
        """For an operator."""
        took = f"{self.took_s:.1f} s so far, {self.took_s / self.usual_s:.0f} times as long as usual"
        of = self.observation
        return f"rank {of.rank} holds up step {of.boundary}: {took}; it is {of.where}"


HangVerdict = Hung | Stalled | Straggler


class HangWatch:
    """Watches the ranks of one group.

    hang_s   the user's limit; None: learnt
    """

    def __init__(self, hang_s: float | None) -> None:
        self.limits = HangLimits(hang_s)
        self._tracks: dict[int, Track] = {}
        self._looked_at_s: float | None = None
        self._boundary = 0
        self._stepped_at_s: float | None = None
        self._is_slow = False
        self._stood_s = 0.0

    def look(
        self, at_s: float, observations: Sequence[Observation], is_alone: bool = False, has_left: bool = False
    ) -> tuple[HangVerdict, ...]:
        """Judge the ranks while all train.

        observations    of the ranks that live and have not finished, in any order
        is_alone  it is one rank, for which no other will ever wait
        has_left  a rank that has finished is not among them, and others may wait for it
        returns   ranks that hang, or a stalled connection, else stragglers; the agent acts on each at once
        """
        self.note(at_s, observations)
        self._learn(at_s, observations)
        hung = self.stopped(at_s) or (self._at_rest(at_s) if is_alone else self._absent(at_s))
        if hung:
            return hung
        return self._stalled(at_s, has_left) or self._stragglers(at_s)

    def look_at_repair(
        self,
        at_s: float,
        observations: Sequence[Observation],
        replaying: Sequence[int] = (),
        stepping: Sequence[int] = (),
    ) -> tuple[HangVerdict, ...]:
        """Judge the ranks during a recovery, without their places; deadlines find the rest.

        replaying   ranks that wait for no other now
        stepping    replacements that run the step which they take over: the others wait for them
        """
        self.note(at_s, observations)
        self._stepped_at_s = None
        setup_limit_s = self.limits.hang_s if self.limits.hang_s is not None else SETUP_LIMIT_S
        idle = tuple(
            self._hung(at_s, track, Way.IDLE, setup_limit_s)
            for rank, track in self._tracks.items()
            if rank in replaying and self._way(at_s, track) is Way.IDLE and at_s - track.worked_at_s > setup_limit_s
        )
        dead = (
            track
            for rank, track in self._tracks.items()
            if track.observation.pulse_at_s
            and rank not in stepping
            and not track.observation.is_stopped
            and self.is_silent(track.observation, at_s)
            and at_s - track.worked_at_s > self.limits.stop_limit_s
        )
        held = tuple(self._hung(at_s, track, Way.HELD, self.limits.stop_limit_s) for track in dead)
        taking_over = (track for rank, track in self._tracks.items() if rank in stepping)
        return (
            self.stopped(at_s) + held + idle + tuple(filter(None, (self._hung_in_step(at_s, t) for t in taking_over)))
        )

    def _hung_in_step(self, at_s: float, track: Track) -> Hung | None:
        """A replacement that does not arrive where the others wait for it, by the clock of any other step."""
        way, idle_s = self._way(at_s, track), at_s - track.worked_at_s
        is_late = way in (Way.IDLE, Way.HELD) and idle_s > self.limits.hang_limit_s(track.observation)
        if not is_late or track.observation.is_waiting:
            return None
        self._stood_s = max(self._stood_s, idle_s)
        return self._hung(at_s, track, way, self.limits.own_limit_s(track.observation), idle_s=idle_s)

    def begin_anew(self, at_s: float) -> None:
        """A recovery has ended: restart all measurements, and remember how long a replacement stood in its step."""
        self.limits.learn(self._stood_s, times=0)
        self._stood_s = 0.0
        for track in self._tracks.values():
            track.progressed_at_s = track.worked_at_s = at_s
        self._stepped_at_s = None

    def is_busy(self, at_s: float, rank: int) -> bool:
        """Whether a rank works, as far as it was seen; one that has not spoken yet is only busy if it computes."""
        track = self._tracks.get(rank)
        if track is None or self._way(at_s, track) is not Way.BUSY:
            return False
        return bool(track.observation.pulse_at_s) or track.is_computing(at_s)

    def is_in_own_call(self, at_s: float, rank: int) -> bool:
        """Whether a rank is in a call that may return, as far as it was seen."""
        track = self._tracks.get(rank)
        return track is not None and self._way(at_s, track) is Way.IDLE and not track.observation.is_waiting

    @staticmethod
    def is_silent(observation: Observation, at_s: float) -> bool:
        """Whether no thread of the process has got the GIL for a while."""
        return at_s - observation.pulse_at_s > FORGOTTEN_PULSE_S

    def stopped(self, at_s: float) -> tuple[Hung, ...]:
        """Processes that have been stopped for too long."""
        limit_s = self.limits.stop_limit_s
        return tuple(
            Hung(
                observation=track.observation,
                way=Way.STOPPED,
                for_s=stopped_s,
                limit_s=limit_s,
                awaited=self._ahead_of(track),
            )
            for track in self._tracks.values()
            if track.stopped_at_s is not None and (stopped_s := at_s - track.stopped_at_s) > limit_s
        )

    def laggards(self) -> tuple[Observation, ...]:
        """The ranks with the least progress, without finished ones; () if all have the same."""
        return tuple(track.observation for track in self._laggards(also_equal=False))

    def why_absent(self, at_s: float, rank: int) -> Hung:
        """A laggard that has become a fault before its limit: the script's own time-out has passed."""
        track = self._tracks[rank]
        for_s = at_s - track.progressed_at_s
        hung = self._hung(at_s, track, self._way(at_s, track), for_s, self._ahead_of(track))
        return replace(hung, is_overdue=True)

    def note(self, at_s: float, observations: Sequence[Observation]) -> None:
        """See how the ranks are, and judge none."""
        if self._looked_at_s is not None and at_s - self._looked_at_s > LOOK_AWAY_S:
            away_s = at_s - self._looked_at_s
            for track in self._tracks.values():
                track.shift(away_s)
            self._stepped_at_s = None
        self._looked_at_s = at_s
        tracks = self._tracks
        self._tracks = {}
        for observation in observations:
            before = tracks.get(observation.rank)
            is_same = before is not None and before.observation.pid == observation.pid
            track = before if before is not None and is_same else Track(observation, at_s, at_s)
            track.note(at_s, observation)
            self._tracks[observation.rank] = track

    def _learn(self, at_s: float, observations: Sequence[Observation]) -> None:
        boundary = max((observation.boundary for observation in observations), default=0)
        steps = boundary - self._boundary
        if self._stepped_at_s is not None and steps <= 0:
            return
        if self._stepped_at_s is not None and self._boundary > 0:
            took_s = (at_s - self._stepped_at_s) / steps
            usual_s = self.limits.usual_s
            self._is_slow = self._is_slow and usual_s is not None and took_s > STRAGGLER_TIMES * usual_s
            self.limits.learn(took_s, min(steps, 5))
        self._boundary = boundary
        self._stepped_at_s = at_s

    def _laggards(self, also_equal: bool = True) -> tuple[Track, ...]:
        # The place of a process whose hooks have not reported is unknown.
        placed = [track for track in self._tracks.values() if track.observation.pulse_at_s]
        farthest = max((track.observation.place for track in placed), default=None)
        working = [track for track in placed if track.observation.doing is not Doing.FINISHED]
        least = min((track.observation.place for track in working), default=None)
        lagging = [track for track in working if track.observation.place == least]
        # In a group of some of the ranks one may wait for another: then the one that does not wait is the suspect.
        at_work = [track for track in lagging if not track.observation.is_waiting]
        if least == farthest:  # in a pipeline all may be: no collective of the whole world tells them apart
            return tuple(at_work) if also_equal and len(at_work) < len(lagging) else ()
        return tuple(at_work or lagging)

    def _ahead_of(self, laggard: Track) -> Observation | None:
        """The rank that has waited longest for it."""
        ahead = [
            track
            for track in self._tracks.values()
            if track.observation.is_waiting
            and (
                track.observation.place > laggard.observation.place
                or (track.observation.place == laggard.observation.place and not laggard.observation.is_waiting)
            )
            and not track.observation.is_stopped
        ]
        return min(ahead, key=lambda track: track.progressed_at_s).observation if ahead else None

    def _way(self, at_s: float, track: Track) -> Way:
        if track.observation.is_stopped:
            return Way.STOPPED
        if track.observation.doing in (Doing.COMMITTING, Doing.CONNECTING):
            return Way.ASTRAY
        if at_s - track.worked_at_s < FORGOTTEN_PULSE_S:
            return Way.BUSY
        return Way.HELD if self.is_silent(track.observation, at_s) else Way.IDLE

    def _absent(self, at_s: float) -> tuple[Hung, ...]:
        hung = []
        for track in self._laggards():
            awaited = self._ahead_of(track)
            # A rank that skips a collective before the first step may be one that does not step with the others.
            if awaited is None or (track.observation.is_waiting and track.observation.boundary == 0):
                continue
            awaited_s = at_s - self._tracks[awaited.rank].progressed_at_s
            way = self._way(at_s, track)
            busy_s = min(awaited_s, at_s - track.progressed_at_s)
            idle_s = busy_s if way is Way.ASTRAY else min(awaited_s, at_s - track.worked_at_s)
            limit_s = own_s = self.limits.hang_limit_s(track.observation, awaited)
            if track.observation.doing is Doing.WAITING:  # for data in transfer: a slow network is not a fault
                limit_s = own_s = max(limit_s, self.limits.stall_limit_s(track.observation.boundary))
            elif way is not Way.ASTRAY:
                own_s = max(limit_s, self.limits.own_limit_s(track.observation))
            if way is Way.BUSY:
                idle_s, own_s = busy_s, max(own_s, self.limits.busy_limit_s)
                limit_s = min(own_s, max(limit_s, LEAST_LIMIT_S))  # it computes, and is named all the same
            if idle_s > limit_s:
                hung.append(self._hung(at_s, track, way, own_s, awaited, idle_s))
        return tuple(hung)

    def _at_rest(self, at_s: float) -> tuple[Hung, ...]:
        """A rank for which no other waits, and which has been idle for long; one that works is left alone.

        Without a limit of the user it is a long one, as a late finding costs the other ranks nothing.
        """
        hung = []
        for track in self._tracks.values():
            way = self._way(at_s, track)
            limit_s = self.limits.own_limit_s(track.observation)
            if way is Way.BUSY and self.limits.hang_s is not None and at_s - track.progressed_at_s > 10 * limit_s:
                hung.append(self._hung(at_s, track, way, 10 * limit_s))
            elif way is not Way.BUSY and track.observation.pulse_at_s and at_s - track.worked_at_s > limit_s:
                hung.append(self._hung(at_s, track, way, limit_s))
        return tuple(hung)

    def _hung(
        self,
        at_s: float,
        track: Track,
        way: Way,
        limit_s: float,
        awaited: Observation | None = None,
        idle_s: float | None = None,
    ) -> Hung:
        for_s = at_s - track.progressed_at_s
        is_due = idle_s is None or idle_s > limit_s
        return Hung(
            observation=track.observation, way=way, for_s=for_s, limit_s=limit_s, awaited=awaited, is_due=is_due
        )

    def _stalled(self, at_s: float, has_left: bool) -> tuple[Stalled, ...]:
        tracks = tuple(self._tracks.values())
        is_together = len({track.observation.place for track in tracks}) == 1
        if (
            len(tracks) < (1 if has_left else 2)
            or not is_together
            or not all(track.observation.doing in IN_COLLECTIVE for track in tracks)
        ):
            return ()
        for_s = min(at_s - track.progressed_at_s for track in tracks)
        first = tracks[0].observation
        works = any(at_s - track.worked_at_s < FORGOTTEN_PULSE_S for track in tracks)
        limit_s = self.limits.stall_limit_s(first.boundary)
        if has_left and self.limits.hang_s is None:  # the others may need it no more, and only be slow
            limit_s = max(limit_s, PAUSE_LIMIT_S)
        if works or for_s <= limit_s:
            return ()
        ranks: dict[str, list[int]] = {}
        for track in tracks:
            ranks.setdefault(track.observation.operation, []).append(track.observation.rank)
        rarest_first = sorted(ranks.items(), key=lambda item: (len(item[1]), -item[1][0]))
        apart = {those[0]: name for name, those in rarest_first} if len(ranks) > 1 else {}
        return (Stalled(boundary=first.boundary, where=first.where, for_s=for_s, apart=apart),)

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
        return tuple(Straggler(observation=track.observation, took_s=took_s, usual_s=usual_s) for track in laggards)
