"""What scripts keep in variables, kind by kind: what a step changes of it is recorded, and comes back."""

from __future__ import annotations

import argparse
import array
import collections
import datetime
import decimal
import itertools
import logging
import math
import multiprocessing
import operator
import pathlib
import queue
import random
import re
import threading
import time
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from tests.capture import user_values
from tests.capture.user_values import (
    Bare,
    CountingSgd,
    FrozenState,
    Holder,
    Meter,
    NamedCounts,
    Net,
    Point,
    Saver,
    SlotsNamedTwice,
    SlottedState,
    Stage,
    State,
    Trainer,
    count_up,
    doubled,
    first,
)
from tests.capture.values.carrying import LARGE, LONG, Scope, are_alike, big, carry, is_refused, not_proved, record
from ttprun.capture import values
from ttprun.capture.records.packing import MISSING
from ttprun.capture.values import CannotRestoreError
from ttprun.capture.values.changes import Clock

Change = Callable[[Any], Any]
BOUNDARIES = 4


class Row(NamedTuple):
    """One kind of value.

    make         as the script's set-up makes it
    change       what a step does with it; it stays the same object
    other        or what a step puts in its place
    ask          what of it counts
    may_refuse   a recovery may also be refused, with the reason
    """

    make: Callable[[], Any]
    change: Change | None = None
    other: Callable[[], Any] | None = None
    ask: Change = repr
    may_refuse: bool = False

    def changed(self, made: Any) -> Any:
        """What it is after a step."""
        if self.change is None:
            return self.other() if self.other is not None else made
        self.change(made)
        return made


def replaced(here: Any, lost: Any, ask: Change = repr) -> Row:
    """A row of values that never change themselves."""
    return Row(lambda: here, other=lambda: lost, ask=ask)


ROWS: dict[str, Row] = {}

SCALARS = [0, -1, 1 << 62, (1 << 64) - 1, 1 << 64, -(1 << 80), 10**300, True, "", "ü\n", b"\x00\xff", -0.0, 1e-310,
           float("inf"), float("-inf"), math.nan, complex(1, -2), [None, math.nan], Stage.MAIN, ...]  # fmt: skip
ROWS |= {f"scalar {value!r:.20}": replaced("something else", value) for value in SCALARS}

ROWS |= {
    "path": replaced(None, pathlib.Path("best-12.pt")),
    "another path": replaced(pathlib.Path("a"), pathlib.Path("b")),
    "datetime": replaced(datetime.datetime(2026, 1, 1), datetime.datetime(2026, 1, 2)),
    "time zone": replaced(None, datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)),
    "timedelta": replaced(datetime.timedelta(0), datetime.timedelta(seconds=9)),
    "local time": replaced(time.gmtime(0), time.gmtime(5)),
    "decimal": replaced(decimal.Decimal("0.5"), decimal.Decimal("1.5")),
    "flags": replaced(re.IGNORECASE, re.IGNORECASE | re.DOTALL),
    "pattern": replaced(re.compile("b"), re.compile("a+")),
    "range": replaced(range(3), range(5)),
    "slice": replaced(slice(0, 3), slice(0, 9)),
    "open slice": replaced(slice(None), slice(1, None)),
    "dtype": replaced(torch.float32, torch.bfloat16),
    "device": replaced(torch.device("cpu"), torch.device("meta")),
    "shape": replaced(torch.zeros(2, 7).shape, torch.zeros(512, 784).shape, lambda shape: shape.numel()),
    "number of numpy's": replaced(1.5, np.float64(2.5)),
    "function": replaced(math.sin, math.cos),
    "function in place of a text": replaced("text", math.cos),
    "class": replaced(Meter, State),
    "itemgetter": replaced(operator.itemgetter(0), operator.itemgetter(1, "b", slice(3))),
    "attrgetter": replaced(operator.attrgetter("c"), operator.attrgetter("a.b")),
    "frozen object": replaced(FrozenState(), FrozenState(3, 99)),
}

