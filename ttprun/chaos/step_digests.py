"""The chain of digests that each step of a rank leaves with --trace: a line of text a step, of 200 bytes at most.

A tracer is a listener of `ttprun.introspect.stages`. A step's line is written in one go, before the record that lets
the others take the step: a rank that is killed later has left it, and of one that is killed earlier the replacement
writes it. `chaos/trial/compare.py` reads the lines; its LINKS say what each letter stands for. Begin with
`Tracer.reached`.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.data import dataloader

from ttprun.device import accelerator
from ttprun.introspect import fail_open, random_state
from ttprun.introspect.current_rank import Rank, current
from ttprun.introspect.model_tensors import all_of, local_of
from ttprun.introspect.ownership import location_key
from ttprun.introspect.safe_reads import is_a
from ttprun.introspect.tensor_bytes import Unseen, content_of
from ttprun.tensors import holdings, optimizer_registry, replicated

_MOST_PARTS = 10  # of the parameters, whose gradients have a digest of their own
_LARGE_BYTES = 1 << 26  # weights are hashed the more seldom, the more there are
_PLAIN = (int, float, complex, str, bytes, bytearray, type(None), torch.dtype, torch.device)
_tracer: Tracer | None = None


def trace(path: str, rank: int) -> Tracer:
    """The listener of this process; see `Tracer`."""
    global _tracer
    _tracer = Tracer(path, rank)
    return _tracer


def begin_run() -> None:
    """A run of the script begins."""
    if _tracer is not None:
        _tracer.begin()


def end_run(session: Rank) -> None:
    """This process leaves before its script has ended."""
    if _tracer is not None:
        _tracer.note(session, "exit")


class Tracer:
    """The listener of a rank whose steps leave digests.

    path    of the trace; all ranks of the node append to it
    """

    def __init__(self, path: str, rank: int) -> None:
        self._path, self._rank = path, rank
        self._links: dict[str, str] = {}
        self._rolling: defaultdict[str, Any] = defaultdict(xxhash.xxh3_64)
        self._batches = self._losses = self._samples = 0
        self._untouched: set[str] = set()
        self._said: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        self._parameters = -1
        self._follow_loaders()
        self._follow_backward()

    def begin(self) -> None:
        """A run of the script begins. Generators that are neither seeded nor drawn from have the system's states.

        A job that resumes has those of the run before, whose digests are in the trace.
        """
        self._untouched = {_digest(state) for state in random_state.capture().items()}
        self._new["untouched"] = sorted(self._untouched)
        with contextlib.suppress(OSError, ValueError), open(self._path, encoding="utf-8") as file:
            own = (line.split(" ", 3)[3] for line in file if line.startswith(f"@ {self._rank} "))
            self._untouched.update(*(json.loads(said).get("untouched", ()) for said in own))
        self._forget_step()

    def reached(self, moment: str) -> None:
        """A thread has come to a moment."""
        session = live()
        if session is not None and moment in ("before_step", "after_step", "exit"):
            self.note(session, moment)

    def reached_step_end(self) -> None:
        """Optimizer.step is over; what it leaves is noted later."""

    def connected(self, exchange: Any, connection: Any, group_name: str, rank: int) -> None:
        """A process group has a new connection, which leaves nothing."""

    def reached_collective(self, op: str, inputs: Any) -> bool:
        """A collective is about to be issued; in a backward pass it is given what this rank alone has computed."""
        if live() is not None and torch._C._current_graph_task_id() != -1:
            with contextlib.suppress(Exception), Unseen():
                feed(self._rolling["i"], [op, inputs])
        return False

    def _forget_step(self) -> None:
        self._links.clear()
        self._rolling.clear()
        self._batches = self._losses = self._samples = 0

    def note(self, session: Rank, moment: str) -> None:
        """The main thread has come to a moment before or after a step, or to the end."""
        with contextlib.suppress(Exception), Unseen():  # what cannot be noted is not compared; training goes on
            self._note_moment(session, moment)

    def _note_moment(self, session: Rank, moment: str) -> None:
        if moment == "after_step":
            self._forget_step()
            self._note_weights(session, "p")
        elif moment == "exit":
            self._write(session.applied, "end")
        else:
            self._note_beginning(session)
            self._note_weights(session, "w")
            self._note_gradients("c", "")
            groups = [group.settings for made in optimizer_registry.optimizers() for group in all_of(made)]
            settings = [{name: value for name, value in each.items() if name != "params"} for each in groups]
            self._links["h"] = _digest(settings)
            self._note_surroundings()
            self._write(session.applied, f"{self._batches}/{self._losses}")

    def _note_weights(self, session: Rank, link: str) -> None:
        every = 1 + optimizer_registry.weights_bytes() // _LARGE_BYTES
        if session.applied % every == 0 and optimizer_registry.optimizers():
            self._links[link] = _digest(holdings.in_full(None, has_settings=False))

    def _note_beginning(self, session: Rank) -> None:
        """The first thing of a step: how it finds the random numbers, and the weights."""
        if "o" not in self._links:
            self._links["o"] = self._random()
            if "p" not in self._links:
                self._note_weights(session, "p")

    def _note_gradients(self, link: str, parts: str) -> None:
        """The digest of all gradients; under the letter `parts`, if it is one, a short one of each part of them."""
        gradients = [parameter.grad for parameter in optimizer_registry.parameters()]
        if any(gradient is not None for gradient in gradients):
            self._links[link] = _digest(gradients)
            if parts:
                size = -(-len(gradients) // _MOST_PARTS)
                cut = (gradients[at : at + size] for at in range(0, len(gradients), size))
                self._links[parts] = "".join(_digest(part)[:4] for part in cut)

    def _note_surroundings(self) -> None:
        """What may change kernels, and what the parts of the gradients are called."""
        now = {
            "torch": torch.__version__,
            "threads of torch": torch.get_num_threads(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "oneDNN": torch.backends.mkldnn.enabled,
            "device": str(optimizer_registry.device_in_use() or torch.backends.cpu.get_cpu_capability()),
        }
        keys = [key for key, *_ in replicated.rows()]
        if len(keys) != self._parameters:
            self._parameters, size = len(keys), -(-len(keys) // _MOST_PARTS)
            named = holdings.names(fail_open.caller())
            names = [named.get(key, key).removeprefix("module.") for key in keys]
            now["parameters"] = [" to ".join(dict.fromkeys((*names[at : at + size][:1], *names[at : at + size][-1:])))
                                 for at in range(0, len(names), size)]  # fmt: skip
        self._new |= {name: value for name, value in now.items() if self._said.get(name) != value}

    def _random(self) -> str:
        """Digest of the generators that the script has seeded or drawn from."""
        now = random_state.capture().items()
        return _digest([state for state in now if _digest(state) not in self._untouched])

    def _write(self, step: int, counted: str) -> None:
        """Add the line of this step, and what is new of the surroundings, in one write."""
        links = self._links | {letter: hasher.hexdigest()[:8] for letter, hasher in self._rolling.items()}
        for letter, same in (("w", "p"), ("c", "g")):
            if links.get(letter) == links.get(same):
                links.pop(letter, None)
        words = [str(self._rank), str(step), counted, *(letter + value for letter, value in links.items())]
        lines = [f"@ {self._rank} {step} {json.dumps(self._new)}"] if self._new else []
        self._said |= self._new
        self._new = {}
        append(self._path, "\n".join([*lines, " ".join(words), ""]))

    def _follow_loaders(self) -> None:
        """Note which samples loaders ask for, and the batches that they hand out on the main thread."""
        kind: Any = dataloader._BaseDataLoaderIter
        init, reset, next_index, advance = kind.__init__, kind._reset, kind._next_index, kind.__next__

        def made(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            with contextlib.suppress(Exception):
                self._meet(loader)
            init(iterator, loader, *args, **kwargs)

        def began(iterator: Any, *args: Any, **kwargs: Any) -> None:
            iterator._ttprun_samples = deque()
            reset(iterator, *args, **kwargs)

        def asked(iterator: Any) -> Any:
            samples = next_index(iterator)
            iterator.__dict__.setdefault("_ttprun_samples", deque()).append(samples)
            return samples

        def handed_out(iterator: Any) -> Any:
            before, session = iterator._num_yielded, live()
            if session is not None and threading.current_thread() is threading.main_thread():
                with contextlib.suppress(Exception), Unseen():
                    self._note_beginning(session)
                    self._links["q"] = self._random()
            batch = advance(iterator)
            if iterator._num_yielded == before:  # in a replay: something in the place of a batch that was used
                return batch
            samples = waiting.popleft() if (waiting := iterator.__dict__.get("_ttprun_samples")) else None
            if (session := live()) is not None and threading.current_thread() is threading.main_thread():
                with contextlib.suppress(Exception), Unseen():
                    self._note_batch(session, samples, batch)
            return batch

        kind.__init__, kind._reset, kind._next_index, kind.__next__ = made, began, asked, handed_out

    def _meet(self, loader: Any) -> None:
        """A loader is about to be iterated over: note how it is set, and what the step before it has left."""
        if (session := live()) is None:
            return
        self._note_beginning(session)
        where = location_key().partition("|")[0].rpartition("/")[2]
        for name in ("num_workers", "batch_size", "drop_last", "sampler", "dataset"):
            value = getattr(loader, name, None)
            shown = value if type(value) in (int, bool) else type(value).__name__
            if self._said.get(name := f"{name} of the DataLoader used at {where}") != shown:
                self._new[name] = shown

    def _note_batch(self, session: Rank, samples: Any, batch: Any) -> None:
        self._note_beginning(session)
        feed(self._rolling["x"], samples)
        feed(self._rolling["b"], batch)
        for sample in samples if isinstance(samples, list) else ():
            self._samples += int(_digest(sample), 16)
        self._links |= {"u": f"{self._samples % (1 << 32):08x}"}
        self._batches += 1

    def _follow_backward(self) -> None:
        backward = torch.autograd.backward

        def followed(tensors: Any, *args: Any, **kwargs: Any) -> None:
            session = live() if threading.current_thread() is threading.main_thread() else None
            if session is not None and not accelerator.is_capturing():
                with contextlib.suppress(Exception), Unseen():
                    self._note_loss(session, tensors)
            backward(tensors, *args, **kwargs)
            if session is not None and not accelerator.is_capturing():
                with contextlib.suppress(Exception), Unseen():
                    self._note_gradients("g", "G")

        torch.autograd.backward = followed

    def _note_loss(self, session: Rank, tensors: Any) -> None:
        self._note_beginning(session)
        self._links.setdefault("q", self._random())
        feed(self._rolling["l"], tensors)
        self._losses += 1
        first = tensors if is_a(tensors, torch.Tensor) else tensors[0]
        if first.numel() == 1:
            self._links["v"] = f"{first.item():.6g}"


def _digest(value: Any) -> str:
    hasher = xxhash.xxh3_64()
    feed(hasher, value)
    return hasher.hexdigest()[:8]


def feed(hasher: Any, value: Any) -> None:
    """Feed all tensors and plain values in a value to a digest; of another object its attributes."""
    if is_a(value, torch.Tensor):
        local = local_of(value).detach()
        hasher.update(f"{local.dtype} {list(value.shape)} {local.layout}".encode())
        if local.layout is torch.sparse_coo:
            feed(hasher, [local._indices(), local._values()])
        else:
            hasher.update(content_of(local if local.layout is torch.strided else local.to_dense()))
    elif is_a(value, dict):
        feed(hasher, [part for item in dict.items(value) for part in item])
    elif is_a(value, (list, tuple, set, frozenset)):
        hasher.update(f"{len(value)} of ".encode())
        for item in sorted(value, key=repr) if is_a(value, (set, frozenset)) else value:
            feed(hasher, item)
    elif is_a(value, _PLAIN):
        hasher.update(f"{value!r} ".encode())
    elif hasattr(value, "tobytes"):
        hasher.update(value.tobytes())
    else:
        hasher.update(type(value).__name__.encode())
        feed(hasher, getattr(value, "__dict__", None))


def live() -> Rank | None:
    """This process's session; None in a replay."""
    session = current()
    return session if session is not None and session.mode.is_live else None


def append(path: str | Path, text: str) -> None:
    """Add to a file in one write, so that a killed process leaves whole lines. Never raises: it is missed later."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
