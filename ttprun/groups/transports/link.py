"""The interface of all transports. Read `Link` first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ttprun.groups.connection import Exchange


@dataclass(frozen=True)
class GroupMember:
    """A member's place in a group, in one generation.

    exchange   by which the members find each other
    key        of the group, the same in all members
    name       of the group, as torch knows it
    rank       of this process in the group, which has `size` members
    ranks      global ranks of the members
    op_limit   the time limit that the script has asked for
    options    of the backend, as the script has given them (`pg_options`); None: torch's own
    device     that a barrier uses, of the script's `device_id` or its parameters; None: unknown
    is_given   it is the script's `device_id`
    connects_now   make a communicator on this device at once, if all members do: otherwise within the first collective
    """

    exchange: Exchange
    generation: int
    key: str
    name: str
    rank: int
    size: int
    ranks: Sequence[int]
    op_limit: timedelta
    options: Any = None
    device: Any = None
    is_given: bool = False
    connects_now: bool = False


class Link(Protocol):
    """A group's connection in one generation.

    backend   torch's backend, or a process group in Python
    is_late   see `Transport`
    why_not   why its operations cannot be repaired; "" if they can
    is_aborted    its operations have failed, whatever the backend says
    needs_stop    the backend's abort ends no running operation: only a stop of the device does
    is_used   an operation was issued that made the members connect, or they connect from the start
    """

    generation: int
    backend: Any
    is_late: bool
    why_not: str
    is_aborted: bool
    needs_stop: bool

    def is_busy(self) -> bool:
        """Whether an operation is still running."""

    @property
    def is_used(self) -> bool: ...

    def issue(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation; returns its work. Raises the backend's error.

        The work is completed when its outputs are there or it has failed, never before. `wait(limit)` blocks until
        then, and raises the operation's error, or RuntimeError after `limit`; `is_completed` and `is_success` do not
        block. `get_future` completes when the work does.
        """

    def issue_plainly(self, op: str, args: tuple[Any, ...]) -> Any:
        """Issue an operation as torch does; returns what the backend returns."""

    def abort(self) -> None:
        """Pending and later operations fail at once."""

    def close(self) -> None:
        """Drop the backend; may block until its operations have ended."""

    def abandon(self) -> None:
        """Leak the backend, as an operation on it does not end."""

    def drop(self) -> None:
        """Forget the backend, whose operations have all ended; does not block."""

    def is_ready(self, args: tuple[Any, ...]) -> bool:
        """Whether a collective with these arguments can be issued without waiting for the other members."""

    def make_ready(self, args: tuple[Any, ...]) -> None:
        """Wait until it can. Raises GenerationOverError or TimeoutError."""


@dataclass(frozen=True)
class Transport:
    """One backend.

    device_types  of the tensors whose operations are repaired
    make          connect in a generation, first or again: blocks until all members have, at most CONNECT_LIMIT; raises
                  GenerationOverError if the generation ends first, TimeoutError, RuntimeError
    is_late       the backend's own `wait` returns before an operation has completed on its device
    gives_works   whether the backend returns a work for a synchronous operation; else None
    """

    name: str
    device_types: frozenset[str]
    make: Callable[[GroupMember], Link]
    is_late: bool = False
    gives_works: Callable[[], bool] = lambda: True