ROWS |= {
    "tuple": replaced((1, 2.5, "b"), (1, 2.5, "c")),
    "empty tuple": replaced((1,), ()),
    "tuple of a list": Row(lambda: (1, (2, [4])), other=lambda: (1, (2, [3]))),
    "named tuple": replaced(Point(0.0, 0.0), Point(1.0, 2.0)),
    "named tuple of a class": replaced((), Saver.Item(1.0, "a.pt")),
    "result of max": Row(
        lambda: torch.max(torch.zeros(2, 2), dim=1), other=lambda: torch.max(torch.eye(2), dim=1),
        ask=lambda best: best.values.tolist(),
    ),
    "frozenset": replaced(frozenset({3}), frozenset({1, 2})),
    "frozenset of classes": replaced(None, frozenset({Meter})),
    "list": Row(lambda: [0], lambda x: x.__setitem__(slice(None), [1, [2, "a", None]])),
    "list, emptied": Row(lambda: [1, 2, 3], list.clear),
    "list of a list, appended to": Row(lambda: [1, [2]], lambda x: x[1].append(3)),
    "list that holds itself": Row(lambda: [0], lambda x: x.append(x)),
    "long list": Row(lambda: [0.5], lambda x: x.__setitem__(slice(None), [1.0] * 30_000)),
    "long list, an item of": Row(lambda: [0.0] * 100, lambda x: x.__setitem__(slice(50, 52), [-0.0, 0])),
    "long list, appended to": Row(lambda: [float(i) for i in range(40)], lambda x: x.extend([1.5, "t", None, (1, "p"), 1 << 70, [0]])),
    "long dictionary": Row(lambda: {0: 0.5}, lambda x: x.update(enumerate([1.0] * 30_000))),
    "long deque": Row(lambda: collections.deque([0.5]), lambda x: x.extend([1.0] * 30_000)),
    "deque": Row(lambda: collections.deque([1], maxlen=2), lambda x: x.extend([4, 5])),
    "dictionary": Row(lambda: {"a": 0, "b": {"c": [0.5]}}, lambda x: x["b"]["c"].__setitem__(0, 1.5)),
    "dictionary, other keys": Row(lambda: {"old": 2}, lambda x: (x.clear(), x.update({1: "x", (2, 3): "y", None: "z", b"k": 1, True: 4}))),
    "dictionary, in another order": Row(lambda: {"a": 1, "b": 2, "c": 3}, lambda x: x.update(a=x.pop("a"))),
    "dictionary, a key taken out": Row(lambda: {"a": 1, "b": [2], "c": Meter()}, lambda x: (x.pop("b"), x.pop("c"))),
    "dictionary by an enum": Row(lambda: {Stage.MAIN: 1}, lambda x: x.update({Stage.MAIN: 5})),
    "dictionary by a number of numpy's": Row(lambda: {np.int64(3): 1}, lambda x: x.update({np.int64(3): 5})),
    "dictionary by a frozenset": Row(lambda: {frozenset({1}): 1}, lambda x: x.update({frozenset({1}): 5})),
    "dictionary by a tuple of an enum": Row(lambda: {(Stage.MAIN, 1): 1}, lambda x: x.update({(Stage.MAIN, 1): 5})),
    "set": Row(lambda: {9}, lambda x: (x.clear(), x.update({1, 2, 3}))),
    "set of anything": Row(set, lambda x: x.update([(1, 2), "a", b"b", None]), ask=set),
    "set of classes": Row(lambda: {Meter}, lambda x: x.update({Bare, torch.nn.Linear}), ask=set),
    "counter": Row(lambda: collections.Counter("b"), lambda x: x.update("abca")),
    "default dictionary": Row(lambda: collections.defaultdict(list, a=[1], b=[]), lambda x: x["c"].append(2)),
    "ordered dictionary": Row(lambda: collections.OrderedDict(a=0, b=1), lambda x: x.move_to_end("a")),
    "user dictionary": Row(lambda: collections.UserDict(a=0), lambda x: x.update(a=1)),
    "chain map": Row(lambda: collections.ChainMap({"a": 0}), lambda x: x.update(a=1)),
    "dictionary of the script's": Row(lambda: NamedCounts({"a": 0}), lambda x: x.update(a=1)),
    "attribute of a dictionary of the script's": Row(NamedCounts, lambda x: setattr(x, "updates", 5), ask=vars),
    "view of a data set": Row(lambda: Subset(TensorDataset(torch.arange(4)), [0]), lambda x: x.indices.append(3), ask=lambda x: x.indices),
}  # fmt: skip


