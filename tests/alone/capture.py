"""Capturing alone: a script with a training loop is recorded at its optimizer steps, and goes on in another process.

No launcher, no group: this process is its own host. A file holds what a recorder does (records/recorder.py), and the
tensors that the optimizers update, with their gradients, as they were before the step. Begin with `Capture`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import msgpack
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ttprun.capture import early, installing, recording
from ttprun.capture.effects.effects import Effects
from ttprun.capture.patch_rows import PATCHES
from ttprun.capture.position import ast_transform
from ttprun.capture.records.boundary_record import read_head
from ttprun.capture.records.packing import pack
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.replay.replay import NotRepeatedError, Replay
from ttprun.capture.script import run
from ttprun.capture.values import refusals, room_to_walk
from ttprun.capture.values.large_data import dtype_name, tensor_of
from ttprun.capture.values.turns import Clock
from ttprun.device.device_errors import DeviceErrors, Diagnosis
from ttprun.introspect import fail_open, patching, whose
from ttprun.introspect.costs import Costs
from ttprun.introspect.host import begin, end, leave_in_children
from ttprun.introspect.models import all_of
from ttprun.introspect.tensor_bytes import bytes_of, places
from ttprun.protocol.board import Board, Phase

_T = TypeVar("_T")


class CannotRecordError(RuntimeError):
    """The state of the script could not be restored from a record; the message says why."""

    is_meant_for_script = True


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

    def steps(self, stepping: Any) -> recording.Steps:
        """All of it, before this optimizer's step."""
        living = self.optimizers()
        return recording.Steps(living, places(self.stepped_tensors()), self.counts_now(), self.number_of(stepping))


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

    def note_not_proved(self, text: str) -> None:
        """Nothing is proved."""

    def refuse(self, reason: str, is_contradiction: bool = True) -> None:
        """Nothing is replayed."""

    def refuse_end(self) -> None:
        """Nothing is replayed."""


class Alone:
    """This process as its own host; see host.py.

    not_proved   what may be other than it was, after a replay
    why_not      why nothing can be recorded any more; "" if it can
    """

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
        self.why_not = ""
        self.not_proved: list[str] = []
        self.optimizers = Optimizers()
        self._recorder = recorder

    def __getitem__(self, kind: type[_T]) -> _T:
        assert kind is Recorder
        return self._recorder  # type: ignore[return-value]

    def touch(self, phase: Phase) -> None:
        """Nobody watches."""

    def give_up_protection(self, reason: str) -> None:
        self.why_not = self.why_not or reason

    def diagnose(self, error: BaseException) -> Diagnosis:
        """What an exception says about the device."""
        return DeviceErrors({}).diagnose(error)

    # The training.

    def note(self, kind: int, name: str, values: Sequence[Any], what: str = "") -> bool:
        return False

    def report(self, equal: list[str], not_proved: list[str]) -> None:
        self.not_proved += not_proved

    def refuse(self, why: str) -> None:
        raise NotRepeatedError(why)

    def weights(self) -> Sequence[torch.Tensor]:
        return list(self.optimizers.parameters())


