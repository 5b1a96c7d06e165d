"""Faults that ttprun can cause on purpose, and how they are written down: `kill:rank=1,step=5,phase=backward`.

Standard library only, since it is imported inside ranks. Read `parse_fault` first.
"""

from __future__ import annotations

from dataclasses import dataclass

from ttprun.errors import suggestion

KINDS: dict[str, str] = {
    "kill": "SIGKILL: the process is gone at once, as by the out-of-memory killer",
    "exit": "the process ends itself with exit code 1, without any clean-up",
    "exception": "a RuntimeError is raised in the script's main thread",
}

PHASES: dict[str, str] = {
    "start": "the interpreter has started, the script's first line has not run",
    "init": "inside init_process_group",
    "setup": "after init_process_group, before the first step (DDP's parameter broadcast)",
    "forward": "in the forward pass",
    "backward": "in the backward pass, between two bucket all-reduces",
    "collective": "inside a collective",
    "before_step": "after the step's last collective, before optimizer.step",
    "in_step": "inside optimizer.step",
    "after_step": "between optimizer.step and the next forward (scheduler, EMA, logging)",
    "validation": "in validation with collectives of its own",
    "checkpoint": "while rank 0 writes the script's own checkpoint and the others stand in a barrier",
    "exit": "after the last step, before the process ends",
    "replay": "in a replacement, while it runs the script up to its boundary",
    "transfer": "in a recovery, while state goes from one rank to another",
}


@dataclass(frozen=True)
class Fault:
    """One fault to cause in one rank; `str` gives the text that `parse_fault` reads.

    kind   a key of KINDS
    rank   global rank, from 0
    step   optimizer step, from 0, in which it strikes; None: the one that is running
    phase  a key of PHASES; None: wherever the rank is
    """

    kind: str
    rank: int
    step: int | None = None
    phase: str | None = None

    def __str__(self) -> str:
        step = "" if self.step is None else f",step={self.step}"
        phase = "" if self.phase is None else f",phase={self.phase}"
        return f"{self.kind}:rank={self.rank}{step}{phase}"


def parse_fault(text: str) -> Fault:
    """Read `KIND:rank=R[,step=N][,phase=P]`.

    Raises ValueError with one line that says what is wrong and what would be right.
    """
    kind, _, rest = text.strip().partition(":")
    check_word("fault", kind, KINDS)
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in ("rank", "step", "phase"):
            raise ValueError(f"fault '{text}' has no '{key}'; write KIND:rank=R[,step=N][,phase=P]")
        if key in values:
            raise ValueError(f"fault '{text}' names its {key} twice; write KIND:rank=R[,step=N][,phase=P]")
        values[key] = value
    if "rank" not in values:
        raise ValueError(f"fault '{text}' names no rank; write {kind}:rank=R[,step=N][,phase=P]")
    phase = values.get("phase")
    if phase is not None:
        check_word("phase", phase, PHASES)
    step = _natural(text, "step", values["step"]) if "step" in values else None
    return Fault(kind, _natural(text, "rank", values["rank"]), step, phase)


def check_word(what: str, word: str, table: dict[str, str]) -> None:
    """Raise ValueError, with a suggestion, unless `word` is in KINDS or PHASES (`what` names which)."""
    if word not in table:
        raise ValueError(f"there is no {what} '{word}'; {suggestion(word, table, 'use one of ' + ', '.join(table))}")


def _natural(text: str, key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(f"fault '{text}': {key} is '{value}'; write a whole number from 0")
    return int(value)
