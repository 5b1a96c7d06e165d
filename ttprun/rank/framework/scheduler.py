"""A scheduler that takes part in recovery (MindCluster's taskd), in the process of one rank.

Its callbacks get the agent's reports of faults, and it sends requests; both use the rank's channel. The agent decides
by itself and never waits for a scheduler. Begin with `notify`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

from ttprun.protocol import mindio
from ttprun.rank.framework.codes import RET_ERROR, RET_OK
from ttprun.rank.framework.framework import this_rank

ACTIONS: tuple[str, ...] = get_args(mindio.SchedulerAction)
STRATEGIES: tuple[str, ...] = get_args(mindio.Wish)
STOPS = ("stop", "pause")
SWITCH, NO_SWITCH = "hot switch", "stop switch"

_callbacks: dict[str, Callable[..., Any]] = {}


def register(action: str, function: Callable[..., Any]) -> int:
    """Register a callback; RET_ERROR if there is no such action, or it is not a function.

    action   one of ACTIONS
    """
    if action not in ACTIONS or not callable(function):
        return RET_ERROR
    _callbacks[action] = function
    this_rank()[0].channel.send(mindio.SchedulerRegistered())
    return RET_OK


def call(action: str, arguments: list[Any]) -> None:
    """Pass a report of the agent to its callback, on a thread of its own, since a callback may block.

    action      one of ACTIONS; nothing is done if it has no callback
    arguments   from JSON: keys that are ranks become numbers again
    """
    function = _callbacks.get(action)
    if function is not None:
        with_ranks = [_with_ranks_as_numbers(argument) for argument in arguments]
        threading.Thread(target=function, args=with_ranks, name="ttprun-scheduler", daemon=True).start()


def _with_ranks_as_numbers(argument: Any) -> Any:
    """JSON has turned the keys into str."""
    return {int(rank): value for rank, value in argument.items()} if isinstance(argument, dict) else argument


def prepare(action: str, ranks: Mapping[int, int]) -> int:
    """Request a hot switch of some ranks, or cancel it; RET_ERROR if that is impossible.

    action   SWITCH or NO_SWITCH, which cancels it
    ranks    some, but not all of the job -> kind of fault; not used by NO_SWITCH
    """
    session = this_rank()[0]
    if action == NO_SWITCH:
        return notify(action)
    is_possible = 0 < len(ranks) < session.world_size and all(0 <= rank < session.world_size for rank in ranks)
    return notify(action, ranks=dict(ranks)) if action == SWITCH and is_possible else RET_ERROR


def notify(what: str, ranks: Mapping[int, int] | None = None, timeout_s: float | None = None, params: str = "") -> int:
    """Send a request of the scheduler to the agent; returns RET_OK.

    what                       in MindIO's words, one of `mindio.Asked`
    ranks, timeout_s, params   as in SchedulerAsked
    """
    this_rank()[0].channel.send(mindio.SchedulerAsked(cast(mindio.Asked, what), dict(ranks or {}), timeout_s, params))
    return RET_OK
