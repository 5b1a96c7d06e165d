"""Steps that are kept, and one of them taken again: one rank alone, in one process, without the other ranks.

A kept step is one folder (FILES), without a pickle: the state at the boundary with which it begins (tensors, and this
rank's records, as a checkpoint has them), and in their order the batches, losses and collectives of the step: a digest
of what this rank has put in, and the bytes of what a collective has given.

How it is called. In a rank: `session.keeper` is a `Keeper` (None: nothing is kept); `keep` at each boundary, `note`,
`issue` and `complete` in between, `write` when the run of the script is over. In a process of its own: the order
`to_rank.Replay(boundary, source=None, given=FOLDER)`, then `LoadState`, then `Resume`, as agent/node/step_again.py
gives them; the script then runs as `Given` says, which compares, and leaves what it has found in RESULT.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgpack
import torch
import xxhash

from ttprun.capture.records.recorder import Recorder
from ttprun.groups.operations import OPERATIONS, tensors_in
from ttprun.groups.results import Answers
from ttprun.introspect import fail_open
from ttprun.introspect.current_rank import BATCH, LOSS, Mode, Rank
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.tensor_bytes import Unseen, bytes_of, elements_of
from ttprun.protocol import from_rank
from ttprun.tensors import gradients, holdings, replicated
from ttprun.tensors.replicated import PostStepWeights
from ttprun.tensors.shares import SnapshotPart

FOLDER = "steps"  # in the directory of the run
STATE, STEP = FILES = ("state.safetensors", "step.msgpack")
RESULT = "taken-again.json"
FORMAT = 1
_OURS = str(Path(__file__).parents[2]) + os.sep
_NAMES = {BATCH: "batch", LOSS: "loss"}
_INPUT = "collective"
_OF_ENVIRONMENT = ("OMP_", "MKL_", "KMP_", "CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "PYTHON")
_NOT_THE_SCRIPTS = (*(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, os)), _OURS, "<")
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")


def folder_of(rank: int, step: int) -> str:
    """The name of the folder of a kept step."""
    return f"rank-{rank:05d}-step-{step:08d}"


def _digest_of(values: Sequence[Any]) -> str:
    """Of all tensors among these, whole."""
    hasher = xxhash.xxh3_64()
    for value in values:
        if isinstance(value, torch.Tensor):
            elements = elements_of(local_of(value).detach())
            hasher.update(f"{elements.dtype} {list(value.shape)}".encode())
            hasher.update(bytes_of(elements))
    return str(hasher.hexdigest())


def _trained() -> dict[str, str]:
    """A digest of each tensor that the optimizers update, by its key."""
    return {part.key: _digest_of([part.tensor]) for part in replicated.describe()[1] if not part.is_gradient}


class _Step:
    """One step, kept: what it begins with, and what was given to it.

    rows   [sequence, what, digest of the inputs, outputs or None] of each batch, loss and collective
    """

    def __init__(self, boundary: int, memory: Any) -> None:
        self.boundary = boundary
        self.memory = memory
        self.size_bytes = 0
        self.header: list[Any] = []
        self.records = b""
        self.trained: dict[str, str] = {}
        self.rows: list[list[Any]] = []
        self.given_bytes = 0


class Keeper:
    """Keeps the newest steps of this rank in its memory, and writes them to the directory of the run at its end.

    count         steps that are kept, beside the one that is under way
    limit_bytes   that all of them may take; the oldest are dropped
    arguments     Python's, as in `to_rank.Welcome`
    """

    def __init__(self, session: Rank, count: int, limit_bytes: int, arguments: Sequence[str]) -> None:
        self._session = session
        self._count, self._limit_bytes = count, limit_bytes
        self._arguments = list(arguments)
        self._steps: deque[_Step] = deque()  # the last one is under way
        self._spare: list[Any] = []
        self._lock = threading.Lock()

    def keep(self, boundary: int, frame: FrameType, optimizer: Any) -> None:
        """The step to this boundary is over, and the next one begins with what there is now. Raises nothing.

        frame   innermost of the main thread's: its variables name the models
        """
        try:
            while len(self._steps) > self._count:
                self._drop_oldest()
            memory = self._spare.pop() if self._spare else None
            with gradients.kept_if_unknown(optimizer):
                memory, share = self._session[SnapshotPart].copy_all(frame, memory)
            step = _Step(boundary, memory)
            step.size_bytes, step.header = share.bytes, share.header
            step.records = msgpack.packb(self._session[Recorder].export(boundary))
            with Unseen():
                step.trained = _trained()
            with self._lock:
                self._steps.append(step)
            while len(self._steps) > 1 and self._taken_bytes() > self._limit_bytes:
                self._drop_oldest()
            if (needed := self._taken_bytes()) > self._limit_bytes:
                limit = f"the limit is {self._limit_bytes >> 20} (keep_steps_mib)"
                raise MemoryError(f"one takes {needed >> 20} MiB, and {limit}")
        except Exception as error:  # training continues
            fail_open.raise_if_meant(error)
            self._give_up(str(error) or repr(error))

    def _taken_bytes(self) -> int:
        return sum(step.size_bytes + step.given_bytes for step in self._steps)

    def _drop_oldest(self) -> None:
        with self._lock:
            self._spare.append(self._steps.popleft().memory)

    def _give_up(self, why: str) -> None:
        self._session.keep_by(None)
        self._session.channel.send(from_rank.Note(f"no step can be taken again from here on: {why}"))

    def note(self, kind: int, values: Sequence[Any]) -> None:
        """A batch has come, or a loss."""
        if kind in _NAMES and self._session.mode.is_live:
            self._add(_NAMES[kind], _NAMES[kind], values)

    def issue(self, entry: Any, inputs: Sequence[torch.Tensor]) -> None:
        """A collective or message is about to be issued."""
        entry.kept_row = self._add(entry.sequence, _what(entry), inputs)

    def _add(self, sequence: str, what: str, values: Sequence[Any]) -> list[Any] | None:
        if not self._steps:
            return None
        try:
            with Unseen():
                row = [sequence, what, _digest_of(values), None]
        except Exception as error:
            self._give_up(f"what this rank puts in cannot be read: {error!r}")
            return None
        with self._lock:
            self._steps[-1].rows.append(row)
        return row

    def complete(self, entry: Any) -> None:
        """Its outputs are there; the script does not know yet."""
        row = entry.kept_row
        if row is None:
            return
        if any(not output.is_cpu or output.layout is not torch.strided for output in entry.outputs):
            self._give_up("results of collectives on a device, and sparse ones, are not kept")
            return
        row[3] = [bytes_of(output).tobytes() for output in entry.outputs]
        self._steps[-1].given_bytes += sum(map(len, row[3]))

    def write(self, error: str = "") -> None:
        """The run of the script is over: write what is kept to the run's directory. Raises nothing.

        error   that has ended it: then the step that it has ended is the newest; "": it has come to its end
        """
        steps = list(self._steps)
        following = {step.boundary: after for step, after in pairwise(steps)}
        kept = steps[-self._count :] if error else steps[:-1][-self._count :]
        try:
            for step in kept:
                self._write(step, following.get(step.boundary), error if step is steps[-1] else "")
        except Exception as failure:
            self._session.channel.send(from_rank.Note(f"its last steps could not be written: {failure!r}"))

    def _write(self, step: _Step, following: _Step | None, error: str) -> None:
        session = self._session
        parent = Path(session.run_dir) / FOLDER
        parent.mkdir(mode=0o700, exist_ok=True)
        older = sorted(parent.glob(f"rank-{session.rank:05d}-*"))
        place = parent / folder_of(session.rank, step.boundary + 1)
        draft = parent / f".{place.name}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(mode=0o700)
        with open(draft / STATE, "wb") as file:
            file.write(step.memory.read(0, step.size_bytes))
        content = {
            "format": FORMAT,
            "boundary": step.boundary,
            "rank": session.rank,
            "local_rank": session.local_rank,
            "world_size": session.world_size,
            "local_world_size": session.ranks_here,
            "arguments": self._arguments,
            "cwd": os.getcwd(),
            "environment": _environment(os.environ),
            "torch": torch.__version__,
            "record_limit_mib": session.options.record_limit_mib,
            "user_paths": list(session.options.user_paths),
            "follow": list(session.options.follow),
            "header": json.dumps(step.header),
            "records": step.records,
            "rows": step.rows,
            "trained": following.trained if following is not None else {},
            "error": error,
        }
        (draft / STEP).write_bytes(msgpack.packb(content))
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        for folder in [each for each in older if each != place][: max(0, len(older) + 1 - self._count)]:
            shutil.rmtree(folder, ignore_errors=True)


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that say which rank this is, and those by which libraries choose how they compute."""
    return {name: value for name, value in variables.items() if name in _OF_RANKS or name.startswith(_OF_ENVIRONMENT)}