def _put_another_dictionary_in_place(one: Any) -> None:
    one.__dict__ = {"rate": 0.5, "name": "b"}


def _update_deep_inside(trainer: Trainer) -> None:
    trainer.epoch = 4
    trainer.state.history += [0.5, 0.25]
    trainer.meters["loss"].update(3.0)


def _options() -> argparse.Namespace:
    return argparse.Namespace(rate=0.5, count=1, name="a")


ROWS |= {
    "object": Row(Meter, lambda x: x.update(3.0), ask=vars),
    "object of objects": Row(
        Trainer, _update_deep_inside, ask=lambda x: (x.epoch, x.state, *map(vars, x.meters.values()))
    ),
    "object with slots": Row(SlottedState, lambda x: setattr(x, "step", 3)),
    "object that names a slot twice": Row(
        lambda: SlotsNamedTwice(1, 0.5), lambda x: setattr(x, "step", 6), ask=SlotsNamedTwice.__getstate__
    ),
    "namespace": Row(types.SimpleNamespace, lambda x: vars(x).update(lr=0.05, seen=3)),
    "what is local to a thread": Row(threading.local, lambda x: setattr(x, "calls", 3), ask=vars),
    "counter in a closure": Row(
        user_values.make_counter, lambda x: [x(), x()], ask=lambda x: x.__closure__[0].cell_contents
    ),
    "counter on a function": Row(user_values.make_counter, lambda x: setattr(x, "calls", 5), ask=vars),
    "attribute, another": Row(_options, lambda x: setattr(x, "rate", 0.25)),
    "attribute, an equal one of another type": Row(_options, lambda x: setattr(x, "count", True)),
    "attribute, a new one": Row(_options, lambda x: setattr(x, "fresh", None)),
    "attribute that is gone": Row(_options, lambda x: delattr(x, "name")),
    "attribute, by its dictionary": Row(_options, lambda x: vars(x).update(name="c")),
    "attributes in another dictionary": Row(_options, _put_another_dictionary_in_place),
    "attribute, an object in place of a number": Row(
        _options, lambda x: setattr(x, "rate", Meter()), ask=lambda x: type(x.rate), may_refuse=True
    ),
}

RANDOM: dict[str, tuple[Callable[[int], Any], Change]] = {
    "random.Random": (random.Random, lambda rng: [rng.random(), rng.gauss(0, 1)]),
    "numpy default_rng": (np.random.default_rng, lambda rng: [*rng.normal(size=3), *rng.integers(9, size=3)]),
    "numpy MT19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda rng: [*rng.normal(size=3)]),
    "numpy Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda rng: [*rng.normal(size=3)]),
    "numpy RandomState": (np.random.RandomState, lambda rng: [*rng.normal(size=3)]),
    "numpy RandomState over PCG64": (lambda seed: np.random.RandomState(np.random.PCG64(seed)), lambda rng: [*rng.normal(size=3)]),
    "torch.Generator": (lambda seed: torch.Generator().manual_seed(seed), lambda rng: torch.rand(3, generator=rng).tolist()),
}  # fmt: skip
ROWS |= {kind: Row(lambda make=make: make(1), draw, ask=draw) for kind, (make, draw) in RANDOM.items()}  # type: ignore[misc]


