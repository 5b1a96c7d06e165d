"""Types and functions as a user's script would define them: this file counts as the user's in the tests of values."""

from __future__ import annotations

import enum
import functools
import itertools
import queue
import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DistributedSampler, IterableDataset, Sampler, get_worker_info


class Meter:
    """A running average, as half of all training scripts have one."""

    total_made = 0

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0
        self.values: list[float] = []

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1
        self.values.append(value)


class Bare:
    """Nothing yet."""


class BareInbox(queue.SimpleQueue):  # type: ignore[type-arg]
    """All that it holds is C's."""

    __slots__ = ()


class Holder:
    """Lets go of something when it goes."""

    def __del__(self) -> None: ...


@dataclass
class State:
    step: int = 0
    best: float = float("inf")
    history: list[float] = field(default_factory=list)


class SlotsNamedTwice:
    """Has a place for each name of the list."""

    __slots__ = ["best", "best", "step"]

    def __init__(self, step: int, best: float) -> None:
        self.step, self.best = step, best

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True)
class FrozenState:
    step: int = 0
    tokens: int = 0


@dataclass(slots=True)
class SlottedState:
    step: int = 0
    best: float = 0.0


class Stage(enum.Enum):
    WARM_UP = 1
    MAIN = 2


class Point(NamedTuple):
    x: float
    y: float


class Saver:
    """As ignite's Checkpoint: its tuple's class does not know that it is in another one."""

    Item = NamedTuple("Item", [("priority", float), ("filename", str)])  # noqa: UP014


class NamedCounts(dict):  # type: ignore[type-arg]
    """A dict with something of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.updates = 0


class Net(torch.nn.Module):
    """A module with a buffer, and with plain attributes that training changes."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.drop = torch.nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0
        self.recent: deque[int] = deque(maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.recent.append(self.calls)
        return self.drop(self.norm(self.inner(x)))


class CountingSgd(torch.optim.SGD):
    """An optimizer of the user's own, with a counter that decides what it does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.lookahead_steps = 0


class Trainer:
    def __init__(self) -> None:
        self.epoch = 0
        self.state = State()
        self.meters = {"loss": Meter(), "accuracy": Meter()}
        self.model = Net()
        self.schedule: Any = None


def make_counter() -> Any:
    """A function with state in its closure."""
    count = 0

    def counter() -> int:
        nonlocal count
        count += 1
        return count

    return counter


def count_up(start: int) -> Iterator[int]:
    """A generator with state in its variables."""
    total = start
    while True:
        total += 1
        yield total


def first(values: list[int], count: int) -> Iterator[int]:
    """A generator expression whose iterators count, and end it."""
    return (value for _, value in zip(itertools.count(), itertools.islice(values, count), strict=False))


def doubled(values: list[int]) -> Iterator[int]:
    yield from (value * 2 for value in values)


def train(act: Callable[[list[FrameType]], None], start: int) -> dict[str, Any]:
    """Two nested frames with variables of their own, shared cells, and a stop in the middle where `act` is called."""
    epochs_done = start
    seen = [start]
    names = {"run": f"run-{start}"}

    def one_step() -> tuple[int, float]:
        nonlocal epochs_done
        loss = start / 2
        epochs_done += 1
        inner = sys._getframe()
        assert inner.f_back is not None
        act([inner.f_back, inner])
        epochs_done += 100
        return epochs_done, loss

    result = one_step()
    return {"result": result, "epochs_done": epochs_done, "seen": seen, "names": names}


def wait_for(event: Any) -> None:
    """What a thread or process of the user's does here."""
    event.wait(60)


def counted_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """What stands around a loader, and counts."""
    number, seen = 0, []
    for batch in batches:
        number += 2
        seen.append(number)
        yield [number, len(seen), batch]


def numbered_batches(batches: Iterator[Any]) -> Iterator[Any]:
    return ([batch, number] for number, batch in enumerate(batches))


def copied(batches: Iterator[Any]) -> Iterator[Any]:
    return ([*batch] if isinstance(batch, list) else [batch] for batch in batches)


class CountedBatches:
    """The same as an object."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches = batches
        self.number = 0
        self.seen: list[int] = []

    def __iter__(self) -> CountedBatches:
        return self

    def __next__(self) -> Any:
        self.number += 1
        self.seen.append(self.number)
        return [self.number, len(self.seen), next(self.batches)]


class GatheredBatches(CountedBatches):
    """It sums up what is in the batches."""

    def __next__(self) -> Any:
        batch = next(self.batches)
        self.number += 2 * batch.item()
        return [self.number, batch]


class OwnShuffle(Sampler[int]):
    """Shuffles with a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(self.length).tolist()

    def __len__(self) -> int:
        return self.length


class OwnGenerator(OwnShuffle):
    """What torch's samplers call so is a torch.Generator."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.generator = self.rng


class LibraryShuffle(Sampler[int]):
    """Not the user's own; what it shuffles is what the epoch before has left."""

    def __init__(self, length: int) -> None:
        self.indices = np.arange(length)
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.indices)
        return iter(self.indices % 24)

    def __len__(self) -> int:
        return len(self.indices)


