"""Whether a replacement does what the lost rank did, as far as that rank has left evidence of it.

The lost rank has noted what it gave to the running step (evidence.py). Its replacement runs that step live, and each
batch, loss and input of a collective that it comes to is compared, bit for bit, before anybody gets it. If one differs,
state that nobody records is another one here: the agent is told, and the next rung is tried. What was compared and
found equal is reported too, and so is what could not be compared: an incident claims no more than that.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ttprun.protocol import from_rank
from ttprun.rank.checks.replay_guard import MismatchError, report_mismatch
from ttprun.rank.records.evidence import BATCH, INPUT, LOSS, Noted, Place, comparable, is_close
from ttprun.rank.session import Session, current
from ttprun.rank.weights import optimizer_registry

MEASURED_ELEMENTS = 16
# What a kind is called: (one, several)
_NAMES = {
    BATCH: ("batch of a DataLoader", "batches of DataLoaders"),
    LOSS: ("loss", "losses"),
    INPUT: ("input of a collective", "inputs of collectives"),
}
_going_backward = 0


class Proof:
    """A replacement's part in the step in which its rank was lost.

    step   the boundary from which it has gone live
    left   what the lost rank had noted since then
    """

    def __init__(self, session: Session, step: int) -> None:
        self._session = session
        self._step = step
        self._left = session.recorder.evidence.left(step)
        self._equal: Counter[int] = Counter()
        self._not_proved: list[str] = []

    @classmethod
    def of(cls, session: Session, step: int) -> Proof | None:
        """What there is to compare from this boundary on; None, and told, if there is nothing."""
        proof = cls(session, step)
        if proof._left:
            return proof
        proof.end()
        return None

    def compare(self, place: Place, noted: Noted, tensors: Sequence[torch.Tensor], what: str) -> None:
        """Compare what this rank is about to give. Raises MismatchError, once the agent has been told.

        what   of the kind of the place, for a person: its name
        """
        lost = self._left.pop(place, None)
        if lost is None:
            return
        kind, _, number = place
        which = f"{_NAMES[kind][0]} number {number + 1} of step {self._step}"
        which += f" ({what})" if what else ""
        if lost == noted:
            self._equal[kind] += 1
        elif kind == INPUT and _is_measured(tensors):
            self._not_proved.append(
                f"{which} is another one than in the lost rank; it is small and no gradient: a time that was measured?"
            )
        elif torch.get_num_threads() > 1 and is_close(lost.sample, noted.sample, tensors[0].dtype):
            self._not_proved.append(f"{which} is the lost rank's but for rounding: its kernels run on several threads")
        else:
            self._refuse(f"{which} is another one than in the lost rank")
        if not self._left:
            self.end()

    def end_step(self) -> None:
        """The step is over. Raises MismatchError if the lost rank had given more to it."""
        if self._left:
            kinds = Counter(kind for kind, _, _ in self._left)
            missing = ", ".join(_told(kind, count) for kind, count in sorted(kinds.items()))
            self._refuse(f"the lost rank had come to further things in step {self._step}: {missing}")

    def end(self) -> None:
        """All that the lost rank had noted has been compared."""
        self._session.proof = None
        equal = [f"{_told(kind, count)} in step {self._step}" for kind, count in sorted(self._equal.items())]
        if self._step and not (self._equal[LOSS] or self._equal[INPUT]):
            self._not_proved.append(f"the lost rank had left no loss and no input of a collective of step {self._step}")
        tell(self._session, equal, self._not_proved)

    def _refuse(self, difference: str) -> None:
        self._session.proof = None
        report_mismatch(
            self._session.channel,
            self._session.generation,
            f"the script cannot be replayed: {difference}, so something that is neither recorded nor set up again has "
            "changed in the steps",
        )


def _told(kind: int, count: int) -> str:
    return f"{count} {_NAMES[kind][count != 1]}"


def tell(session: Session, equal: list[str], not_proved: list[str]) -> None:
    """Report what of this rank was compared with the lost one and found equal, and what is not proved."""
    if equal or not_proved:
        session.channel.send(from_rank.Compared(equal, not_proved))


def is_decisive(session: Session, step: int) -> bool:
    """Whether the lost rank has left something of a step that only the right state gives again."""
    return any(kind in (LOSS, INPUT) for kind, _, _ in session.recorder.evidence.left(step))


def note(session: Session, kind: int, name: str, values: Sequence[Any], what: str = "") -> None:
    """This rank is about to give something to the running step: note it, and compare it if it is a replacement.

    values   of which the tensors in the processor's memory are looked at
    what     for a person: which it is

    Raises MismatchError, and nothing else.
    """
    if session.replay is not None or not session.is_repairable():
        return
    try:
        tensors = comparable(values)
        if not tensors:
            return
        place, noted = session.recorder.evidence.note(session.applied, kind, name, tensors)
        if session.proof is not None:
            session.proof.compare(place, noted, tensors, what)
    except MismatchError:
        raise
    except Exception as error:  # what cannot be looked at is not proved, and the script goes on
        if session.proof is not None:
            session.proof = None
            tell(session, [], [f"what the lost rank had given to step {session.applied} cannot be compared: {error!r}"])


def wrap_backward(original: Any) -> Any:
    """torch.autograd.backward: know the losses, and which collectives are given gradients."""

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        global _going_backward
        session = current()
        if session is None or threading.current_thread() is not threading.main_thread():
            return original(tensors, *args, **kwargs)
        losses = tensors if isinstance(tensors, list | tuple) else [tensors]
        note(session, LOSS, "", losses)
        _going_backward += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            _going_backward -= 1

    return backward


def _is_measured(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the input of a collective may be what a script measures or names: a time, memory in use, an object.

    Two runs differ in these, and the training does not depend on them. A gradient is none of them.
    """
    if _going_backward or any(
        tensor is parameter.grad for tensor in tensors for parameter in optimizer_registry.parameters()
    ):
        return False
    return all(tensor.numel() <= MEASURED_ELEMENTS or tensor.dtype is torch.uint8 for tensor in tensors)