def in_a_loop(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:  # noqa: UP028
        yield item


def in_a_handler(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        try:
            raise KeyError
        except KeyError:
            yield item


def in_a_handler_that_leaves(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        try:
            raise KeyError
        except KeyError:
            yield item
            yield from items
            return


FIVE = [1, 2, 3, 4, 5]
ITERATORS: dict[str, Callable[[], Any]] = {
    "list iterator": lambda: iter(FIVE),
    "itertools.count": lambda: itertools.count(1),
    "itertools.cycle": lambda: itertools.cycle([1, 2, 3]),
    "itertools.chain": lambda: itertools.chain([1, 2], [3, 4, 5]),
    "itertools.islice": lambda: itertools.islice(FIVE, 5),
    "zip": lambda: zip("abcde", range(5), strict=True),
    "zip with a count": lambda: zip([1, 2, 3, 4], itertools.count(), strict=False),
    "map": lambda: map(abs, FIVE),
    "filter": lambda: filter(None, FIVE),
    "enumerate": lambda: enumerate("abcde"),
    "reversed": lambda: reversed(FIVE),
    "iterator over a dictionary": lambda: iter({1: 2, 3: 4, 5: 6, 7: 8}),
    "iterator over a range": lambda: iter(range(9)),
    "generator of a library's, in a loop": lambda: in_a_loop(FIVE),
    "generator of a library's, in a handler": lambda: in_a_handler(FIVE),
    "generator of a library's, in a handler, over a generator": lambda: in_a_handler(count_up(10)),
    "generator of a library's, in a handler that leaves the loop": lambda: in_a_handler_that_leaves(iter(FIVE)),
    "generator expression of the user's": lambda: doubled(FIVE),
}
ROWS |= {
    kind: Row(make, lambda x: [next(x), next(x)], ask=lambda x: [*itertools.islice(x, 3)], may_refuse=True)
    for kind, make in ITERATORS.items()
}

ROWS["generator expression that ends by a count"] = Row(
    lambda: first(FIVE, 4), other=lambda: (x := first(FIVE, 4), next(x), next(x))[0], ask=lambda x: [*x]
)

ARRAYS = {
    "float": np.arange(6.0).reshape(2, 3), "0-d": np.array(3), "float32 scalar": np.float32(1.5), "int64 scalar": np.int64(7),
    "bool scalar": np.bool_(True), "empty": np.zeros((0, 3)), "text": np.array(["ab", "c"]), "datetime": np.datetime64("2026-01-01"),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)), "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([1, "a"], dtype=object),
}  # fmt: skip
TENSORS = {
    "0-d": torch.tensor(1.5), "int": torch.arange(6).reshape(2, 3), "empty": torch.zeros(0, 4), "bool": torch.tensor([True, False]),
    "bfloat16": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "complex": torch.tensor([1 + 2j]), "conj": torch.tensor([1 + 2j]).conj(),
    "transposed": torch.arange(12.0).reshape(3, 4).t(), "half": torch.tensor([1.0]).half(), "nan": torch.tensor([float("nan")]),
}  # fmt: skip
BATCHES: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(30, 50),
    "transposed": lambda: torch.randn(30, 50).t(),
    "all of its storage but the first": lambda: torch.randn(31, 50)[1:],
    "a part of a large one": lambda: torch.randn(1000, 50)[3:33],
    "columns of a large one": lambda: torch.randn(1000, 50)[:60, :25],
    "conj": lambda: torch.randn(30, 50, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(30, 50, dtype=torch.complex64).conj().imag,
    "bytes": lambda: torch.randint(256, (5000,), dtype=torch.uint8),
    "learnt": lambda: torch.randn(30, 50, requires_grad=True),
}


def elements(value: Any) -> Any:
    return value.dtype, repr(value.tolist())


ROWS |= {
    f"array: {kind}": Row(lambda value=value: np.zeros_like(value), other=lambda value=value: value, ask=elements)  # type: ignore[misc]
    for kind, value in ARRAYS.items()
}
ROWS |= {
    f"tensor: {kind}": Row(lambda value=value: torch.full_like(value, 0), other=lambda value=value: value, ask=elements)  # type: ignore[misc]
    for kind, value in TENSORS.items()
}
ROWS |= {f"batch: {kind}": Row(make, other=make, ask=elements) for kind, make in BATCHES.items()}
ROWS |= {
    f"batch that no version counter shows to change: {kind}": Row(make, lambda x: x.data[-1:].fill_(77), ask=elements)
    for kind, make in BATCHES.items()
    if kind in ("plain", "transposed", "all of its storage but the first", "bytes", "learnt")
}
ROWS["sparse tensor"] = Row(
    lambda: torch.zeros(2, 2).to_sparse(), other=lambda: torch.eye(2).to_sparse(), may_refuse=True
)


def adam(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))], **options)


