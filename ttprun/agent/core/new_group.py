"""What torch's agent says of a group of ranks before it starts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ttprun.agent.processes.rank_processes import RankHandler

ReplaceHandler = Callable[[int, RankHandler], None]


@dataclass(frozen=True)
class NewGroup:
    """Ranks that torch's agent is about to start.

    ranks            (global rank, local rank) of each that is on this node
    replace_handler  called with a local rank and its new process
    on_lead          called by the supervisor's thread when this agent, which was a follower, has begun to lead
    attempt          number of the group's, as torch counts restarts
    restarts_left    how often torch may still restart all ranks
    """

    ranks: list[tuple[int, int]]
    replace_handler: ReplaceHandler
    on_lead: Callable[[], None] = lambda: None
    attempt: int = 0
    restarts_left: int = 0
