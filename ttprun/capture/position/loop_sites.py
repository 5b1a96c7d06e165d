"""The loops of the user's code: where each stands, and whether a step is taken inside."""

from __future__ import annotations

from typing import NamedTuple


class Extent(NamedTuple):
    """Where a `for` or `while` statement stands in its file; lines begin at 1, columns (in bytes) at 0.

    start              of the statement
    over               of EXPR, or the condition
    body, body_end     of its body, without `else`
    """

    start: tuple[int, int]
    over: tuple[int, int]
    body: tuple[int, int]
    body_end: tuple[int, int]
    is_while: bool = False

    def is_around(self, line: int, column: int | None, is_next: bool) -> bool:
        """Whether an instruction that comes from there is executed within the loop.

        column    None: unknown
        is_next   the instruction takes the next item of a loop
        """
        if column is None:
            return self.body[0] <= line <= self.body_end[0] or (is_next and line == self.over[0])
        return self.body <= (line, column) < self.body_end or (is_next and (line, column) == self.over)


class Site:
    """One `for` or `while` statement of the user's code.

    key          file:line:column, the same in every rank
    has_steps    an optimizer step has been seen inside
    is_outer     ... and inside of another loop that is inside of this one
    begun        how often a followed loop of it has begun
    """

    __slots__ = ("began", "begun", "has_steps", "is_outer", "key", "place")

    def __init__(self, key: str, place: Extent) -> None:
        self.key = key
        self.place = place
        self.began = 0
        self.begun = 0
        self.has_steps = False
        self.is_outer = False

    @property
    def filename(self) -> str:
        """The file of the loop."""
        return self.key.rsplit(":", 2)[0]

    def note_step(self) -> None:
        """An optimizer step has been seen inside."""
        if not self.has_steps:
            self.has_steps = True
            keys_with_steps.append(self.key)


sites: dict[str, Site] = {}  # by their keys
keys_with_steps: list[str] = []  # of the sites that have any


def new_site(filename: str, place: Extent) -> str:
    """Register a loop; returns the key that the compiled code calls it by."""
    key = "{}:{}:{}".format(filename, *place.start)
    sites[key] = Site(key, place)
    return key
