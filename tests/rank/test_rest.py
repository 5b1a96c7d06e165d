"""DataLoaders of a run that goes on with other ranks: what is left of the epoch is dealt out, and nothing else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from tests.rank.fakes import become, make_session
from tests.rank.processes import run_alone
from ttprun.capture.data import loaders, rest_of_epoch
from ttprun.introspect.current_rank import Mode
from ttprun.rank.bootstrap import patch_table

N, BATCH = 50, 3


class Numbers(Dataset[int]):
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(N))


class Backwards(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(N - 1, -1, -1))


class Own(DistributedSampler[int]):
    def __iter__(self) -> Any:
        return iter(range(self.rank, N, self.num_replicas))


class TakingOver(Mode):
    """The part of a replay that loaders ask, for a run that goes on with other ranks."""

    is_live = False

    def __init__(self, recorded: dict[str, Any]) -> None:
        self._recorded: dict[str, Any] | None = recorded

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        recorded, self._recorded = self._recorded, None
        if recorded is None or recorded["rest"] is not None:
            return recorded  # a replacement of that run
        source = rest_of_epoch.source_of(loader)
        rest_of_epoch.check(recorded["source"], source)
        return recorded | {
            "yielded": 0,
            "lead": 0,
            "workers": None,
            "rest": rest_of_epoch.rest_of(recorded),
            "source": source,
        }


def distributed(ranks: int, rank: int, **options: Any) -> DataLoader[int]:
    sampler: DistributedSampler[int] = DistributedSampler(Numbers(), num_replicas=ranks, rank=rank, seed=5)
    sampler.set_epoch(3)
    return DataLoader(Numbers(), BATCH, sampler=sampler, **options)


def trained_up_to(loader: DataLoader[int], steps: int, each: int, ahead: int, found: list[int]) -> dict[str, Any]:
    """Train for some steps of `each` batches, `ahead` of them fetched before they are needed; the iterator's record."""
    iterator, waiting = iter(loader), []
    for _ in range(steps):
        for _ in range(each):
            while len(waiting) <= ahead:
                waiting.append(next(iterator).tolist())
            found += waiting.pop(0)
        loaders.note_boundary()
        (record,) = loaders.records()
    return record


def taken_over(loader: DataLoader[int], record: dict[str, Any], each: int, ahead: int) -> tuple[list[int], Any]:
    """(what the loader gives from there on but for the dummies, the record at the first boundary)."""
    session = make_session()
    session.mode = TakingOver(record)
    become(session)
    iterator = iter(loader)
    for _ in range(each):
        next(iterator)
    waiting = [next(iterator).tolist() for _ in range(ahead)]
    loaders.note_boundary()
    (own,) = loaders.records()
    left = [batch.tolist() for batch in iterator]
    return [index for batch in waiting + left for index in batch], own


def samples_of_three_runs(each: int, ahead: int, options: dict[str, Any]) -> list[list[int]]:
    """Two ranks, then three, one of which is replaced, and then one alone: what was trained on in each."""
    patch_table.apply_all(with_replay=True)
    become(make_session())
    first: list[int] = []
    records = [trained_up_to(distributed(2, rank, **options), 3, each, ahead, first) for rank in range(2)]
    second, again = [], []
    for rank in range(3):
        left, own = taken_over(distributed(3, rank, **options), records[rank % 2], each, ahead)
        second.append(left)
        again.append(taken_over(distributed(3, rank, **options), own, each, ahead)[0])
    assert again == second
    return [first, [index for left in second for index in left]]


@pytest.mark.parametrize(
    ("each", "ahead", "options"),
    [
        (1, 0, {}),
        (2, 0, {}),
        (1, 2, {}),
        (2, 1, {}),
        (1, 1, {"num_workers": 2}),
        (1, 0, {"num_workers": 2, "persistent_workers": True}),
    ],
)
def test_two_runs_with_other_numbers_of_ranks_take_each_sample_once(
    each: int, ahead: int, options: dict[str, Any]
) -> None:
    first, second = run_alone(samples_of_three_runs, each, ahead, options)

    assert set(first) | set(second) == set(range(N))
    assert not set(first) & set(second[:-2])
    assert len(first) + len(second) - N <= 2