def settings_of(optimizer: torch.optim.Optimizer) -> Any:
    groups = [repr({key: item for key, item in group.items() if key != "params"}) for group in optimizer.param_groups]
    return groups, vars(optimizer).get("scale")


def _load_rate(optimizer: torch.optim.Optimizer) -> None:
    groups = [group | {"lr": 7.0} for group in optimizer.state_dict()["param_groups"]]
    optimizer.load_state_dict(optimizer.state_dict() | {"param_groups": groups})


OPTIMIZERS: dict[str, Change] = {
    "a rate": lambda x: x.param_groups[0].update(lr=0.25),
    "a pair of rates": lambda x: x.param_groups[0].update(betas=(0.5, 0.25), weight_decay=0.3),
    "a rate that is a tensor": lambda x: x.param_groups[0].update(lr=torch.tensor(0.5)),
    "a value of the script's": lambda x: x.param_groups[0].update(scale=2.0),
    "a group loaded": _load_rate,
    "an attribute": lambda x: setattr(x, "scale", 2.0),
}
ROWS |= {f"optimizer, {kind}": Row(adam, change, ask=settings_of) for kind, change in OPTIMIZERS.items()}
ROWS["optimizer, a group added"] = Row(
    adam, lambda x: x.add_param_group({"params": [torch.zeros(1)]}), ask=settings_of, may_refuse=True
)
ROWS["optimizer of the user's own"] = Row(
    lambda: CountingSgd([torch.nn.Parameter(torch.zeros(2))], lr=0.1),
    lambda x: setattr(x, "lookahead_steps", 4),
    ask=lambda x: x.lookahead_steps,
)

schedulers = torch.optim.lr_scheduler
SCHEDULES: dict[str, Change] = {
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 9], 0.5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=8),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.3, total_iters=8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 12, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=1.0, total_steps=20),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 1.0, step_size_up=3, mode="exp_range", gamma=0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.CosineAnnealingLR(o, 10)], [4]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.9)]
    ),
}  # fmt: skip


def optimizer_and(schedule: Change) -> Scope:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "schedule": schedule(optimizer)}


def rates(scope: Scope, steps: int, *metrics: float) -> list[Any]:
    found = []
    for at in range(steps):
        scope["optimizer"].step()
        scope["schedule"].step(*metrics[at : at + 1])
        group = scope["optimizer"].param_groups[0]
        found.append([group["lr"], group["momentum"], *scope["schedule"].get_last_lr()])
    return found


ROWS |= {
    kind: Row(lambda make=make: optimizer_and(make), lambda x: rates(x, 7), ask=lambda x: rates(x, 6))  # type: ignore[misc]
    for kind, make in SCHEDULES.items()
}
ROWS["ReduceLROnPlateau"] = Row(
    lambda: optimizer_and(lambda o: schedulers.ReduceLROnPlateau(o, patience=1, factor=0.5)),
    lambda x: rates(x, 3, 1.0, 0.9, 0.95),
    ask=lambda x: rates(x, 4, 0.95, 0.95, 0.95, 0.1),
)


def _scale(scaler: torch.amp.GradScaler) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()


ROWS["gradient scaler"] = Row(
    lambda: torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3), _scale, ask=lambda x: x.state_dict()
)


def _averaged() -> Any:
    torch.manual_seed(1)
    return torch.optim.swa_utils.AveragedModel(Net())


def _scored() -> Any:
    layer: Any = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    layer.score, layer.seen, layer.bounds = torch.zeros(4), [], {"low": 0}
    return layer


def _score(layer: Any) -> None:
    layer.score += 1
    layer.seen.append(3)
    layer.bounds["low"] = 5


def modes(model: torch.nn.Module) -> list[bool]:
    return [part.training for part in model.modules()]


