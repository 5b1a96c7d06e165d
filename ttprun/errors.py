"""The error for what the user can fix; anything else that goes wrong is an event, or a bug of ttprun."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class ConfigError(Exception):
    """Something that the user can fix is wrong; the command line prints it as one line and exits with code 2.

    what  the fact, and where it was found (file, variable, option)
    cure  what to do about it
    """

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(f"{what}; {cure}")
        self.what = what
        self.cure = cure


def one_line(error: BaseException) -> str:
    """The message of a foreign exception, fit to be part of a ConfigError."""
    return " ".join(str(error).split()).rstrip(".")


def suggestion(word: str, known: Iterable[str], otherwise: str) -> str:
    """A cure for an unknown word: the known one that looks most like it, or `otherwise`.

    known       in the order of preference, where two look alike
    otherwise   a sentence
    """
    close = get_close_matches(word, list(known), n=1)
    return f"did you mean '{close[0]}'?" if close else otherwise


def in_short(names: Sequence[str], at_most: int = 3) -> str:
    """The first of them for a message, and how many more there are."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")
