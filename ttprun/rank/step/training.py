"""What the libraries ask and report of the training: each question goes to the part that can answer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ttprun.capture.position import made_inside
from ttprun.capture.records.evidence import INPUT
from ttprun.protocol.reason import Reason
from ttprun.rank import context
from ttprun.rank.checks import proof
from ttprun.rank.checks.replay_guard import report_mismatch
from ttprun.rank.checks.verification import Verifier
from ttprun.rank.step import commit_barrier
from ttprun.rank.step.inter_node_commit import InterNodeCommit
from ttprun.tensors import open_boundaries, optimizer_registry
from ttprun.tensors.mirror import Mirror

if TYPE_CHECKING:
    from ttprun.groups.entry import Entry
    from ttprun.rank.session import Session


class Training(context.Training):
    """The training of a rank; what each method is for: groups/host.py, capture/host.py and tensors/host.py."""

    gates = frozenset({commit_barrier.commit.__code__, open_boundaries.come_to.__code__})

    def __init__(self, session: Session) -> None:
        self._session = session

    def note(self, kind: int, name: str, values: Sequence[Any], what: str = "") -> bool:
        return proof.note(self._session, kind, name, values, what)

    def report(self, equal: list[str], not_proved: list[str]) -> None:
        proof.report(self._session, equal, not_proved)

    def refuse(self, why: Reason) -> None:
        report_mismatch(self._session.channel, self._session.generation, why)

    def weights(self) -> Sequence[torch.Tensor]:
        return optimizer_registry.newest().weights

    def cut(self) -> None:
        if (commit := self._session.get(InterNodeCommit)) is not None:
            commit.cut()

    def note_input(
        self, name: str, inputs: Sequence[torch.Tensor], op: str, is_one_of_many: bool = False, is_weights: bool = False
    ) -> bool:
        return proof.note(self._session, INPUT, name, inputs, op, is_one_of_many, is_weights)

    def sends_otherwise(self, tensor: torch.Tensor, difference: str) -> None:
        session = self._session
        if proof.is_measured([tensor]):
            proof.report(session, [], [f"{difference}; it is small and not a gradient: perhaps a measured time"])
            return
        cause = "its steps depend on something that is neither recorded nor made again by its setup"
        self.refuse(Reason("not-replayable", f"the script cannot be replayed: {difference}, so {cause}"))

    def has_a_look(self) -> bool:
        return self._session.parts[Verifier].looks_before

    def keep_result(self, entry: Entry) -> None:
        session = self._session
        session.parts[Mirror].keep_result(session, entry.sequence, entry.number, entry.outputs[0])

    def give_result(self, entry: Entry) -> None:
        session = self._session
        session.parts[Mirror].give_result(session.applied, entry.sequence, entry.number, entry.outputs[0])

    def leaves(self) -> None:
        self._session.parts[Verifier].stop_if_divergent()

    def made(self, what: str, cure: str, is_kept: Callable[[], bool], frame: FrameType | None) -> None:
        made_inside.note(what, cure, is_kept, frame)

    def device_in_use(self) -> torch.device | None:
        return optimizer_registry.device_in_use()

    def wrapped_models(self) -> list[Any]:
        return optimizer_registry.wrapped_models()