ROWS |= {
    "model: buffers, attributes": Row(
        Net, lambda x: [x(torch.randn(4, 3)) for _ in range(5)],
        ask=lambda x: (x.calls, list(x.recent), [buffer.tolist() for buffer in x.buffers()]),
    ),
    "model: a layer in evaluation": Row(Net, lambda x: x.norm.eval(), ask=modes),
    "model: a layer that is frozen": Row(
        Net, lambda x: x.inner.requires_grad_(False), ask=lambda x: x.inner.weight.requires_grad, may_refuse=True
    ),
    "model: a dropout rate": Row(Net, lambda x: setattr(x.drop, "p", 0.1), ask=lambda x: x.drop.p),
    "model: an averaged copy": Row(
        _averaged, lambda x: [x.update_parameters(Net()) for _ in range(2)],
        ask=lambda x: [tensor.tolist() for tensor in x.state_dict().values()],
    ),
    "model: what the script keeps on a library's layer": Row(
        _scored, _score, ask=lambda x: (x.score.tolist(), x.seen, x.bounds)
    ),
}  # fmt: skip


def names_of_one(value: Any) -> Scope:
    return {"a": value, "b": (value, 1), "c": {"deep": [value]}}


def are_one(scope: Scope) -> bool:
    return scope["b"][0] is scope["a"] and scope["c"]["deep"][0] is scope["a"]


def parts_of(whole: Any) -> Scope:
    return {"whole": whole, "first": whole[:1], "last": whole[2:]}


def _fill_parts(scope: Scope) -> Any:
    """What is written to the whole is in the parts."""
    before = scope["whole"].tolist()
    scope["whole"][...] = 8
    return before, scope["first"].tolist(), scope["last"].tolist()


class Loader:
    """Something that is referred to weakly."""


def _referred_weakly() -> Scope:
    loader = Loader()
    return {"loader": loader, "active": [None, weakref.ref(loader)]}


def _meter_and_method() -> Scope:
    meter = Meter()
    return {"meter": meter, "update": meter.update}


def _two_names(value: Any) -> Scope:
    return {"before": value, "now": value}


WEIGHT = torch.ones(1, requires_grad=True)
ROWS |= {
    "list under many names": Row(
        lambda: names_of_one([0]), lambda x: x["a"].append(3), ask=lambda x: (x["a"], are_one(x))
    ),
    "object under many names": Row(
        lambda: names_of_one(Meter()), lambda x: x["a"].update(3.0), ask=lambda x: (vars(x["a"]), are_one(x))
    ),
    "tensor under many names": Row(
        lambda: names_of_one(torch.zeros(3)), lambda x: x["a"].add_(1), ask=lambda x: (x["a"].tolist(), are_one(x))
    ),
    "array under many names": Row(
        lambda: names_of_one(np.zeros(3)), lambda x: x["a"].fill(1), ask=lambda x: (x["a"].tolist(), are_one(x))
    ),
    "one list that becomes two": Row(lambda: _two_names([0]), lambda x: x.update(before=[1, 2], now=[3])),
    "one object that becomes two": Row(
        lambda: _two_names(State()), lambda x: x.update(before=State(step=3), now=State(step=9)), may_refuse=True
    ),
    "one frozen object that becomes two": Row(
        lambda: _two_names(FrozenState()), lambda x: x.update(now=FrozenState(5, 50))
    ),
    "parts of an array": Row(lambda: parts_of(np.zeros(4)), lambda x: x["whole"].fill(1), ask=_fill_parts),
    "parts of a tensor": Row(lambda: parts_of(torch.zeros(4)), lambda x: x["whole"].fill_(1), ask=_fill_parts),
    "parts of a batch": Row(lambda: parts_of(torch.zeros(40, 50)), lambda x: x["whole"].fill_(1), ask=_fill_parts),
    "bound method": Row(
        _meter_and_method, lambda x: x["update"](2.0), ask=lambda x: (x["update"](3.0), x["meter"].values)
    ),
    "weak references": Row(
        _referred_weakly, lambda x: x["active"].append(weakref.ref(x["loader"])),
        ask=lambda x: [one and one() is x["loader"] for one in x["active"]],
    ),
    "loss": Row(
        lambda: (WEIGHT * 2).sum(), other=lambda: (WEIGHT * 5).sum(), ask=lambda x: (x.item(), x.requires_grad)
    ),
    "leaf": Row(
        lambda: torch.zeros(1, requires_grad=True), lambda x: x.data.fill_(1), ask=lambda x: (x.item(), x.requires_grad)
    ),
    "queue": Row(queue.Queue, lambda x: x.put(7), ask=lambda x: [x.get_nowait() for _ in range(x.qsize())]),
    "event": Row(threading.Event, lambda x: x.set(), ask=threading.Event.is_set),
    "event between processes": Row(multiprocessing.Event, lambda x: x.set(), ask=lambda x: x.is_set()),
    "value between processes": Row(
        lambda: multiprocessing.Value("i", 0), lambda x: setattr(x, "value", 7), ask=lambda x: x.value
    ),
    "model: a part under a name of its own": Row(
        lambda: (lambda net: {"model": net, "head": net.norm})(Net()), lambda x: x.update(head=x["model"].inner),
        ask=lambda x: x["head"] is x["model"].inner,
    ),
    "model: the mode of a compiled part": Row(
        lambda: torch.nn.Sequential(torch.compile(torch.nn.Dropout(0.5), backend="eager"), torch.nn.Linear(2, 2)),
        lambda x: x.eval(), ask=modes,
    ),
    **{
        f"{kind.__name__} of numbers in its order, {items}": Row(
            lambda kind=kind: kind(range(1000)), other=lambda kind=kind, items=items: kind(items), ask=list  # type: ignore[misc]
        )
        for kind in (set, frozenset)
        for items in (range(30), [number * number for number in range(30)], [(1, 2), (0, 5)], [])
    },
}  # fmt: skip