LibraryShuffle.__module__ = "torchmetrics"


class Drawn:
    """What a sampler gives in an epoch, by number."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)


class SharedOut(DistributedSampler[Any]):
    """Another sampler's indices, shared out to the ranks, as frameworks do it."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(Drawn(sampler), num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        drawn = list(self.dataset.sampler)  # type: ignore[attr-defined]
        return iter([drawn[number] for number in super().__iter__()])


class OwnBatches(OwnShuffle):
    """A batch sampler in the same manner."""

    def __iter__(self) -> Iterator[Any]:
        order = self.rng.permutation(self.length).tolist()
        for first in range(0, self.length, 2):
            yield order[first : first + 2]


class CountedStream(IterableDataset[Any]):
    """A stream that is another one in each epoch, which it counts itself."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        info = get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, by):
            yield torch.tensor([index, 100 * self.epoch])


@dataclass
class Sentence:
    """A batch as an object."""

    ids: torch.Tensor
    words: list[str]


def make_noise(limit: int | None = 128) -> Any:
    """A cached function that draws."""

    @functools.lru_cache(limit)
    def noise(start: Any = 0, *, number: Any = 0) -> float:
        return random.random() + len(str((start, number)))

    return noise


class Cached:
    @functools.lru_cache  # noqa: B019 - as scripts do
    def noise(self, number: int) -> float:
        return random.random() + number


touched: list[str] = []  # what was called of the classes below


def _touchy(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        touched.append(name)
        raise KeyError(name)

    return method


_OVERRIDDEN = (
    "keys values items __iter__ __getitem__ __setitem__ __contains__ __len__ __bool__ __eq__ __getattr__ __str__"
)
_methods = {name: _touchy(name) for name in _OVERRIDDEN.split()} | {"__class__": property(_touchy("__class__"))}


class TouchyDict(dict):  # type: ignore[type-arg]
    """A registry that loads what it is asked for."""

    locals().update(_methods)


class TouchyOrder(OrderedDict):  # type: ignore[type-arg]
    locals().update(_methods)


class TouchyCounter(defaultdict):  # type: ignore[type-arg]
    locals().update(_methods)
    default_factory = property(_touchy("default_factory"))  # type: ignore[assignment]


class TouchyList(list):  # type: ignore[type-arg]
    locals().update(_methods)


class TouchySet(set):  # type: ignore[type-arg]
    locals().update(_methods)


class TouchyText(str):
    locals().update({name: method for name, method in _methods.items() if name != "__getitem__"})
    __slots__ = ()


class Touchy:
    """Neither its attributes nor its class can be asked for."""

    __slots__ = ("__dict__", "slot")
    locals().update(_methods)

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "number", number)
        object.__setattr__(self, "slot", [number])

    __getattribute__ = _touchy("__getattribute__")
    __setattr__ = _touchy("__setattr__")


def held_by(one: Touchy) -> Any:
    return object.__getattribute__(one, "number"), object.__getattribute__(one, "slot")


class Link:
    def __init__(self, number: int, following: Any) -> None:
        self.number, self.next = number, following


class WriterThread(threading.Thread):
    """Writes what comes through a queue, as TensorBoard's does."""

    def __init__(self, entries: Any, lines: list[Any], answers: Any = None) -> None:
        super().__init__(name="writer", daemon=True)
        self.entries, self.lines, self.answers = entries, lines, answers
        self.written = 0

    def run(self) -> None:
        while (entry := self.entries.get()) is not None:
            self.lines.append(entry)
            self.written += 1
            if self.answers is not None:
                self.answers.put(entry)


class EventWriter:
    """What the script itself holds of it."""

    def __init__(self, answers: Any = None) -> None:
        self.entries: Any = queue.Queue()
        self.thread = WriterThread(self.entries, [], answers)
        self.thread.start()

    def add(self, entry: Any) -> None:
        self.entries.put(entry)

    def close(self) -> None:
        self.entries.put(None)
        self.thread.join(10)


def applied_twice(module: torch.nn.Module) -> Any:
    """A function that holds a module."""
    return lambda x: module(module(x))


class _OwnWays:
    """Methods that do something when a script asks."""

    def __iter__(self) -> Any:
        raise AssertionError("asked for the items")

    def __len__(self) -> int:
        raise AssertionError("asked for the length")

    def values(self) -> Any:
        raise AssertionError("asked for the values")


class LazyTable(_OwnWays, OrderedDict):  # type: ignore[type-arg]
    pass


class LazyList(_OwnWays, list):  # type: ignore[type-arg]
    pass


class LazySet(_OwnWays, set):  # type: ignore[type-arg]
    pass
