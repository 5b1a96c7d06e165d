"""A DataLoader in a replay hands out what the undisturbed one would have handed out from there on.

Three lives, each in a process of its own: one that nothing disturbs, one that is lost in the middle, and its replacement.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import torch.utils.data.dataloader as torch_dataloader
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from tests.capture import user_values
from tests.capture.user_values import (
    CountedStream,
    LibraryShuffle,
    OwnBatches,
    OwnGenerator,
    OwnShuffle,
    Sentence,
    SharedOut,
)
from tests.rank.fakes import RECORD_BYTES, become, make_session
from tests.rank.processes import run_alone
from ttprun.capture.data import loaders, workers
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import ownership, random_state
from ttprun.introspect.current_rank import Mode
from ttprun.rank import proof
from ttprun.rank.bootstrap import install, patch_table

EPOCHS = 2
STOPS = ((0, 4), (1, 3))  # (epoch, batches handed out in it) at which the rank is lost
STOPS_OF_LASTING = (*STOPS, (1, 1))


class Numbers(Dataset[Any]):
    def __init__(self, n: int = 24) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index])


class Augmented(Numbers):
    """Draws from every generator that has no name."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [index, torch.rand(1).item(), random.random(), float(np.random.rand())], dtype=torch.float64
        )


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, by = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 24, by):
            yield torch.tensor([index, torch.rand(1).item()], dtype=torch.float64)


class Shuffled(Stream):
    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        return iter(torch.stack([torch.full((24,), info.id), torch.randperm(24)], 1))


class Numbered(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(24))


class Seeded(Numbers):
    """Draws from a generator of its own, whose seed is that of its worker."""

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return torch.rand(1, generator=torch.Generator().manual_seed(info.seed + index))


class CountsItsEpochs(Stream):
    """In each worker by itself, where no record has the count."""

    epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return iter(100 * self.epoch + torch.arange(24))


def stateful(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, 3, **options)