def orders_of_each_ranks_own(shuffle: bool) -> list[list[int]]:
    patch_table.apply_all(with_replay=True)
    become(make_session())
    torch.manual_seed(3)
    first: list[int] = []
    record = trained_up_to(DataLoader(Numbers(), BATCH, shuffle=shuffle), 4, 1, 0, first)
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    return [first, taken_over(DataLoader(Numbers(), BATCH + 2, shuffle=shuffle), record, 1, 0)[0]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_rank_with_an_order_of_its_own_goes_on_in_it_by_samples_though_its_batches_are_of_another_size(
    shuffle: bool,
) -> None:
    first, second = run_alone(orders_of_each_ranks_own, shuffle)

    assert sorted(first + second) == list(range(N))


def source(loader: DataLoader[Any]) -> dict[str, Any]:
    found = rest_of_epoch.source_of(loader)
    return {"source": found, "lead": 1, "each": 1, "ahead": [], "rest": None, "yielded": 4}


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: DataLoader(Stream(), BATCH), "reads an iterable dataset"),
        (lambda: DataLoader(Numbers(), BATCH, sampler=Backwards()), "has a sampler of its own (Backwards)"),
        (lambda: DataLoader(Numbers(), BATCH, sampler=Own(Numbers(), 2, 0)), "has a sampler of its own (Own)"),
        (lambda: DataLoader(Numbers(), batch_sampler=Pairs(Backwards(), 2, False)), "batch sampler of its own (Pairs)"),
        (lambda: DataLoader(Numbers(), batch_size=None), "or has no batches"),
    ],
)
def test_what_cannot_be_counted_in_samples_is_refused_with_the_reason(loader: Any, why: str) -> None:
    with pytest.raises(rest_of_epoch.CannotDistributeError) as refused:
        rest_of_epoch.rest_of(source(loader()))

    assert why in str(refused.value)


class Pairs(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (lambda: DataLoader(Numbers(40), BATCH), "it has 40 samples, and had 50 before"),
        (lambda: distributed(2, 0), "it has a DistributedSampler, and had another sampler before"),
    ],
)
def test_a_loader_that_reads_something_else_now_is_refused(now: Any, why: str) -> None:
    then = source(DataLoader(Numbers(), BATCH))["source"]

    with pytest.raises(rest_of_epoch.CannotDistributeError) as refused:
        rest_of_epoch.check(then, rest_of_epoch.source_of(now()))

    assert why in str(refused.value)


def test_a_shared_order_that_is_another_one_now_is_refused() -> None:
    other: DistributedSampler[int] = DistributedSampler(Numbers(), num_replicas=3, rank=0, seed=6)

    with pytest.raises(rest_of_epoch.CannotDistributeError, match="another seed"):
        rest_of_epoch.check(
            rest_of_epoch.source_of(distributed(2, 0)),
            rest_of_epoch.source_of(DataLoader(Numbers(), BATCH, sampler=other)),
        )


def test_what_was_fetched_ahead_must_be_known() -> None:
    known = source(distributed(2, 0)) | {"lead": 3}

    assert rest_of_epoch.rest_of(known | {"each": 1, "ahead": [b"one", b"two"]}) == {
        "before": 2 * BATCH * 2,
        "dummies": 1,
    }
    for unknown in ({"each": 0}, {"each": 1, "ahead": None}):
        with pytest.raises(rest_of_epoch.CannotDistributeError, match="prefetched"):
            rest_of_epoch.rest_of(known | unknown)


def test_a_dataset_that_fails_when_it_is_asked_for_its_length_does_not_end_the_script() -> None:
    class Shy(Numbers):
        def __len__(self) -> int:
            raise RuntimeError("not yet")

    loader: DataLoader[int] = DataLoader(Shy(), BATCH, sampler=list(itertools.islice(itertools.count(), 9)))

    assert "not yet" in rest_of_epoch.source_of(loader)["kind"]