class Given(Mode):
    """How the script runs in a step that is taken again: without other ranks, with what they gave.

    folder   of the kept step

    It ends the process at the end of the step, at the first collective that is another one, or where nothing is kept.
    """

    is_alone = True
    is_live = False

    def __init__(self, session: Rank, folder: str) -> None:
        self._session = session
        self._kept = read_step(Path(folder))
        self.boundary = self._kept["boundary"]
        self._rows: dict[str, deque[list[Any]]] = defaultdict(deque)
        for row in self._kept["rows"]:
            self._rows[row[0]].append(row)
        self._equal: Counter[str] = Counter()
        self._differing: list[str] = []
        self._lock = threading.Lock()
        session.keep_by(self)

    @property
    def step(self) -> int:
        """As in Mode."""
        return int(self.boundary)

    @property
    def newest_step(self) -> int:
        """As in Mode."""
        return int(self.boundary)

    def note(self, kind: int, values: Sequence[Any]) -> None:
        """A batch has come, or a loss: compare it."""
        if kind in _NAMES:
            self._compare(_NAMES[kind], self._next(_NAMES[kind], _NAMES[kind]), values)

    def answer(self, entry: Any) -> bool:
        """A collective: compare what this rank puts in, and give what it got."""
        row = self._next(entry.sequence, _what(entry))
        self._compare(_INPUT, row, _inputs_of(entry))
        if row[3] is None:
            self._end(f"the result of {entry.op} at {_place()} had not come")
        if [len(raw) for raw in row[3]] != [output.nbytes for output in entry.outputs]:
            self._differing.append(f"{entry.op} at {_place()} has results of other sizes")
            self._end("")
        Answers.fill(entry.outputs, row[3])
        return True

    def _next(self, sequence: str, what: str) -> list[Any]:
        """The next row of a sequence; where there is none, or another one, the step cannot go on."""
        with self._lock:
            rows = self._rows[sequence]
            row = rows.popleft() if rows else None
        if row is None and self._kept["error"]:
            self._differing.append(f"it has gone on where the run ended ({self._kept['error']}): {what} at {_place()}")
        elif row is None:
            self._differing.append(f"the run has no {what} at {_place()}")
        elif row[1] != what:
            self._differing.append(f"{what} at {_place()}, where the run has {row[1]}")
        else:
            return row
        self._end("")

    def _compare(self, kind: str, row: list[Any], values: Sequence[Any]) -> None:
        with Unseen():
            is_equal = _digest_of(values) == row[2]
        with self._lock:
            if is_equal:
                self._equal[kind] += 1
            else:
                what = f"what it puts into {row[1]}" if kind == _INPUT else f"the {kind}"
                self._differing.append(f"{what.strip()} at {_place()}")

    def leaves_step_out(self, frame: FrameType) -> bool | None:
        """As in Mode: a GradScaler decides by itself."""
        return None

    def after_step(self) -> None:
        """The step is over: compare what the optimizers have made of the weights."""
        expected = self._kept["trained"]
        if expected:
            self._session[PostStepWeights].note(self.boundary + 1)
            now = _trained()
            others = [key for key in expected if now.get(key) != expected[key]]
            names = holdings.names(fail_open.caller()) if others else {}
            if not others:
                self._equal["weights"] += 1
            for key in others[:1]:
                parameter, _, part = key.rpartition("/")
                more = f", and {len(others) - 1} more" if len(others) > 1 else ""
                self._differing.append(f"after the step: {part} of {names.get(parameter, parameter)}{more}")
        if self._kept["error"]:
            self._differing.append(f"the step has ended, where the run has met {self._kept['error']}")
        self._end("")

    def write(self, error: str = "") -> None:
        """The script has ended inside the step, as it may have in the run; as in Keeper."""
        met = self._kept["error"]
        if error != met or not error:
            self._differing.append(f"the script has ended: {error or 'no error'}, where the run met {met or 'none'}")
        self._leave("", f"the same error: {error}" if error == met else "")

    def _end(self, why_not: str) -> NoReturn:
        """Leave the result, and end the process, from whatever thread.

        why_not   why the rest cannot be taken again; "": it was, or a difference has ended it
        """
        self._leave(why_not, "")
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)

    def _leave(self, why_not: str, met: str) -> None:
        result = {"equal": self._equal, "differing": self._differing, "why_not": why_not, "met": met}
        with contextlib.suppress(OSError):
            Path(self._session.run_dir, RESULT).write_text(json.dumps(result), encoding="utf-8")


def _what(entry: Any) -> str:
    """The operation, with all that must agree between ranks: "allreduce RedOpType.SUM float32[161]"."""
    signature = " ".join(entry.signature.split())
    return signature if entry.op in OPERATIONS else f"{entry.op}, {signature}"


def _inputs_of(entry: Any) -> list[torch.Tensor]:
    """What this rank puts into an operation, as `ManagedGroup.enter` is given it."""
    if entry.op not in OPERATIONS:  # a message
        return tensors_in(entry.args[0]) if entry.op == "send" else []
    at, _ = OPERATIONS[entry.op]
    if at is None or (entry.op == "broadcast" and entry.group.is_receiver(entry.args)):
        return []
    return tensors_in(entry.args[at])


def _place() -> str:
    """The line of the script, as "train.py:31"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def read_step(folder: Path) -> dict[str, Any]:
    """What a kept step holds beside its tensors. Raises OSError, ValueError, LookupError."""
    content: dict[str, Any] = msgpack.unpackb((folder / STEP).read_bytes(), strict_map_key=False)
    if content["format"] != FORMAT:
        raise ValueError(f"{folder} is of another version of ttprun")
    return content