def resumed(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """One that begins behind its second batch."""
    loader: Any = stateful(dataset, **options)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    loader = stateful(dataset, **options)
    loader.load_state_dict(state)
    return loader


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(12).tolist()
        for first in order:
            yield [first, first + 12]

    def __len__(self) -> int:
        return 12


_kept: list[Any] = []
_under_way: list[Any] = []  # iterators; while those of another epoch are made, of the epoch before
_stops_before: tuple[int, int] | None = None  # (epoch, batch): its worker stops before it begins this batch


class Behind(RandomSampler):
    """Stops a worker with a signal before it asks it for a batch."""

    epoch = -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        indices = list(super().__iter__())
        for number, first in enumerate(range(0, len(indices), 3)):
            if (self.epoch, number) == _stops_before:
                started = sorted(multiprocessing.active_children(), key=lambda it: int(it.name.rpartition(":")[2]))
                # A worker that has just sent a batch still holds this lock, without which the other one cannot send.
                with _under_way[0]._worker_result_queue._wlock:
                    os.kill(started[-2:][number % 2].pid or 0, signal.SIGSTOP)
            yield indices[first : first + 3]


def behind(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_sampler=Behind(range(24)), prefetch_factor=1, **options)


def distributed(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=1, seed=3)
    return DataLoader(dataset, batch_size=2, sampler=sampler, **options)


TWO = {"num_workers": 2}
LASTING = {"num_workers": 2, "persistent_workers": True}
KINDS: dict[str, Callable[[], list[DataLoader[Any]]]] = {
    "in order": lambda: [DataLoader(Numbers(), 3)],
    "shuffled": lambda: [DataLoader(Numbers(), 3, shuffle=True)],
    "shuffled, three workers": lambda: [DataLoader(Numbers(), 3, shuffle=True, num_workers=3)],
    "shuffled by a generator": lambda: [DataLoader(Numbers(), 3, shuffle=True, generator=torch.Generator().manual_seed(7))],
    "shuffled by a generator, workers": lambda: [
        DataLoader(Numbers(), 3, shuffle=True, generator=torch.Generator().manual_seed(7), **TWO)
    ],
    "drop last": lambda: [DataLoader(Numbers(25), 3, shuffle=True, drop_last=True)],
    "much fetched ahead": lambda: [DataLoader(Numbers(), 3, shuffle=True, prefetch_factor=5, **TWO)],
    "distributed": lambda: [distributed(Numbers())],
    "distributed, lasting workers": lambda: [distributed(Numbers(), **LASTING)],
    "weighted": lambda: [DataLoader(Numbers(), 3, sampler=WeightedRandomSampler(torch.ones(24), 24))],
    "with replacement": lambda: [DataLoader(Numbers(), 3, sampler=RandomSampler(Numbers(), True, 24))],
    "batches of the user's": lambda: [DataLoader(Numbers(), batch_sampler=Pairs(), **TWO)],
    "shuffled by a sampler of the user's": lambda: [DataLoader(Numbers(), 3, sampler=OwnShuffle(24))],
    "shuffled by a generator that is not torch's": lambda: [DataLoader(Numbers(), 3, sampler=OwnGenerator(24))],
    "shuffled in place by a library's sampler": lambda: [DataLoader(Numbers(), 3, sampler=LibraryShuffle(24))],
    "shuffled in place, and shared out": lambda: [
        DataLoader(Numbers(), 3, sampler=SharedOut(LibraryShuffle(48)))
    ],
    "batches of the user's, from a generator that goes on": lambda: [
        DataLoader(Numbers(), batch_sampler=OwnBatches(24), **TWO)
    ],
    "stream that counts its epochs": lambda: [DataLoader(CountedStream(24), 3)],
    "stream that counts its epochs, workers": lambda: [DataLoader(CountedStream(24), 3, **TWO)],
    "no batches": lambda: [DataLoader(Numbers(), batch_size=None, shuffle=True)],
    "augmented": lambda: [DataLoader(Augmented(), 3, shuffle=True)],
    "augmented, workers": lambda: [DataLoader(Augmented(), 3, shuffle=True, **TWO)],
    "augmented, lasting workers": lambda: [DataLoader(Augmented(), 3, shuffle=True, **LASTING)],
    "augmented, distributed, workers": lambda: [distributed(Augmented(), **TWO)],
    "augmented, a worker behind": lambda: [behind(**TWO)],
    "augmented, a lasting worker behind": lambda: [behind(**LASTING)],
    "stream": lambda: [DataLoader(Stream(), 3)],
    "stream, workers": lambda: [DataLoader(Stream(), 3, **TWO)],
    "stream, lasting workers": lambda: [DataLoader(Stream(), 3, **LASTING)],
    "stream that draws at its start, lasting workers": lambda: [DataLoader(Shuffled(), 3, **LASTING)],
    "seeded by its worker, lasting workers": lambda: [DataLoader(Seeded(), 3, **LASTING)],
    "stateful": lambda: [stateful(Augmented(), shuffle=True)],
    "stateful, workers": lambda: [stateful(Augmented(), shuffle=True, **TWO)],
    "stateful, lasting workers": lambda: [stateful(Augmented(), shuffle=True, **LASTING)],
    "stateful stream": lambda: [stateful(Numbered())],
    "stateful stream, lasting workers": lambda: [stateful(Stream(), snapshot_every_n_steps=3, **LASTING)],
    "stateful, resumed": lambda: [resumed(Augmented(), shuffle=True, **TWO)],
    "stateful, resumed without workers": lambda: [resumed(Augmented(), shuffle=True)],
    "two in step": lambda: [DataLoader(Numbers(), 3, shuffle=True), DataLoader(Numbers(48), 3, shuffle=True)],
    "two in step, workers": lambda: [
        DataLoader(Augmented(), 3, shuffle=True, **TWO), DataLoader(Augmented(48), 3, shuffle=True, **TWO)
    ],
}  # fmt: skip


@dataclass
class Life:
    """What a process does with the loaders, and what it sees.

    stop     where it is lost; None: nowhere
    record   what a lost one has left
    """

    stop: tuple[int, int] | None = None
    record: dict[str, Any] | None = None

    def live(self, make: Callable[[], list[DataLoader[Any]]]) -> list[Any]:
        """Train for some epochs; returns all batches, and what the main process draws for each."""
        global _stops_before
        _stops_before = self.stop
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        made = make()
        found: list[Any] = []
        first_epoch = 0
        if self.record is not None:
            first_epoch = self.record["epoch"]
        for epoch in range(first_epoch, EPOCHS):
            if self.record is not None and epoch == first_epoch:
                random_state.restore(self.record["item_rng"])
            item_rng = random_state.capture()
            for loader in made:
                if isinstance(loader.sampler, DistributedSampler):
                    loader.sampler.set_epoch(epoch)
            _under_way[:] = iterators = [iter(loader) for loader in made]
            for number, handed in enumerate(zip(*iterators, strict=False)):
                torch.rand(1)  # dropout in the forward pass
                loaders.note_boundary()
                is_lost = (epoch, number + 1) == self.stop
                if is_lost:
                    record = {"epoch": epoch, "item_rng": item_rng, "loaders": loaders.records()}
                    self.record = record | {"rng": random_state.capture()}
                if self.record is not None and not is_lost and not found:
                    random_state.restore(self.record["rng"])  # as the replay does at the boundary
                found.append(([batch.tolist() for batch in handed], torch.rand(1).item(), random.random()))
                if is_lost:
                    _kept.extend(iterators)  # what ends an iterator waits for its workers
                    return found
        return found


class FakeReplay(Mode):
    """The part of a replay that loaders ask: which recorded iterator to make."""

    is_live = False

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self._left = list(records)

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        found = next((it for it in self._left if it["name"] == name), None)
        if found is not None:
            self._left.remove(found)
        return found


def end_with_parent() -> None:
    """End with the process that has forked this one, but not while torch has a file in shared memory to remove."""
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(1))  # called by Python, so never within C code
    install.die_with_parent(signal.SIGUSR1)