HIDDEN = {*ITERATORS, "sparse tensor", "array: empty", "tensor: empty"}  # they may show nothing of what has changed


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    values.forget()
    yield
    values.forget()


@pytest.mark.parametrize("kind", ROWS)
def test_what_a_step_has_changed_comes_back_into_what_the_setup_has_made(kind: str) -> None:
    row = ROWS[kind]
    lost, live = row.changed(row.make()), row.make()
    here: Scope = {"x": live, "again": [live], "step": 0}

    refused = is_refused({"x": lost, "again": [lost], "step": 3}, here)

    assert not refused or row.may_refuse
    if not refused:
        assert here["step"] == 3
        assert type(here["x"]).__qualname__ == type(lost).__qualname__
        assert row.change is None or here["again"][0] is here["x"]
        assert row.change is None or row.may_refuse or here["x"] is live
        assert row.ask(here["x"]) == row.ask(lost)


@pytest.mark.parametrize("kind", ROWS)
def test_what_the_replacement_has_not_made_is_made_or_refused(kind: str) -> None:
    row = ROWS[kind]
    lost = row.changed(row.make())
    here: Scope = {"x": None}

    refused = is_refused({"x": lost}, here)

    assert refused or (type(here["x"]) is type(lost) and row.ask(here["x"]) == row.ask(lost))


@pytest.mark.parametrize("kind", ROWS)
def test_a_change_behind_many_boundaries_is_in_the_next_record_and_in_all_later_ones(kind: str) -> None:
    row = ROWS[kind]
    scope: Scope = {"x": row.make(), "beside": 1}
    for _ in range(BOUNDARIES):
        values.begin_boundary()
        before = record(scope, key="carried", is_lasting=True)

    scope["x"] = row.changed(scope["x"])
    found = []
    for _ in range(2):
        values.begin_boundary()
        found.append(record(scope, key="carried", is_lasting=True))
    values.forget()
    afresh = record(scope)

    assert all(are_alike(behind, afresh) for behind in found)
    assert kind in HIDDEN or not are_alike(before, afresh)


@pytest.mark.parametrize("kind", [kind for kind, row in ROWS.items() if not row.may_refuse])
def test_what_comes_back_is_not_named_as_unproved(kind: str) -> None:
    assert not_proved({"x": ROWS[kind].make()}) == []
    assert carry({"x": ROWS[kind].make()}, {"x": ROWS[kind].make()}) == []


def _with_two_groups() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
    return optimizer


def _begun() -> Iterator[int]:
    numbers = count_up(10)
    next(numbers)
    return numbers


def _with_another_element() -> torch.Tensor:
    data = big(1.0)
    data[12_345] = 2.0
    return data


