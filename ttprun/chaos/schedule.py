"""The strikes of a fault's schedule. Pure: the same order, world and step give the same strikes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ttprun.chaos.faults import AGENT_KINDS, DRAWN_PHASES, Fault, check_phase, seconds_of, steps_of

if TYPE_CHECKING:
    pass


DRAWN_STEPS = 20  # a drawn step is at most so many steps after the one before


@dataclass(frozen=True)
class PlannedStrike:
    """One fault of a schedule.

    number   from 0
    fault    with nothing left to draw and no waiting time
    after_s  seconds from the order; None: at once, or after the previous strike
    """

    number: int
    fault: Fault
    after_s: float | None


def strikes(order: Fault, world_size: int, running_step: int) -> Iterator[PlannedStrike]:
    """All strikes of an order, without end if it has a period and no count.

    order         accepted by `check_fault`
    world_size    ranks to draw from
    running_step  the optimizer step at the time of the order, from which periods and drawn steps count
    """
    drawn = random.Random(order.seed)
    every_s, every_steps = seconds_of(order.every), steps_of(order.every)
    is_timed = order.after is not None or every_s is not None
    is_step_drawn = order.seed is not None and order.step is None and not is_timed and every_steps is None
    count = order.count if order.count is not None or order.every is not None else 1
    step = order.step
    number = 0
    while count is None or number < count:
        if every_steps is not None:
            first = order.step if order.step is not None else running_step + every_steps
            step = first + number * every_steps
        elif is_step_drawn:
            step = (running_step if step is None else step) + drawn.randint(1, DRAWN_STEPS)
        kind = drawn.choice(order.kinds) if len(order.kinds) > 1 else order.kinds[0]
        rank = order.rank
        if rank is None and order.seed is not None:
            rank = drawn.randrange(world_size)
        phase = order.phase
        if phase is None and order.seed is not None and kind not in AGENT_KINDS:
            phase = drawn.choice([candidate for candidate in DRAWN_PHASES if _fits(kind, candidate)])
        seed = None if order.seed is None else order.seed + number
        yield PlannedStrike(number, order.plain(kind, rank, step, phase, seed), _after_s(order, every_s, number))
        number += 1


def _after_s(order: Fault, every_s: float | None, number: int) -> float | None:
    if every_s is None:
        return order.after if number == 0 else None
    first = order.after if order.after is not None else every_s
    return first + number * every_s


def _fits(kind: str, phase: str) -> bool:
    try:
        check_phase(kind, phase)
    except ValueError:
        return False
    return True
