"""The error for what the user can fix; anything else that goes wrong is an event, or a bug of ttprun."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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
        self.parts: tuple[ConfigError, ...] = (self,)


class ConfigErrors(ConfigError):
    """Several at once, so that a file is corrected in one go: the command line prints a line for each of `parts`."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__(errors[0].what, errors[0].cure)
        self.args = ("\n".join(map(str, errors)),)
        self.parts = tuple(errors)


class Complaints:
    """All that is wrong with what a user has written, in the order in which it was found."""

    def __init__(self) -> None:
        self._found: list[ConfigError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Keep a ConfigError that is raised inside `with`, and go on behind it."""
        try:
            yield
        except ConfigError as error:
            self.add(error)

    def add(self, error: ConfigError) -> None:
        """Note one that nobody has raised."""
        self._found += error.parts

    def raise_any(self) -> None:
        """Raise what was noted, if anything was: a ConfigError, or ConfigErrors."""
        if self._found:
            raise all_of(self._found)


def all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """One error that stands for these; there is at least one."""
    return errors[0] if len(errors) == 1 else ConfigErrors(errors)


def one_line(error: BaseException) -> str:
    """The message of a foreign exception, fit to be part of a ConfigError."""
    return " ".join(str(error).split()).rstrip(".")


_LONG = 6  # letters


def suggestion(word: str, candidates: Iterable[str], otherwise: str) -> str:
    """A cure for an unknown word: a known one that begins like it, else the one most similar to it, else `otherwise`.

    candidates  in the order of preference
    otherwise   a sentence
    """
    names = list(candidates)
    longer = [name for name in names if len(word) >= _LONG and name.startswith(word[:-1])]
    close = longer or get_close_matches(word, names, n=1)
    return f"did you mean '{close[0]}'?" if close else otherwise


def counted(number: int, noun: str) -> str:
    """A number of things for people: "1 rank", "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_short(names: Sequence[str], at_most: int = 3) -> str:
    """The first of them for a message, and how many more there are."""
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "")
