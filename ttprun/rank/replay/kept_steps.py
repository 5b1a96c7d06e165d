"""Steps that are kept, and one of them taken again: one rank alone, in one process, without the other ranks.

A kept step is one folder (FILES), without a pickle: the state at the boundary with which it begins (tensors, and this
rank's records, as a checkpoint has them), and in their order the batches, losses and collectives of the step: a digest
of what this rank has put in, and the bytes of what a collective has given.

In a rank `session.keeper` is a `Keeper` (None: nothing is kept): `keep` at each boundary, `note`, `issue`, `complete`
and `gather` in between, `write` at the end. Another process gets the orders `Replay`, `LoadState` and `Resume` from
agent/node/step_again.py (`ttprun replay`, --verify-steps); the script runs as `Given` says.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgpack
import torch
import xxhash

from ttprun.capture.records.recorder import Recorder
from ttprun.groups.operations import OPERATIONS
from ttprun.groups.results import Answers
from ttprun.introspect import fail_open
from ttprun.introspect.current_rank import BATCH, LOSS, Mode, Rank
from ttprun.introspect.model_tensors import local_of
from ttprun.introspect.tensor_bytes import Unseen, bytes_of, comparable
from ttprun.protocol import from_rank
from ttprun.rank.verification import Verifier, stop_at_next_line
from ttprun.tensors import gradients, holdings
from ttprun.tensors.shares import SnapshotPart

FOLDER = "steps"  # in the directory of the run
STATE, STEP = FILES = ("state.safetensors", "step.msgpack")
RESULT = "taken-again.json"
FORMAT = 3
_OURS = str(Path(__file__).parents[2]) + os.sep
_NAMES = {BATCH: "batch", LOSS: "loss"}
_INPUT = "collective"
_KILL_LIMIT_S = 60.0
_OF_ENVIRONMENT = ("OMP_", "MKL_", "KMP_", "CUDA_", "CUBLAS_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "PYTHON")
_NOT_THE_SCRIPTS = (*(str(Path(module.__file__ or "").parent) + os.sep for module in (torch, os)), _OURS, "<")
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")


class _Step:
    """One step: what it begins with, what this rank has put in, and what was given to it.

    is_verified   another process takes it again, and the agent compares what all of them report
    rows          [sequence, what, of each tensor put in [digest, sum of its elements, digests of parts, number],
                  outputs or None] of each batch, loss and collective; sum and parts are "" unless it is verified
    after, names  digests of what the optimizers have made of the weights; the script's names by key and by id
    layouts       number of elements -> name and size of each parameter in a bucket of DDP that has so many, one by one
    reduced       id of a row -> the same of what FSDP2 reduces in it
    why_not       why it cannot be verified
    took_s        of the time of this rank's threads
    """

    def __init__(self, boundary: int, is_verified: bool) -> None:
        self.boundary, self.is_verified = boundary, is_verified
        self.memory: Any = None
        self.size_bytes = self.given_bytes = 0
        self.header: list[Any] = []
        self.records = b""
        self.rows: list[list[Any]] = []
        self.after: dict[str, tuple[str, str]] = {}
        self.names: defaultdict[Any, str] = defaultdict(lambda: "another parameter")
        self.layouts: defaultdict[int, deque[list[tuple[str, int]]]] = defaultdict(deque)
        self.reduced: dict[int, list[tuple[str, int]]] = {}
        self.is_gathered = False
        self.why_not = ""
        self.took_s = 0.0
        self.lock = threading.Lock()

    def add(self, sequence: str, what: str, values: Sequence[Any], parameters: Sequence[Any] = ()) -> list[Any]:
        """A new row, without outputs. `parameters`: of FSDP2's class, whose gradients the only value holds."""
        began_s = time.thread_time()
        with Unseen():
            digests = [self._digest_of(value) for value in comparable(values)]
        row = [sequence, what, digests, None if what not in _NAMES.values() else []]
        if parameters and self.is_verified:
            self.reduced[id(row)] = self._layout(parameters, values[0].numel())
        with self.lock:
            self.rows.append(row)
        self.took_s += time.thread_time() - began_s
        return row

    def begin(self, frame: FrameType, groups: Iterable[Any]) -> None:
        """It is verified: note which gradients the buckets of DDP models over these groups will hold."""
        self.names |= {key: name.removeprefix("module.") for key, name in holdings.names(frame, is_by_id=True).items()}
        for row in (row for group in groups for row in group.buckets.layouts()):
            layout = [(self.names[id(parameter)], parameter.numel()) for parameter in row]
            self.layouts[sum(size for _, size in layout)].append(layout)

    def _layout(self, parameters: Sequence[Any], size: int) -> list[tuple[str, int]]:
        """Of [ranks, elements of all shards] of FSDP2's parameters, so many elements; [] if it is not known."""
        if not all(hasattr(one, "padded_sharded_param_size") for one in parameters):
            return []  # FSDP1, or another release
        parts = [(self.names[id(one.sharded_param)], one.padded_sharded_param_size.numel()) for one in parameters]
        return parts * (size // (sum(elements for _, elements in parts) or size))

    def _digest_of(self, tensor: torch.Tensor) -> list[Any]:
        elements = local_of(tensor).detach().cpu()
        hasher, raw = xxhash.xxh3_64(f"{elements.dtype} {list(tensor.shape)}".encode()), bytes_of(elements)
        hasher.update(raw)
        total = parts = ""
        if self.is_verified and elements.is_floating_point():
            total = f"{elements.double().abs().sum().item():.8g}"
            parts = SnapshotPart.digests_of_parts(raw)
        return [hasher.hexdigest(), total, parts, tensor.numel()]

    def end(self, frame: FrameType | None) -> None:
        """The optimizers have stepped, or are about to. Raises what hashing raises.

        frame   innermost of the script, whose variables name the parameters
        """
        began_s = time.thread_time()
        with Unseen():
            self.after = holdings.in_full(None)
        if self.is_verified:
            self.names |= {key: name.removeprefix("module.") for key, name in holdings.names(frame).items()}
        self.took_s += time.thread_time() - began_s

    def report(self, session: Rank, why_not: str = "") -> None:
        """It is over, or goes no further: send what it has come to, a digest each."""
        counts: Counter[str] = Counter()
        rows, layouts = [], {}
        for row in self.rows:
            _, what, digests, _ = row
            kind = what if what in _NAMES.values() else f"input of {what.partition(' ')[0]}"
            for digest, total, parts, size in digests:
                counts[kind] += 1
                rows.append((name := f"{kind} {counts[kind]}", digest + parts, total))
                if layout := self.reduced.get(id(row)):
                    layouts[name] = layout
                elif what.startswith("allreduce ") and self.layouts[size]:
                    layouts[name] = self.layouts[size].popleft()
        for key, (weights, state) in self.after.items():
            name = self.names.get(key, key)
            rows += [(f"weights of {name}", weights, ""), (f"optimizer state of {name}", state, "")]
        self.is_verified = False
        session[SnapshotPart].report_step(
            session.channel,
            self.boundary,
            self.why_not or why_not,
            rows=tuple(rows),
            layouts=layouts,
            took_s=self.took_s,
        )


class Keeper:
    """Keeps steps of this rank in its memory: the newest ones, to be written to the directory of the run at its end
    (--keep-steps), and those that another process takes again meanwhile (--verify-steps).

    arguments     Python's, as in `to_rank.Welcome`
    """

    def __init__(self, session: Rank, arguments: Sequence[str]) -> None:
        self._session = session
        self._count = session.options.keep_steps  # beside the one that is under way
        self._limit_bytes = session.options.keep_steps_mib << 20  # the oldest are dropped
        self._arguments = list(arguments)
        self._step: _Step | None = None  # the one that is under way
        self._past: deque[_Step] = deque()
        self._spare: list[Any] = []

    def keep(self, boundary: int, frame: FrameType, optimizer: Any) -> None:
        """The step to this boundary is over, and the next one begins with what there is now. Raises nothing.

        frame   innermost of the main thread's: its variables name the models
        """
        session, last = self._session, self._step
        step = _Step(boundary, session[SnapshotPart].verified_at == boundary)
        try:
            if last is not None:
                last.end(frame)
            if step.is_verified:
                step.begin(frame, session.made.living.values())
            if self._count:
                self._begin(step, last, frame, optimizer)
        except Exception as error:  # training continues
            fail_open.raise_if_meant(error)
            self._give_up(str(error) or repr(error))
        if last is not None and last.is_verified:
            last.report(session, "" if last.is_gathered else "it has no record of its own")
        self._step = step if self._count or step.is_verified else None

    def _begin(self, step: _Step, last: _Step | None, frame: FrameType, optimizer: Any) -> None:
        """Keep what a step begins with, and the one before it; others only as far as there is room."""
        if last is not None:
            self._past.append(last)
        while len(self._past) > self._count:
            self._spare.append(self._past.popleft().memory)
        with gradients.kept_if_unknown(optimizer):
            step.memory, share = self._session[SnapshotPart].copy_all(frame, self._spare.pop() if self._spare else None)
        step.size_bytes, step.header = share.bytes, share.header
        step.records = msgpack.packb(self._session[Recorder].export(step.boundary))
        while (needed := step.size_bytes + sum(each.size_bytes + each.given_bytes for each in self._past)) > (
            self._limit_bytes
        ):
            if not self._past:
                limit = f"the limit is {self._limit_bytes >> 20} (keep_steps_mib)"
                raise MemoryError(f"one takes {needed >> 20} MiB, and {limit}")
            self._spare.append(self._past.popleft().memory)

    def _give_up(self, why: str) -> None:
        """The step that is under way is not verified, and no step is kept any more."""
        if self._step is not None:
            self._step.why_not = self._step.why_not or why
        if self._count:
            self._count = 0
            self._past.clear()
            self._session.channel.send(from_rank.Note(f"no step can be taken again from here on: {why}"))

    def note(self, kind: int, values: Sequence[Any]) -> None:
        """A batch has come, or a loss."""
        if kind in _NAMES and self._session.mode.is_live:
            self._add(_NAMES[kind], _NAMES[kind], values)

    def issue(self, entry: Any, inputs: Sequence[torch.Tensor]) -> None:
        """A collective or message is about to be issued."""
        entry.kept_row = self._add(entry.sequence, _what(entry), inputs, entry.parameters)
        if self._step is not None and (entry.is_apart or entry.op not in OPERATIONS):
            self._step.why_not = "it communicates on another thread, or by messages"

    def _add(self, sequence: str, what: str, values: Sequence[Any], of: Sequence[Any] = ()) -> list[Any] | None:
        try:
            return None if (step := self._step) is None else step.add(sequence, what, values, of)
        except Exception as error:
            fail_open.raise_if_meant(error)
            self._give_up(str(error) or repr(error))
            return None

    def complete(self, entry: Any) -> None:
        """Its outputs are there; the script does not know yet."""
        row, step, began_s = entry.kept_row, self._step, time.thread_time()
        if row is None or step is None:
            return
        if any(output.layout is not torch.strided for output in entry.outputs):
            self._give_up("sparse results of collectives are not kept")
            return
        try:
            row[3] = [bytes_of(output.cpu()).tobytes() for output in entry.outputs]
        except Exception as error:  # a device's, which the script meets as well; whoever waits for `entry` goes on
            self._give_up(str(error) or repr(error))
            return
        step.given_bytes += sum(map(len, row[3]))
        step.took_s += time.thread_time() - began_s

    def gather(self) -> None:
        """All operations before the optimizer's step have completed: if it is verified, it can be taken again now."""
        session, step = self._session, self._step
        if step is None or not step.is_verified:
            return
        try:
            if any(row[3] is None for row in step.rows):
                raise ValueError("a result has not come")
            content = {"format": FORMAT, "boundary": step.boundary, "rows": step.rows, "after": {}, "error": ""}
            with open(session.options.verified, "wb") as file:
                file.write(msgpack.packb(content))
            if session.options.verified_before:  # a weight may have changed since it was used
                step.end(fail_open.caller())
            step.is_gathered = True
        except Exception as error:  # e.g. no memory: this step is not verified
            fail_open.raise_if_meant(error)
            step.why_not = step.why_not or f"what its collectives have given cannot be kept ({error!r})"
        if session.options.verified_before:
            step.report(session)
            session[Verifier].await_verified(session, step.boundary)

    def write(self, error: str = "") -> None:
        """The run of the script is over: write what is kept to the run's directory. Raises nothing.

        error   that has ended it: then the step that it has ended is the newest; "": it has come to its end
        """
        steps = [*self._past, *([self._step] if error and self._step is not None else [])]
        try:
            for step in steps[-self._count :] if self._count else ():
                self._write(step, error if step is self._step else "")
        except Exception as failure:
            self._session.channel.send(from_rank.Note(f"its last steps could not be written: {failure!r}"))

    def write_nan(self) -> None:
        """A NaN was found in the step under way, before it is taken: keep that one, and no others from now on."""
        step, session = self._step, self._session
        if not session.options.keeps_nan or not self._count:
            return
        if step is None:
            self._give_up("NaN in the first step, which is not kept")
            return
        self._past, self._step = deque([step]), None
        self.write()
        self._count = 0
        session.channel.send(
            from_rank.Note(f"the step with NaN is kept: ttprun replay --rank {session.rank} --step {step.boundary + 1}")
        )

    def _write(self, step: _Step, error: str) -> None:
        session = self._session
        parent = Path(session.run_dir) / FOLDER
        parent.mkdir(mode=0o700, exist_ok=True)
        older = sorted(parent.glob(f"rank-{session.rank:05d}-*"))
        place = parent / f"rank-{session.rank:05d}-step-{step.boundary + 1:08d}"
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
            "environment": {k: v for k, v in os.environ.items() if k in _OF_RANKS or k.startswith(_OF_ENVIRONMENT)},
            "torch": torch.__version__,
            "record_limit_mib": session.options.record_limit_mib,
            "user_paths": list(session.options.user_paths),
            "follow": list(session.options.follow),
            "header": json.dumps(step.header),
            "records": step.records,
            "rows": step.rows,
            "after": step.after,
            "error": error,
        }
        (draft / STEP).write_bytes(msgpack.packb(content))
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        for folder in [each for each in older if each != place][: max(0, len(older) + 1 - self._count)]:
            shutil.rmtree(folder, ignore_errors=True)