def is_in(group: int, stat: Path) -> bool:
    """Whether a process, by its file in /proc, is of that group and has not ended; its parent may not know yet."""
    with contextlib.suppress(OSError):
        state, _, its_group, *_ = stat.read_text().rpartition(")")[2].split()
        return int(its_group) == group and state not in "ZX"
    return False


def end_group(group: int, limit_s: float = 60.0) -> None:
    """Wait until no process of a process group lives; those that are stopped are continued."""
    until_s = time.monotonic() + limit_s
    while any(is_in(group, stat) for stat in Path("/proc").glob("[0-9]*/stat")):
        assert time.monotonic() < until_s, f"a worker is left {limit_s:.0f} s after its rank was killed"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)
        time.sleep(0.01)


def in_child(act: Callable[[], Any]) -> Any:
    """What `act` returns in a forked child, which is then killed; its workers end with it, also if one is stopped."""
    ours, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        multiprocessing.current_process()._config["tempdir"] = tempfile.gettempdir()  # type: ignore[attr-defined]
        try:
            outcome = (True, act())
        except BaseException:
            outcome = (False, traceback.format_exc())
        theirs.send_bytes(pickle.dumps(outcome))
        signal.pause()
    try:
        assert ours.poll(60), "no answer"
        is_good, value = pickle.loads(ours.recv_bytes())
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        end_group(pid)
    assert is_good, value
    return value


def lives_of(kind: str) -> dict[tuple[int, int], Any]:
    """Of each stop: what the replacement hands out, and what the undisturbed rank does from the same batch on."""
    os.register_at_fork(after_in_child=end_with_parent)
    ownership.add_user_directory(user_values.__file__)
    ownership._user_directories.append(user_values.__file__)
    make = KINDS[kind]
    missing = patch_table.apply_all(with_replay=True)
    assert missing == []
    whole = in_child(lambda: _live(make, Life(), None)[0])
    found: dict[tuple[int, int], Any] = {}
    for stop in STOPS_OF_LASTING if "lasting" in kind else STOPS:
        fd = Recorder.create(RECORD_BYTES)
        try:
            seen, record = in_child(lambda stop=stop, fd=fd: _live(make, Life(stop), fd))
            replaced, _ = in_child(lambda record=record, fd=fd: _live(make, Life(record=record), fd))
            # The first batch is one that was used: only how many there were matters, and what is drawn afterwards.
            found[stop] = (
                seen == whole[: len(seen)],
                [replaced[0][1:], *replaced[1:]],
                [seen[-1][1:], *whole[len(seen) :]],
            )
        except AssertionError as error:
            found[stop] = str(error)
        os.close(fd)
    return found