class Capture:
    """Records scripts, and goes on with what was recorded: once per process.

    limit_mib    room for one record, without what the optimizers update
    not_proved   after a replay: what may be other than it was in the recorded run
    """

    def __init__(self, limit_mib: int = 1024) -> None:
        slot_bytes = limit_mib << 20
        recorder = Recorder(Recorder.create(slot_bytes), slot_bytes)
        self._host = Alone(recorder)
        self._recorder = recorder
        self._every = 0
        self._path = ""
        self._tensors: dict[str, Any] = {}
        self._is_going: Any = None  # the optimizer that steps

    @property
    def not_proved(self) -> list[str]:
        return self._host.not_proved

    def record(self, script: str, path: str, every: int = 1, arguments: Sequence[str] = ()) -> None:
        """Run a script to its end; before each `every`th optimizer step its state replaces the file at `path`.

        Raises what the script raises, and CannotRecordError in its step.
        """
        self._run(script, arguments, path, every, lambda: None)

    def replay(self, script: str, path: str, every: int = 0, arguments: Sequence[str] = ()) -> None:
        """Run a script to its end, from the step on before which the file at `path` was written.

        every   of the optimizer steps from there on, after how many the file is replaced; 0: it is left alone

        Raises NotRepeatedError if the script does not come to that state, and what the script raises.
        """
        kept = _read(path)
        self._recorder.restore(kept["recorder"])
        records, before = Replay.records_of(self._recorder, kept["boundary"])
        self._tensors = kept
        optimizers = self._host.optimizers
        self._run(script, arguments, path, every, lambda: Replay(self._host, optimizers, records[-1], before))

    def _run(
        self, script: str, arguments: Sequence[str], path: str, every: int, make: Callable[[], Replay | None]
    ) -> None:
        host = self._host
        self._path, self._every = os.path.abspath(path), every
        full = ast_transform.full_path(script)
        _leave_out_callers(fail_open.caller(), full)
        for folder in (os.path.dirname(full), ast_transform.directory_of(full)):
            whose.add_user_directory(folder)
        ast_transform.install()
        early.listen()
        with self._installed(), _as_main(ast_transform.directory_of(full)):
            begin(host)
            leave_in_children()
            Clock.is_whole = True  # there is no evidence of the next step
            try:
                replay = make()
                Effects(self._recorder).begin(is_replay=replay is not None)
                if replay is not None:
                    host.mode = replay
                    replay.begin()
                run([full, *arguments])
                host.mode.refuse_end()
            finally:
                Effects.end_set_up()
                if not host.mode.is_live:
                    host.mode.output.end()
                end()
                installing.forget()
                Clock.is_whole = False

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        installing.install()
        patching.replace(PATCHES)
        kind: Any = torch.optim.Optimizer
        original = kind.__init__
        kind.__init__ = fail_open.guard("Optimizer.__init__", original, self._host.optimizers.wrap_init)
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            kind.__init__ = original

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_going not in (None, optimizer):
            return  # a step inside another optimizer's
        self._is_going = optimizer
        host, frame = self._host, sys._getframe(1)
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            raise CannotRecordError("the optimizer's step is given a closure: call step() without one")
        if not host.mode.is_live:
            host.mode.before_step(frame, None, optimizer)
            if host.mode.is_at_target:
                self._go_live(host.mode)
            return
        self._record(optimizer, frame)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_going is optimizer:
            self._is_going = None
            if self._host.mode.is_live:
                self._host.applied += 1
                Effects.end_set_up()

    def _go_live(self, replay: Replay) -> None:
        """The script is where it was recorded, before the step: load what the optimizers update."""
        self._load()
        replay.findings.report()
        replay.unmute()
        self._host.mode = Live()
        self._host.applied = replay.boundary - 1

    def _load(self) -> None:
        optimizers, kept = self._host.optimizers, self._tensors
        tensors = optimizers.stepped_tensors()
        if [_form(tensor) for tensor in tensors] != [form for form, _ in kept["tensors"]]:
            raise NotRepeatedError("the optimizers hold other tensors than in the recorded run")
        with torch.no_grad():
            for tensor, packed in zip(tensors, kept["tensors"], strict=True):
                tensor.copy_(_unpacked(packed))
            for parameter, packed in zip(optimizers.parameters(), kept["gradients"], strict=True):
                parameter.grad = None if packed is None else _unpacked(packed).to(parameter.device)
        self._tensors = {}

    def _record(self, optimizer: torch.optim.Optimizer, frame: FrameType) -> None:
        host, recorder = self._host, self._recorder
        boundary = host.applied + 1
        steps = host.optimizers.steps(optimizer)
        with room_to_walk():
            record, blobs, _ = recording.describe(host, boundary, frame, steps)
            head = pack(record)
        why_not = host.why_not or Effects.why_not_noted() or record.unfollowed
        if why_not:
            raise CannotRecordError(why_not)
        recorder.write(boundary, head, blobs)
        if boundary == 1 or recorder.read_first() is None:
            recorder.write_first(boundary, head, blobs)
        if self._every and boundary % self._every == 0:
            if refused := [sentence for sentence, is_needed in refusals(read_head(head)) if sentence and is_needed]:
                raise CannotRecordError("; ".join(refused))
            self._write(boundary)

    def _write(self, boundary: int) -> None:
        optimizers = self._host.optimizers
        gradients = [parameter.grad for parameter in optimizers.parameters()]
        kept = {
            "boundary": boundary,
            "recorder": self._recorder.export(boundary),
            "tensors": [_packed(tensor) for tensor in optimizers.stepped_tensors()],
            "gradients": [None if gradient is None else _packed(gradient) for gradient in gradients],
        }
        new = f"{self._path}.new"
        with open(new, "wb") as file:
            file.write(msgpack.packb(kept))
        os.replace(new, self._path)


def _form(tensor: torch.Tensor) -> list[Any]:
    return [dtype_name(tensor.dtype), list(tensor.shape)]


def _packed(tensor: torch.Tensor) -> list[Any]:
    return [_form(tensor), bytes(bytes_of(tensor))]


def _unpacked(packed: list[Any]) -> torch.Tensor:
    (dtype, shape), raw = packed
    return tensor_of(dtype, shape, raw)


def _read(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        kept: dict[str, Any] = msgpack.unpackb(file.read(), strict_map_key=False)
    return kept


def _leave_out_callers(frame: FrameType | None, script: str) -> None:
    """Whoever has called `Capture` runs the script, and is no part of it."""
    while frame is not None:
        if frame.f_code.co_filename != script:
            whose.leave_out(frame.f_code.co_filename)
        frame = frame.f_back


@contextlib.contextmanager
def _as_main(folder: str) -> Iterator[None]:
    """What the script finds as Python itself would leave it, and afterwards what was there before."""
    main, arguments, path = sys.modules["__main__"], sys.argv, list(sys.path)
    sys.path[0] = folder
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv, sys.path[:] = main, arguments, path
