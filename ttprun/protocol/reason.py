"""One reason: a sentence, and its kind, under which `ttprun explain` explains it. The kinds: reasons.py."""

from __future__ import annotations

from ttprun.protocol.codec import Message
from ttprun.protocol.reasons import KINDS


class Reason(Message, frozen=True):
    """Why something is not done, or not proved; `Reason()`, which is false: there is no reason against it.

    kind   of the table in reasons.py; "": it has no row
    text   a sentence, or what continues one
    first  the sentence as it was first given, if `text` says more; "": it says no more
    """

    kind: str = ""
    text: str = ""
    first: str = ""

    def __bool__(self) -> bool:
        return bool(self.text)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)

    @classmethod
    def of(cls, error: BaseException, kind: str) -> Reason:
        """The reason that an exception was made with; of an exception without one: its text, and this kind."""
        given = error.args[0] if error.args else None
        return given if isinstance(given, Reason) else cls(kind, str(error))

    def within(self, text: str) -> Reason:
        """The same reason in a longer sentence."""
        return Reason(self.kind, text, self.first or self.text)

    @property
    def cure(self) -> str:
        """What helps against it; "" if nothing is known to."""
        return KINDS[self.kind].cure if self.kind else ""

    @property
    def pointer(self) -> str:
        """What a line that ends with this reason goes on with: where it is explained; "" if nowhere."""
        return pointer(self.kind)

    def with_cure(self) -> Reason:
        """With what helps, for one line, said once."""
        return self if self.cure in self.text else self.within(f"{self.text}; what helps: {self.cure}")


_EXPLAIN = " (ttprun explain "


def kind_in(message: str) -> str:
    """The kind that a printed line names; "" if it names none."""
    return message.partition(_EXPLAIN.strip())[2].partition(")")[0].strip()


def pointer(kind: str) -> str:
    """What a line goes on with that ends with a reason of this kind; "" if it has none."""
    return f"{_EXPLAIN}{kind})" if kind else ""