def _live(make: Callable[[], list[DataLoader[Any]]], life: Life, fd: int | None) -> tuple[list[Any], Any]:
    fd = Recorder.create(RECORD_BYTES) if fd is None else fd
    recorder = Recorder(fd, RECORD_BYTES)
    workers.keep_in(recorder)
    session = make_session(recorder=recorder)
    if life.record is not None:
        session.mode = FakeReplay(life.record["loaders"])
    become(session)
    return life.live(make), life.record


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement_is_handed_the_batches_that_the_lost_rank_would_have_been_handed(kind: str) -> None:
    if "stateful" in kind:
        pytest.importorskip("torchdata")

    found = run_alone(lives_of, kind)

    wrong = {stop: f"{lives}"[:600] for stop, lives in found.items() if isinstance(lives, str) or lives[1] != lives[2]}
    assert wrong == {}
    assert all(lives[0] for lives in found.values())


def lives_that_differ() -> dict[tuple[int, int], Any]:
    proof._KILL_LIMIT_S = 0.0
    KINDS["lasting"] = lambda: [DataLoader(CountsItsEpochs(), 3, **LASTING)]
    return lives_of("lasting")


def test_a_loader_whose_workers_prepare_other_batches_than_the_lost_ranks_had_is_refused() -> None:
    found = run_alone(lives_that_differ)

    assert found[0, 4][1] == found[0, 4][2]
    assert all("another batch" in found[stop] for stop in [(1, 3), (1, 1)])


def _names_after_a_batch(kind: str) -> list[str]:
    patch_table.apply_all(with_replay=False)
    become(make_session())
    loader = DataLoader(Numbers(), 3)
    next(iter(loader) if kind == "torch's" else torch_dataloader._SingleProcessDataLoaderIter(loader))
    loaders.note_boundary()
    return [*map(str, loaders.not_proved())]


@pytest.mark.parametrize(("kind", "count"), [("torch's", 0), ("made by hand", 1)])
def test_a_loader_whose_position_is_not_recorded_is_named(kind: str, count: int) -> None:
    names = run_alone(_names_after_a_batch, kind)

    assert [name for name in names if "_SingleProcessDataLoaderIter" in name] == names
    assert len(names) == count


def _records_after(act: Callable[[DataLoader[Any]], Any], options: dict[str, Any]) -> list[Any]:
    patch_table.apply_all(with_replay=False)
    become(make_session())
    loader = DataLoader(Numbers(), 3, **options)
    kept = act(loader)
    found = loaders.records()
    del kept
    return [(record["yielded"], len(record["batch"])) for record in found]


def stay_inside(loader: DataLoader[Any]) -> Any:
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    return iterator


def come_to_the_end(loader: DataLoader[Any]) -> Any:
    return list(loader)


def break_off(loader: DataLoader[Any]) -> Any:
    for number, _ in enumerate(loader):
        if number == 2:
            break
    return loader


@pytest.mark.parametrize(
    ("act", "options", "expected"),
    [
        (stay_inside, {}, [(2, 1)]),
        (stay_inside, LASTING, [(2, 1)]),
        (come_to_the_end, {}, []),
        (come_to_the_end, LASTING, []),
        (break_off, {}, []),
        (break_off, TWO, []),
        (break_off, LASTING, []),
    ],
    ids=["inside", "inside, lasting", "end", "end, lasting", "break", "break, workers", "break, lasting"],
)
def test_only_iterators_that_the_script_is_inside_of_are_recorded(
    act: Any, options: dict[str, Any], expected: Any
) -> None:
    """A validation loop that stops after a few batches must not look as if the script were still in it."""
    assert run_alone(_records_after, act, options) == expected


