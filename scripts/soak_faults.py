"""What a soak breaks, and what it draws: scripts, moments, and the faults of one run. Begin with `draw_faults`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ttprun.chaos.injected_faults import ENDING_KINDS, Fault, check_fault, phases_of

# What is drawn; `late` and `worker` are asked for.
MOMENTS = {
    "step": "any phase of a step",
    "together": "with the one before, in another rank",
    "recovery": "while the one before is repaired, in its replacement or in another rank",
    "stall": "the agent stands still",
    "worker": "a DataLoader worker is killed",
    "late": "in the last two steps, or after the last one",
}
DRAWN = ("step", "together", "recovery", "stall")
SECOND = ("together", "recovery")
SECOND_EVERY = 2  # of the faults that a second one can come to
OF_REPLACEMENT = ("fork", "replay", "transfer")
OF_SURVIVOR = ("freeze", "rebuild", "reissue", "thaw")
OF_DEVICE = ("abort", "connect")  # between two groups' aborts, and while a communicator is made


@dataclass(frozen=True)
class Subject:
    """A script to break.

    steps      optimizer steps of a run
    phases     moments that it comes by in every step
    is_ddp     what a collective gives is used by nobody before the step has ended
    on_device  its collectives are those of a device
    stages     neighbouring ranks that hold one copy of the model; one copy is spared
    epoch_steps  its data come from a DataLoader's workers, which are there only between these steps; 0: no workers
    """

    script: str
    arguments: tuple[str, ...]
    steps: int
    phases: tuple[str, ...]
    is_ddp: bool = True
    on_device: bool = False
    epoch_steps: int = 0
    stages: int = 1

    def phases_for(self, kind: str) -> list[str]:
        """Moments at which a fault of this kind can strike without being seen in what the script prints at once."""
        phases = [phase for phase in self.phases if phase in phases_of(kind)]
        return [] if kind == "skip-collective" and not self.is_ddp else phases


STEP = ("backward", "collective", "before_step", "in_step", "after_step")
ON_NPU = tuple(
    Subject(script, ("--out={folder}/out", *arguments), steps, phases, stages == 1, on_device=True, stages=stages)
    for script, arguments, steps, phases, stages in (
        ("on_device.py", ("--with=batchnorm,dropout",), 32, ("forward", *STEP), 1),
        ("device_layouts.py", ("--layout=ddp", "--with=syncbn,loss", "--steps=32", "--width=32"), 32, STEP, 1),
        ("while_true_get_batch.py", ("--device=npu", "--backend=hccl", "--max_iters=32"), 32, ("forward", *STEP), 1),
        ("on_device.py", ("--with=fp16,loader,pinned",), 24, ("forward", *STEP), 1),
        ("device_layouts.py", ("--layout=own", "--with=loss", "--steps=32", "--width=32"), 32, STEP, 1),
        ("trainer_class.py", ("--device=npu", "--epochs=3"), 36, ("forward", *STEP), 1),
        ("on_device.py", ("--with=dropout,groups", "--by-hand"), 32, STEP, 1),
        ("device_layouts.py", ("--layout=fsdp2", "--with=loss", "--steps=32", "--width=32"), 32, STEP, 1),
        ("device_pipeline.py", ("--steps=32",), 32, STEP, 2),
    )
)
SUBJECTS = (
    Subject("epochs_dataloader.py", ("--out={folder}/out", "--epochs=4"), 56, ("forward", *STEP), epoch_steps=14),
    Subject("while_true_get_batch.py", ("--out={folder}/out", "--max_iters=50"), 50, ("forward", *STEP)),
    Subject("plain_tensors.py", ("--out={folder}/out", "--steps=60"), 60, STEP, is_ddp=False),
)


def draw_faults(
    drawn: random.Random, subject: Subject, count: int, ranks: int, kinds: list[str], moments: Sequence[str]
) -> list[str]:
    """Faults for one run, spread over its steps; one rank, or copy, is spared. Each can strike: kind and phase fit."""
    spared = drawn.randrange(ranks)
    others = [rank for rank in range(ranks) if rank // subject.stages != spared // subject.stages]
    slot = (subject.steps - 4) // count
    kinds = [kind for kind in kinds if subject.phases_for(kind)]
    alone = [moment for moment in moments if moment not in SECOND and (moment != "worker" or subject.epoch_steps)]
    alone = alone or ["step"]
    second = [moment for moment in moments if moment in SECOND and len(others) > 1]
    faults: list[Fault] = []
    first: Fault | None = None  # that a second fault may come to
    for number in range(count):
        if first is not None and second and drawn.randrange(SECOND_EVERY) == 0:
            faults.append(draw_second(drawn, drawn.choice(second), first, others, subject))
            first = None
            continue
        moment, rank = drawn.choice([*alone, "step"] if "step" in alone else alone), drawn.choice(others)
        step = 2 + number * slot + drawn.randrange(slot)
        if moment == "late":  # after all others, so that each of them still has its step
            last = drawn.choice([(subject.steps - 2, None), (subject.steps - 1, None), (None, "exit")])
            kind = drawn.choice([kind for kind in ENDING_KINDS if kind in kinds] or ["kill"])
            faults.append(Fault(kind, rank, last[0], last[1] or drawn.choice(subject.phases_for(kind))))
            alone = [other for other in alone if other != "late"] or ["step"]
            continue
        kind = {"worker": "worker-kill", "stall": "stall"}.get(moment) or drawn.choice(kinds)
        if kind == "worker-kill" and step % subject.epoch_steps == 0:
            step += 1  # the workers of the last epoch have ended, those of the next one are not there yet
        fault = Fault(kind, rank, step, drawn.choice(subject.phases_for(kind)))
        faults.append(fault)
        first = fault if kind in ENDING_KINDS else None
    for fault in faults:
        check_fault(fault)
    return [str(fault) for fault in faults]


def draw_second(drawn: random.Random, moment: str, first: Fault, others: list[int], subject: Subject) -> Fault:
    """A fault that comes with another one, or while that is repaired."""
    if moment == "together":
        rank = drawn.choice([rank for rank in others if rank != first.rank])
        kind = drawn.choice([kind for kind in ENDING_KINDS if first.phase in subject.phases_for(kind)])
        return Fault(kind, rank, first.step, first.phase)
    phase = drawn.choice([*OF_REPLACEMENT, *OF_SURVIVOR, *(OF_DEVICE if subject.on_device else ())])
    rank = first.rank if phase in OF_REPLACEMENT else drawn.choice([rank for rank in others if rank != first.rank])
    return Fault("kill", rank, max(0, (first.step or 0) - 1), phase)
