"""What a rank adds to the record of a boundary: what its groups, its tensors and its copies of weights know of it.

All else is gathered by capture/recording.py. Begin with `describe`.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from ttprun.capture import recording
from ttprun.capture.records.boundary_record import BoundaryRecord
from ttprun.groups.results import Results
from ttprun.rank.session import Session
from ttprun.tensors import optimizer_registry
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.post_step_weights import KeptWeights


def describe(
    session: Session,
    boundary: int,
    frame: FrameType,
    returned: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    has_looked: bool = False,
) -> tuple[BoundaryRecord, list[torch.Tensor], bool]:
    """The record of a boundary; arguments and result as in capture/recording.py.

    optimizer   about to make its step; None: it does not matter
    has_looked  whether what the optimizers update was asked for this boundary already
    """
    living = optimizer_registry.optimizers()
    stepped = optimizer_registry.newest() if has_looked else optimizer_registry.stepped(living)
    kept = session.parts[KeptWeights]
    sample = b""
    if stepped.is_on_cpu:
        sample = stepped.sample(boundary)
        kept.compare(stepped, sample)
    else:

        def note(mark: bytes) -> None:
            nonlocal sample
            sample = mark

        kept.compare_later(stepped, boundary, note)
    results = session.parts[Results].begin_step(boundary)

    def beside() -> recording.Beside:
        return recording.Beside(
            weights=b"" if stepped.is_sharded else sample,
            held=session.parts[Holdings].mark(stepped, optimizer, boundary),
            kept=kept.is_kept,
            rebuilt=optimizer_registry.rebuilt(),
            groups_made=dict(session.made.by_ranks),
            results=results,
            is_before_step=session.has_collective_steps,
        )

    number = None
    for at, other in enumerate(living):  # as optimizer_registry.number_of, without asking for them again
        if other is optimizer:
            number = at
            break
    steps = recording.Steps(living, stepped.storages, stepped.counts, number)
    return recording.describe(session, boundary, frame, steps, beside, returned)


def steps_now() -> recording.Steps:
    """The optimizers between two boundaries."""
    living = optimizer_registry.optimizers()
    stepped = optimizer_registry.stepped(living)
    return recording.Steps(living, stepped.storages, stepped.counts, None)