LONG_KINDS: dict[str, Callable[[Any], Any]] = {
    "list": list, "deque": collections.deque, "dictionary": lambda items: dict(enumerate(items))
}  # fmt: skip
# The lost rank's x, the replacement's, and the reason.
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "an object of another class": (State(), Meter(), "x is a State in the lost rank, and the replacement has a Meter"),
    "an object that is more than its attributes": (
        Holder(), None, "x is a Holder in the lost rank, and the replacement has a NoneType"
    ),
    "a logger that is not there": (logging.getLogger("x"), MISSING, "x, a Logger, is not in the replacement"),
    "an object of an extension, None here": (zlib.compressobj(), None, "x is a Compress in the lost rank"),
    "an object of an extension that is not there": (zlib.compressobj(), MISSING, "x is a Compress in the lost rank"),
    "what few programs change": (
        operator.methodcaller("m", 1, k=2), operator.methodcaller("m", 1, k=3), "differs from the lost rank's, and cannot"
    ),
    "an iterator over a dictionary that has gone on": (iter({1: 2}), iter({1: 2, 3: 4}), "x, a dict_keyiterator, differs"),
    "seeds of numpy's that differ": (np.random.SeedSequence(1), np.random.SeedSequence(2), "x, a SeedSequence, differs"),
    "another sparse tensor": (torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse(), "x, a Tensor, differs"),
    "a bytearray that differs": (bytearray(b"new"), bytearray(b"old"), "x, a bytearray, differs from the lost rank"),
    "an array that differs": (array.array("d", [1.0]), array.array("d"), "x, a array, differs from the lost rank"),
    "an object of an extension that differs": (decimal.Context(prec=5), decimal.Context(prec=6), "differs from the lost"),
    "another kind of random generator": (random.Random(1), np.random.default_rng(1), "x is another random generator"),
    "a generator that stands at another line": (_begun(), count_up(0), "x is a generator that stands elsewhere"),
    "an optimizer with other groups": (
        _with_two_groups(), torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.5), "x is another optimizer"
    ),
    "a set whose order a new one does not have": ({7, 15, 3}, set(), "x is a set with another iteration order than"),
    "such a frozenset": (frozenset([7, 15, 3]), frozenset(), "x is a frozenset with another iteration order than"),
}  # fmt: skip
DOUBTED: dict[str, tuple[Any, Any, list[str]]] = {
    "large data": (big(1.0), big(1.0), []),
    "other large data": (big(1.0), big(2.0), ["x has other data than in the lost rank"]),
    "an element of large data": (big(1.0), _with_another_element(), ["x has other data than in the lost rank"]),
    "large data of another shape": (
        big(1.0), torch.ones(LARGE // 2), [f"x has shape [{LARGE // 2}] of float32 where the lost rank had [{LARGE}] of float32"]
    ),
    "large data of another dtype": (
        big(1.0), torch.ones(LARGE, dtype=torch.double), [f"x has shape [{LARGE}] of float64 where the lost rank had [{LARGE}] of float32"]
    ),
    "large data that is not here": (big(1.0), None, ["x is large data in the lost rank and not in the replacement"]),
    "a large array": (np.ones(LARGE), np.ones(LARGE), []),
    "another large array": (np.ones(LARGE), np.zeros(LARGE), ["x has other data than in the lost rank"]),
    "a large array that is not here": (np.ones(LARGE), None, ["x is large data in the lost rank and not in the replacement"]),
    **{
        f"a long {name} with other items": (kind([1.0] * LONG), kind([2.0] * LONG), ["x is a long container with other items"])
        for name, kind in LONG_KINDS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_come_back_is_refused_with_its_name(kind: str) -> None:
    lost, live, reason = REFUSED[kind]
    here: Scope = {} if live is MISSING else {"x": live}

    with pytest.raises(CannotRestoreError, match=re.escape(reason)):
        carry({"x": lost}, here)


@pytest.mark.parametrize("kind", DOUBTED)
def test_what_a_step_has_made_and_is_only_compared_is_a_mismatch_if_it_differs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "records", 2)
    lost, live, doubts = DOUBTED[kind]

    assert carry({"x": lost}, {"x": live}) == doubts
