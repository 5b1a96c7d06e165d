"""Capturing alone: a script with a training loop is recorded at its optimizer steps, and goes on in another process.

No launcher, no group: this process is a rank of none. A file holds what a recorder does (records/recorder.py), and the
tensors that the optimizers update, with their gradients, as they were before the step. Begin with `Capture.run`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import msgpack
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.options import OPTIONS
from ttprun.capture import PATCHES, effects, installing, recording
from ttprun.capture.effects.effects import Effects
from ttprun.capture.position import user_code
from ttprun.capture.position.user_code import run
from ttprun.capture.records.packing import pack
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.replay.replay import NotRepeatedError, Replay
from ttprun.capture.values import room_to_walk
from ttprun.capture.values.changes import Clock
from ttprun.capture.values.large import dtype_name, tensor_of
from ttprun.introspect import fail_open, ownership, patching
from ttprun.introspect.current_rank import LIVE, Observers, Parts, Rank, begin, leave_in_children
from ttprun.introspect.model_tensors import all_of
from ttprun.introspect.tensor_bytes import bytes_of, places
from ttprun.protocol.board import Board
from ttprun.protocol.reason import Reason

SLOT_BYTES = 1 << 30  # room for one record, without what the optimizers update


class Optimizers:
    """The optimizers that the script makes; see capture/replay/jumps.py."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []

    def wrap_init(self, original: Any) -> Any:
        """Optimizer.__init__: note them in the order of their making."""

        def init(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._made.append(weakref.ref(optimizer))

        return init

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer for reference in self._made if (optimizer := reference()) is not None]

    def number_of(self, optimizer: Any) -> int | None:
        return next((number for number, other in enumerate(self.optimizers()) if other is optimizer), None)

    def parameters(self) -> Iterator[torch.Tensor]:
        return (parameter for optimizer in self.optimizers() for parameter in _parameters_of(optimizer))

    def stepped_tensors(self) -> list[torch.Tensor]:
        return [*self.parameters(), *(value for optimizer in self.optimizers() for value in _state_of(optimizer))]

    def counts_now(self) -> list[list[int]]:
        return [[len(_parameters_of(optimizer)), len(_state_of(optimizer))] for optimizer in self.optimizers()]


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in all_of(optimizer) for parameter in group.parameters]


def _state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]


class _Line:
    """Nobody is at the other end: what is reported are failures."""

    def send(self, message: Any, fds: Any = ()) -> None:
        raise AssertionError(message)


def _refuse(why: Reason) -> None:
    raise NotRepeatedError(why)


class Capture:
    """A script that this process runs, and the file in which its newest state is."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._recorder = Recorder(Recorder.create(SLOT_BYTES), SLOT_BYTES)
        self._optimizers = Optimizers()
        self._host = self._rank()
        self._kept: dict[str, Any] = {}

    def _rank(self) -> Rank:
        """This process as a rank without others; in a job of several its launcher's welcome says which."""
        weights = self._optimizers.parameters
        return Rank(
            rank=0,
            local_rank=0,
            world_size=1,
            run_dir=os.devnull,  # no folder: what a replay prints is kept in memory
            options=OPTIONS,
            channel=cast("Any", _Line()),
            board=Board.create(1)[1],
            parts=Parts({Recorder: self._recorder}),
            observers=Observers(report=self._report, refuse=_refuse, weights=lambda: list(weights())),
        )

    def _report(self, equal: list[str], not_proved: list[str]) -> None:
        assert not not_proved

    def run(self, script: str) -> None:
        """Run a script to its end, from the step on before which the file was written, if it is there.

        Before each optimizer step the script's state replaces the file.
        """
        host, full = self._host, user_code.full_path(script)
        ownership.note_library("torch", os.path.join(__file__, "all"))  # who runs the script is no part of it
        sys.path[0] = os.path.dirname(full)
        ownership.add_user_directory(sys.path[0])
        user_code.install()
        effects.listen()
        installing.install()
        patching.replace(PATCHES)
        kind: Any = torch.optim.Optimizer
        kind.__init__ = fail_open.guard("Optimizer.__init__", kind.__init__, self._optimizers.wrap_init)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        begin(host)
        leave_in_children()
        Clock.is_whole = True  # there is no evidence of the next step
        replay = self._replay() if os.path.exists(self._path) else None
        Effects(self._recorder).begin(is_replay=replay is not None)
        if replay is not None:
            host.mode = replay
            replay.begin()
        run([full])
        host.mode.refuse_end()

    def _replay(self) -> Replay:
        with open(self._path, "rb") as file:
            self._kept = msgpack.unpackb(file.read(), strict_map_key=False)
        self._recorder.restore(self._kept["recorder"])
        records, before = Replay.records_of(self._recorder, self._kept["boundary"])
        return Replay(self._host, self._optimizers, records[-1], before)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        host, frame = self._host, sys._getframe(1)
        if host.mode.is_live:
            self._record(optimizer, frame)
            return
        host.mode.before_step(frame, None, optimizer)
        if host.mode.is_at_target:
            self._go_live(host.mode)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._host.mode.is_live:
            self._host.applied += 1
            Effects.end_set_up()

    def _go_live(self, replay: Replay) -> None:
        """The script is where it was recorded, before the step: load what the optimizers update."""
        optimizers = self._optimizers
        with torch.no_grad():
            for tensor, packed in zip(optimizers.stepped_tensors(), self._kept["tensors"], strict=True):
                tensor.copy_(tensor_of(*packed))
            for parameter, packed in zip(optimizers.parameters(), self._kept["gradients"], strict=True):
                parameter.grad = None if packed is None else tensor_of(*packed)
        replay.findings.report()
        replay.unmute()
        self._host.mode = LIVE
        self._host.applied = replay.boundary - 1

    def _record(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        host, recorder, made = self._host, self._recorder, self._optimizers
        boundary = host.applied + 1
        number, held = made.number_of(optimizer), places(made.stepped_tensors())
        with room_to_walk():
            steps = recording.Steps(made.optimizers(), held, made.counts_now(), number)
            record, blobs, _ = recording.describe(host, boundary, frame, steps)
            head = pack(record)
        assert (Effects.why_not_noted().text, record.unfollowed) == ("", "")
        recorder.write(boundary, head, blobs)
        if boundary == 1 or recorder.read_first() is None:
            recorder.write_first(boundary, head, blobs)
        gradients = [parameter.grad for parameter in made.parameters()]
        kept = {
            "boundary": boundary,
            "recorder": recorder.export(boundary),
            "tensors": [_packed(tensor) for tensor in made.stepped_tensors()],
            "gradients": [None if gradient is None else _packed(gradient) for gradient in gradients],
        }
        with open(f"{self._path}.new", "wb") as file:
            file.write(msgpack.packb(kept))
        os.replace(f"{self._path}.new", self._path)


def _packed(tensor: torch.Tensor) -> list[Any]:
    return [dtype_name(tensor.dtype), list(tensor.shape), bytes(bytes_of(tensor))]