class Given(Mode):
    """How the script runs in a step that is taken again: without other ranks, with what they gave.

    place   folder of the kept step; or file with what the collectives of a step that is verified have given
    debug   see `to_rank.Replay`

    It ends at the end of the step, at the first collective that is another one, or where nothing is kept: the process
    leaves what it has found in RESULT, or reports what it has computed to be compared by the agent, and is ended by it.
    """

    is_alone = True
    is_live = False

    def __init__(self, session: Rank, place: str, debug: str = "") -> None:
        self._session = session
        self._kept = read_step(Path(place))
        self.boundary = self._kept["boundary"]
        self._taken = _Step(self.boundary, bool(session.options.verified))
        self._rows: dict[str, deque[list[Any]]] = defaultdict(deque)
        for row in self._kept["rows"]:
            self._rows[row[0]].append(row)
        self._equal: Counter[str] = Counter()
        self._differing: list[str] = []
        self._lock = threading.Lock()
        session.keep_by(self)
        if debug:
            leave = partial(self._end, "it was left in the debugger")
            stop_at_next_line(sys._getframe(), _NOT_THE_SCRIPTS, debug, leave)

    @property
    def step(self) -> int:
        """As in Mode."""
        return int(self.boundary)

    newest_step = step

    def note(self, kind: int, values: Sequence[Any]) -> None:
        """A batch has come, or a loss: compare it."""
        if kind in _NAMES:
            self._compare(_NAMES[kind], self._next(_NAMES[kind], _NAMES[kind]), values)

    def answer(self, entry: Any) -> bool:
        """A collective: compare what this rank puts in, and give what it got."""
        row = self._next(entry.sequence, _what(entry))
        is_received = entry.op == "broadcast" and entry.group.is_receiver(entry.args)
        self._compare(_INPUT, row, [] if is_received else entry.own_inputs)
        if row[3] is None:
            self._end(f"the result of {entry.op} at {_place()} had not come")
        if [len(raw) for raw in row[3]] != [output.nbytes for output in entry.outputs]:
            self._end(difference=f"{entry.op} at {_place()} has results of other sizes")
        Answers.fill(entry.outputs, row[3])
        return True

    def _next(self, sequence: str, what: str) -> list[Any]:
        """The next row of a sequence; where there is none, or another one, the step cannot go on."""
        with self._lock:
            rows = self._rows[sequence]
            row = rows.popleft() if rows else None
        if row is not None and row[1] == what:
            return row
        if row is not None:
            self._end(difference=f"{what} at {_place()}, where the run has {row[1]}")
        if met := self._kept["error"]:
            self._end(difference=f"it has gone on where the run ended ({met}): {what} at {_place()}")
        self._end(difference=f"the run has no {what} at {_place()}")

    def _compare(self, kind: str, row: list[Any], values: Sequence[Any]) -> None:
        digests = self._taken.add(row[0], row[1], values)[2]
        with self._lock:
            if [digest for digest, *_ in digests] == [digest for digest, *_ in row[2]]:
                self._equal[kind] += 1
            else:
                what = f"what it puts into {row[1]}" if kind == _INPUT else f"the {kind}"
                self._differing.append(f"{what.strip()} at {_place()}")

    def leaves_step_out(self, frame: FrameType) -> bool | None:
        """As in Mode: a GradScaler decides by itself."""
        return None

    def begin_step(self, optimizer: Any) -> bool:
        """As in Mode; the step may be compared before the optimizer takes it."""
        if self._session.options.verified_before:
            self._taken.end(fail_open.caller())
            self._end()
        return False

    def after_step(self) -> None:
        """The step is over: compare what the optimizers have made of the weights."""
        expected, frame = self._kept["after"], fail_open.caller()
        self._taken.end(frame)
        now = {(key, at): digest for key, digests in self._taken.after.items() for at, digest in enumerate(digests)}
        before = {(key, at): digest for key, digests in expected.items() for at, digest in enumerate(digests)}
        others = [place for place in before if now.get(place) != before[place]]
        if expected and not others:
            self._equal["weights"] += 1
        for key, at in others[:1]:
            more = f", and {len(others) - 1} more" if len(others) > 1 else ""
            what = f"{('weights', 'optimizer state')[at]} of {holdings.names(frame).get(key, key)}{more}"
            self._differing.append(f"after the step: {what}")
        met = self._kept["error"]
        self._end(difference=f"the step has ended, where the run has met {met}" if met else "")

    def write(self, error: str = "") -> None:
        """The script has ended inside the step, as it may have in the run; as in Keeper."""
        met = self._kept["error"]
        if error != met or not error:
            self._differing.append(f"the script has ended: {error or 'no error'}, where the run met {met or 'none'}")
        if not self._session.options.verified:  # else the agent is sent the error
            self._leave("", f"the same error: {error}" if error == met else "")

    def _end(self, why_not: str = "", difference: str = "") -> NoReturn:
        """Leave the result, and end the process, from whatever thread.

        why_not     why the rest cannot be taken again; "": it was, or a difference has ended it
        difference  that has ended it; "": none
        """
        if self._session.options.verified:
            self._taken.report(self._session, why_not or difference)
            threading.Event().wait(_KILL_LIMIT_S)
        self._differing += [difference] if difference else []
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


def _place() -> str:
    """The line of the script, as "train.py:31"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def read_step(place: Path) -> dict[str, Any]:
    """What a kept step holds beside its tensors; see `Given`. Raises OSError, ValueError, LookupError."""
    file = place / STEP if place.is_dir() else place
    content: dict[str, Any] = msgpack.unpackb(file.read_bytes(), strict_map_key=False)
    if content["format"] != FORMAT:
        raise ValueError(f"{place} is of another version of ttprun")
    return content
