"""Requests of other commands to a running job by its control socket, sent with the run's token: one class per request.

`agent/launcher/control_socket.py` answers them.
"""

from __future__ import annotations

from ttprun.protocol.codec import Message


class InjectFault(Message, frozen=True):
    """Cause a fault, as `chaos.injected_faults.parse_fault` reads it."""

    fault: str


class SaveNow(Message, frozen=True):
    """Write a checkpoint."""


class Recall(Message, frozen=True):
    """Let the ranks that are away train again."""


class TakeStacks(Message, frozen=True):
    """Write the Python stacks of this node's ranks to the run's `stacks.json`."""


class MoveRanks(Message, frozen=True):
    """Let new processes take the places of these healthy ranks.

    ends_first   the old ones end before that
    device       that the new one has; "": that of the old one
    """

    ranks: tuple[int, ...]
    ends_first: bool = False
    device: str = ""


class DrainNode(Message, frozen=True):
    """Let a node that waits take the place of this one, the node of this number."""

    node: int


Request = InjectFault | SaveNow | Recall | TakeStacks | MoveRanks | DrainNode


class Accepted(Message, frozen=True):
    """The request is carried out.

    message   what is done, for people
    after     number of the checkpoint (SaveNow), report (TakeStacks) or incident (MoveRanks, DrainNode) before; what
              was requested has a higher one
    ranks     that get new processes
    """

    message: str = ""
    after: int = 0
    ranks: tuple[int, ...] = ()


class Rejected(Message, frozen=True):
    """Nothing is done.

    error   why, in one line
    """

    error: str


Reply = Accepted | Rejected