def _record_before_the_first_batch() -> list[Any]:
    patch_table.apply_all(with_replay=True)
    session = make_session()
    become(session)
    lost = iter(DataLoader(Numbers(), 3))
    next(lost)
    loaders.note_boundary()
    next(lost), next(lost)
    (record,) = loaders.records()
    session.mode = FakeReplay([record])
    loader = DataLoader(Numbers(), 3)
    loader._ttprun_name = record["name"]  # type: ignore[attr-defined]
    fresh = iter(loader)
    found = [(known["yielded"], len(known["batch"])) for known in loaders.records()]
    return [*found, next(fresh).tolist()]


def _batches_after_a_late_change(kind: str, change: Callable[[Any, int], None]) -> list[Any]:
    """The third batch of a lost rank's iterator and of its replacement's; something changes after each was made."""
    patch_table.apply_all(with_replay=True)
    session = make_session()
    become(session)
    (loader,) = KINDS[kind]()
    lost = iter(loader)
    change(loader, 3)
    next(lost)
    loaders.note_boundary()
    next(lost)
    (record,) = loaders.records()
    session.mode = FakeReplay([record])
    (loader,) = KINDS[kind]()
    loader._ttprun_name = record["name"]  # type: ignore[attr-defined]
    fresh = iter(loader)
    change(loader, 0)
    next(fresh)
    return [next(lost).tolist(), next(fresh).tolist()]


def _set_epoch(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)


def _draw(loader: Any, count: int) -> None:
    torch.rand(count)


@pytest.mark.parametrize(("kind", "change"), [("distributed", _set_epoch), ("shuffled", _draw)])
def test_what_changes_between_the_making_of_an_iterator_and_its_first_batch_is_known(kind: str, change: Any) -> None:
    """A sampler is asked only with the first batch; Lightning sets its epoch after it has made the iterator."""
    lost, fresh = run_alone(_batches_after_a_late_change, kind, change)

    assert fresh == lost


def test_a_worker_whose_states_are_overwritten_begins_only_if_it_draws_nothing() -> None:
    states = {(0, batch): msgpack.packb((random_state.capture(), batch)) for batch in range(2, 5)}

    workers._restore(states, 0, (0, 1))
    torch.rand(1)
    states[(0, 4)] = msgpack.packb((random_state.capture(), 4))

    with pytest.raises(workers.OtherBatchError, match="worker 0 before its batch 1 are not kept any more"):
        workers._restore(states, 0, (0, 1))


def test_an_iterator_that_has_been_positioned_and_not_yet_used_can_be_recorded() -> None:
    """A boundary may come before its first batch is asked for."""
    assert run_alone(_record_before_the_first_batch) == [(3, 1), (2, 0), [[6], [7], [8]]]


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(3),
        [torch.ones(3), torch.zeros(2)],
        {"x": torch.ones(3), "more": {"y": torch.ones(1)}},
        (torch.ones(1).int(),),
    ],
)
def test_a_batch_has_fingerprints_that_change_with_its_data(batch: Any) -> None:
    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value + 1
        return type(value)(other(item) for item in value) if not isinstance(value, dict) else {
            key: other(item) for key, item in value.items()
        }  # fmt: skip

    assert workers.fingerprints(batch) == workers.fingerprints(batch) != workers.fingerprints(other(batch))


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        (Sentence(torch.ones(3), ["a"]), Sentence(torch.zeros(3), ["a"])),
        (Sentence(torch.ones(3), ["a"]), Sentence(torch.ones(3), ["b"])),
        (["a", "b"], ["a", "c"]),
        ((torch.ones(3), np.ones(2)), (torch.ones(3), np.zeros(2))),
        ({"seen": {"a", "b"}}, {"seen": {"a", "c"}}),
    ],
    ids=["tensor in an object", "text in an object", "texts", "array", "set"],
)
def test_a_batch_of_whatever_has_fingerprints(batch: Any, other: Any) -> None:
    assert workers.fingerprints(batch) == workers.fingerprints(copy.deepcopy(batch)) != workers.fingerprints(other)


def test_the_fingerprint_of_a_set_does_not_depend_on_its_order() -> None:
    one, other = {8, 0}, {0, 8}
    assert list(one) != list(other)

    assert workers.fingerprints(one) == workers.fingerprints(other)
