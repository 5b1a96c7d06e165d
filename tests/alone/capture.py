"""Capturing alone: a script with a training loop is recorded at its optimizer steps, and goes on in another process.

No launcher, no group: this process is its own host. A file holds what a recorder does (records/recorder.py), and the
tensors that the optimizers update, with their gradients, as they were before the step. Begin with `Capture.run`.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import msgpack
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ttprun.capture import effects, installing, recording
from ttprun.capture.effects.effects import Effects
from ttprun.capture.patch_rows import PATCHES
from ttprun.capture.position import user_code
from ttprun.capture.position.user_code import run
from ttprun.capture.records.packing import pack
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.replay.replay import NotRepeatedError, Replay
from ttprun.capture.values import room_to_walk
from ttprun.capture.values.changes import Clock
from ttprun.capture.values.large import dtype_name, tensor_of
from ttprun.device.device_errors import DeviceErrors, Diagnosis
from ttprun.introspect import fail_open, patching, whose
from ttprun.introspect.costs import Costs
from ttprun.introspect.host import begin, leave_in_children
from ttprun.introspect.models import all_of
from ttprun.introspect.tensor_bytes import bytes_of, places
from ttprun.protocol.board import Board, Phase

SLOT_BYTES = 1 << 30  # room for one record, without what the optimizers update


class Optimizers:
    """The optimizers that the script makes; see host.py."""

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


class Live:
    """The script runs as if it were not captured."""

    is_live = True
    is_alone = False
    newest_step = 0

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        return None

    def note_not_proved(self, text: str) -> None: ...

    def refuse_end(self) -> None: ...


class Alone:
    """This process as its own host, and its training; see host.py."""

    rank = 0
    world_size = 1
    run_dir = os.devnull  # no folder: what a replay prints is kept in memory
    address = ""
    generation = 0
    is_over = False
    framework = None

    def __init__(self, recorder: Recorder) -> None:
        self.board = Board.create(1)[1]
        self.row = self.board.row(0)
        self.applied = 0
        self.mode: Any = Live()
        self.costs = Costs()
        self.training = self
        self.optimizers = Optimizers()
        self._recorder = recorder

    def __getitem__(self, kind: type) -> Any:
        assert kind is Recorder
        return self._recorder

    def touch(self, phase: Phase) -> None: ...

    def give_up_protection(self, reason: str) -> None:
        raise AssertionError(reason)

    def diagnose(self, error: BaseException) -> Diagnosis:
        return DeviceErrors({}).diagnose(error)

    def note(self, kind: int, name: str, values: Sequence[Any], what: str = "") -> bool:
        return False

    def report(self, equal: list[str], not_proved: list[str]) -> None:
        assert not not_proved

    def refuse(self, why: str) -> None:
        raise NotRepeatedError(why)

    def weights(self) -> Sequence[torch.Tensor]:
        return list(self.optimizers.parameters())


class Capture:
    """A script that this process runs, and the file in which its newest state is."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._recorder = Recorder(Recorder.create(SLOT_BYTES), SLOT_BYTES)
        self._host = Alone(self._recorder)
        self._kept: dict[str, Any] = {}

    def run(self, script: str) -> None:
        """Run a script to its end, from the step on before which the file was written, if it is there.

        Before each optimizer step the script's state replaces the file.
        """
        host, full = self._host, user_code.full_path(script)
        for file in (__file__, "<string>"):  # who runs the script is no part of it
            whose.leave_out(file)
        sys.path[0] = os.path.dirname(full)
        whose.add_user_directory(sys.path[0])
        user_code.install()
        effects.listen()
        installing.install()
        patching.replace(PATCHES)
        kind: Any = torch.optim.Optimizer
        kind.__init__ = fail_open.guard("Optimizer.__init__", kind.__init__, host.optimizers.wrap_init)
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
        return Replay(self._host, self._host.optimizers, records[-1], before)

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
        optimizers = self._host.optimizers
        with torch.no_grad():
            for tensor, packed in zip(optimizers.stepped_tensors(), self._kept["tensors"], strict=True):
                tensor.copy_(tensor_of(*packed))
            for parameter, packed in zip(optimizers.parameters(), self._kept["gradients"], strict=True):
                parameter.grad = None if packed is None else tensor_of(*packed)
        replay.findings.report()
        replay.unmute()
        self._host.mode = Live()
        self._host.applied = replay.boundary - 1

    def _record(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        host, recorder, made = self._host, self._recorder, self._host.optimizers
        boundary = host.applied + 1
        number, held = made.number_of(optimizer), places(made.stepped_tensors())
        with room_to_walk():
            steps = recording.Steps(made.optimizers(), held, made.counts_now(), number)
            record, blobs, _ = recording.describe(host, boundary, frame, steps)
            head = pack(record)
        assert (Effects.why_not_noted(), record.unfollowed) == ("", "")
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
