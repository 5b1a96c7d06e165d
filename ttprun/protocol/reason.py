"""One reason why a rank is not replaced, or not proved to be as it was. The table: reasons.py."""

from __future__ import annotations

from dataclasses import dataclass

NOT_PROTECTED, NOT_PROVED, REFUSED = "not protected", "not proved", "refused"
# The three words -> what ttprun does then.
WORDS = {
    NOT_PROTECTED: "A lost rank is not replaced as long as this holds, and the job goes on. If a rank is lost, all "
    "ranks go back to a snapshot or a saved state, or start again (--max-restarts), or the job ends: the message "
    "says which.",
    NOT_PROVED: "Training goes on, also after a recovery. What is named may differ between a replacement and the lost "
    "rank. It stands in `ttprun status` and with each incident. --proof strict refuses differences instead.",
    REFUSED: "This replacement is ended before it has given anything to the other ranks. A weaker recovery follows: "
    "another replacement, a snapshot, a saved state, or a restart of all ranks; `ttprun status` says which.",
}
# Headings of the guide, and a cure, of several reasons.
LIMITS = "limits#Not covered: a fault restarts the whole group"
SNAPSHOTS = "limits#Covered by a snapshot only"
LADDER = "how-it-works#The ladder"
BUG = "report it, with `events.jsonl` of the run directory: it is a bug of ttprun"


@dataclass(frozen=True)
class Reason:
    """One reason.

    kind    its stable name, for programs and for `ttprun explain`
    word    NOT_PROTECTED, NOT_PROVED or REFUSED
    found   words of its messages, a regular expression
    means   a sentence
    cure    what to do about it, in one line
    where   the guide's topic and heading that explain it: "limits#Covered"
    then    what ttprun does then, if that is not what WORDS says of `word`
    """

    kind: str
    word: str
    found: str
    means: str
    cure: str
    where: str
    then: str = ""
