"""What `ttprun check` sees from inside a rank: the moments that it comes to, and what it trains after each step.

It hears of moments in the place of `strikes`, and passes them on. Each thing is a line of JSON in a file of the rank's,
in one write, so that a killed process leaves whole lines, and the one that takes its place adds to them. After the last
step that is wanted, the rank keeps its newest record there and leaves. Begin with `Observer.reached`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import xxhash

from ttprun.capture.records.recorder import Recorder
from ttprun.capture.values import pack
from ttprun.chaos import strikes
from ttprun.chaos.damage import step_of
from ttprun.chaos.plain_observer.sitecustomize import leave, seed_what_the_system_seeds
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank, current
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.tensor_bytes import content_of, elements_of
from ttprun.tensors import optimizer_registry

VARIABLE = "_TTPRUN_CHECK"


def order(folder: Path, steps: int) -> dict[str, str]:
    """The environment of a launch whose ranks are to be observed for so many steps; `folder` gets their notes."""
    return {VARIABLE: f"{steps}:{folder}"}


def ordered(rank: int) -> Observer | None:
    """The observer that the environment asks for, None if it asks for none."""
    steps, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if not folder:
        return None
    seed_what_the_system_seeds(rank)
    return Observer(Path(folder), int(steps), rank)


class Observer:
    """The listener of a rank that is checked.

    folder   gets rank<N>.jsonl, and rank<N>.head and rank<N>.blobs, the last record
    steps    optimizer steps after which the rank leaves
    """

    reached_step_end = staticmethod(strikes.reached_step_end)
    connected = staticmethod(strikes.connected)

    def __init__(self, folder: Path, steps: int, rank: int) -> None:
        self._folder, self._steps, self._rank = folder, steps, rank
        self._seen: set[tuple[str, int]] = set()

    def reached(self, moment: str) -> None:
        """A thread has come to a moment."""
        session = _live()
        if session is not None:
            self._note_moment(session, moment)
            if moment == "after_step":
                self._note_boundary(session)
        strikes.reached(moment)
        if session is not None and moment == "after_step" and session.applied >= self._steps:
            self._leave(session)

    def reached_collective(self, op: str, inputs: Any) -> bool:
        """A collective is about to be issued; returns whether this rank is to leave it out."""
        session = _live()
        if session is not None:
            self._note_moment(session, strikes.phase_of_collective(session, op))
        return strikes.reached_collective(op, inputs)

    def _note_moment(self, session: Rank, moment: str) -> None:
        """Each moment once a step."""
        step = step_of(session, moment)
        if (moment, step) not in self._seen:
            self._seen.add((moment, step))
            self._note({"moment": moment, "step": step})

    def _note_boundary(self, session: Rank) -> None:
        with contextlib.suppress(Exception):  # a tensor that cannot be hashed is not compared; training goes on
            self._note({"boundary": session.applied, "trained": trained(), "random": random_now()})

    def _note(self, what: dict[str, Any]) -> None:
        """Never raises: what cannot be noted is missed by whoever compares."""
        with contextlib.suppress(OSError):
            fd = os.open(self._folder / f"rank{self._rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(fd, (json.dumps(what) + "\n").encode())
            finally:
                os.close(fd)

    def _leave(self, session: Rank) -> None:
        """Keep the newest record, and end the process."""
        record = session[Recorder].read(session.applied)
        for name, content in zip(("head", "blobs"), record or (), strict=False):
            with contextlib.suppress(OSError):
                (self._folder / f"rank{self._rank}.{name}").write_bytes(content)
        leave()


def _live() -> Rank | None:
    """This process's session; None in a replay."""
    session = current()
    return session if session is not None and session.mode.is_live else None


def trained() -> str:
    """Digest of all that the optimizers update: parameters, and the tensors of their state."""
    return _digest(optimizer_registry.stepped_tensors())


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for tensor in tensors:
        elements = elements_of(local_of(tensor).detach())
        hasher.update(f"{elements.dtype} {list(tensor.shape)}".encode())
        hasher.update(content_of(elements))
    return hasher.hexdigest()


def random_now() -> str:
    """Digest of the random generators' states."""
    return xxhash.xxh3_128_hexdigest(pack(random_state.capture()))
