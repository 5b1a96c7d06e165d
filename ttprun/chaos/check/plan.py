"""At which moments of a script a check kills a rank, by what its undisturbed run has come to. Pure. Read `plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ttprun.chaos.faults import Fault

Moment = tuple[str, int]  # phase, step
STEPS = 16  # enough for one launch with a kill of each kind
FEWEST_STEPS = 3
# A survivor goes on to the next step until it meets the dead rank there, and never further: so no two kills overlap.
LEAST_GAP = 2
MOST_RANKS = 8
_RARE = 3  # steps with such a moment; what comes more often finds a place anyhow
_LATE = -1
# (phase, whether rank 0 is killed or another one, first step that will do; _LATE: the last that will)
WISHES: tuple[tuple[str, bool, int], ...] = (
    ("setup", False, 0),
    ("forward", True, 0),
    ("backward", False, 1),
    ("collective", True, 2),
    ("before_step", False, 3),
    ("in_step", True, 4),
    ("after_step", False, 5),
    ("backward", True, _LATE),
    ("validation", False, 1),
    ("checkpoint", True, 1),
)
_BETWEEN_STEPS = ("validation", "checkpoint")


def plan(seen: Mapping[int, set[Moment]], steps: int, ranks: Sequence[int]) -> tuple[list[list[Fault]], list[str]]:
    """The kills of each launch, in the order in which they strike, and the phases that no rank has come to.

    seen    rank -> the moments of its undisturbed run
    steps   after which the ranks leave; each kill leaves one step that follows
    ranks   to kill, each at least once, but only the first MOST_RANKS

    Kills share a launch if each is over before the next, so that a difference can be attributed to one kill.
    """
    launches: list[list[Fault]] = []
    first, others = ranks[0], [*ranks[1:MOST_RANKS]] or [ranks[0]]
    places = []
    for phase, is_first, earliest in WISHES:
        choices = [
            (phase, rank, _steps_of(phase, rank, earliest, seen, steps)) for rank in ([first] if is_first else others)
        ]
        place = next((choice for choice in choices if choice[2]), choices[0])
        places.append(place)
        if not is_first and place[2]:
            others.append(others.pop(others.index(place[1])))
    killed = {rank for _, rank, at in places if at}
    places += [("backward", rank, _steps_of("backward", rank, 1, seen, steps)) for rank in others if rank not in killed]
    for phase, rank, at in sorted(places, key=lambda place: min(len(place[2]), _RARE)):  # the rarest first
        kills = [Fault("kill", rank=rank, step=step, phase=phase) for step in at]
        kills = [kill for kill in kills if not any(kill in planned for planned in launches)]
        if kills:
            _put(kills, launches)
    for planned in launches:
        planned.sort(key=lambda fault: fault.step or 0)
    covered = {fault.phase for planned in launches for fault in planned}
    return launches, list(dict.fromkeys(phase for phase, _, _ in WISHES if phase not in covered))


def _steps_of(phase: str, rank: int, earliest: int, seen: Mapping[int, set[Moment]], steps: int) -> list[int]:
    """The steps that would do, the best first."""
    moments = seen.get(rank, set())
    last = steps - 1 if phase in _BETWEEN_STEPS else steps - 2
    return sorted((at for name, at in moments if name == phase and earliest <= at <= last), reverse=earliest == _LATE)


def _put(kills: list[Fault], launches: list[list[Fault]]) -> None:
    """Put the first of these that fits into a launch; if none does, into a new one."""
    for planned in launches:
        for kill in kills:
            if all(abs((kill.step or 0) - (other.step or 0)) >= LEAST_GAP for other in planned):
                planned.append(kill)
                return
    launches.append([kills[0]])
