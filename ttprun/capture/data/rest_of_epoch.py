"""The rest of an epoch when a run resumes with another number of ranks.

A `DistributedSampler` gives all ranks one order of the samples, which does not depend on their number: of R ranks, rank
r takes the places r, r + R, r + 2R, ... Once each has trained on k batches of B, the first k * B * R of them are used
up (`used_up`), and the new ranks share the rest. With torch's other samplers each rank has an order of its
own, and continues it. What cannot be counted in samples is refused. Begin with `rest_of`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ttprun.introspect.safe_reads import attributes_of, is_a


def fetched_ahead(lead: int, each: int) -> int | None:
    """Batches that the script had fetched at a boundary and not trained on yet; None if unknown.

    lead   batches fetched before the iterator's first boundary
    each   batches between two boundaries; 0 if unknown
    """
    if lead <= 1:
        return 0
    return max(0, lead - each) if each else None


def used_up(before: int, yielded: int, dummies: int, ahead: int, batch: int, replicas: int) -> int:
    """Places of the order that have been trained on.

    before     places used up when the iterator was made, by an earlier run with other ranks
    yielded    batches that the iterator has yielded
    dummies    the first of these, which were not trained on
    ahead      the last of these, which were not trained on yet
    batch      samples in a batch
    replicas   ranks that share the order
    """
    return before + max(0, yielded - dummies - ahead) * batch * replicas


def share(order: Sequence[int], used: int, rank: int, replicas: int, drops_last: bool) -> list[int]:
    """One rank's share of the rest of an epoch.

    order       of all samples
    used        places of it that are used up; may be past the end because of padding
    drops_last  cut the rest to a multiple of `replicas`; else it is padded with the first samples of the order
    """
    rest = list(order[used:])
    odd = len(rest) % replicas
    if odd and drops_last:
        rest = rest[: len(rest) - odd]
    elif odd:
        rest += itertools.islice(itertools.cycle(order), replicas - odd)
    return rest[rank::replicas]


def led_by_dummies(rest: Iterable[int], length: int, dummies: int, size: int, drops_last: bool) -> Iterator[list[int]]:
    """Dummy batches of any samples, which are not trained on, then the batches of what is left.

    length       samples in the dataset
    size         samples of a batch, at least 1
    drops_last   a smaller last batch is left out
    """
    for number in range(dummies):
        yield [index % length for index in range(number * size, (number + 1) * size)]
    yield from BatchSampler(rest, size, drops_last)


DISTRIBUTED, OWN = "distributed", "own"
_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class CannotDistributeError(RuntimeError):
    """The rest of an epoch cannot be distributed over other ranks; the message says why."""


def source_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader reads, for the record. The dataset is asked for its length.

    returns  kind      DISTRIBUTED, OWN (each rank has its own order), or else why the rest cannot be distributed
             length    samples in the dataset, 0 if it has no length
             drawn     samples that the sampler yields; 0 if that follows from the length
             batch     samples in a batch
             replicas  ranks that share an order
             order     what a shared order depends on beside the epoch and the length
    """
    source = {"kind": "", "length": 0, "drawn": 0, "batch": 1, "replicas": 1, "order": []}
    try:
        return source | _source_of(loader)
    except Exception as error:  # of the script's own code
        return source | {"kind": f"does not show what it reads ({error})"}


def _source_of(loader: DataLoader[Any]) -> dict[str, Any]:
    sampler: Any = loader.batch_sampler
    inner: Any = attributes_of(sampler).get("sampler")
    dataset: Any = loader.dataset
    if not hasattr(type(dataset), "__len__") or sampler is None:
        return {"kind": "reads an iterable dataset, or has no batches"}
    if type(sampler) is not BatchSampler:
        return {"kind": f"has a batch sampler of its own ({type(sampler).__name__})"}
    source: dict[str, Any] = {"length": len(dataset), "batch": sampler.batch_size}
    if is_a(inner, DistributedSampler) and type(inner).__iter__ is DistributedSampler.__iter__:
        order = [inner.shuffle, inner.seed]
        return source | {"kind": DISTRIBUTED, "replicas": inner.num_replicas, "order": order}
    if type(inner) in _OF_TORCH:
        return source | {"kind": OWN, "drawn": len(inner)}
    return source | {"kind": f"has a sampler of its own ({type(inner).__name__})"}


def rest_of(iterator: dict[str, Any]) -> dict[str, int]:
    """What is left of an iterator's epoch.

    iterator   its record, in the old run

    returns    before    samples of the order that are used up
               dummies   first batches, which are not trained on

    Raises CannotDistributeError.
    """
    source = iterator["source"]
    if source["kind"] not in (DISTRIBUTED, OWN):
        raise CannotDistributeError(f"it {source['kind']}")
    ahead = fetched_ahead(iterator["lead"], iterator["each"])
    if ahead is None or iterator["ahead"] is None:
        raise CannotDistributeError(
            "it is not known which of its batches were prefetched and not trained on yet: try a checkpoint of some "
            "steps later"
        )
    made_with = iterator["rest"] or {"before": 0, "dummies": 0}
    counts = (iterator["yielded"], made_with["dummies"], ahead, source["batch"], source["replicas"])
    return {"before": used_up(made_with["before"], *counts), "dummies": max(1, iterator["lead"]) - ahead}


def check(then: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare a loader's source in the old run with that in the new one. Raises CannotDistributeError.

    then, now   as `source_of` returns them
    """
    if then["kind"] != now["kind"]:
        kinds = {DISTRIBUTED: "has a DistributedSampler", OWN: "has a sampler of torch's that is not distributed"}
        raise CannotDistributeError(f"it {kinds.get(now['kind'], now['kind'])}, and had another sampler before")
    if (then["length"], then["drawn"]) != (now["length"], now["drawn"]):
        then_has, now_has = then["drawn"] or then["length"], now["drawn"] or now["length"]
        raise CannotDistributeError(
            f"it has {now_has} samples, and had {then_has} before: it is not known which of them are used up"
        )
    if then["order"] != now["order"]:
        raise CannotDistributeError("its sampler does not shuffle as before (another seed?)")


def batches_of(loader: DataLoader[Any], rest: dict[str, int]) -> Iterator[list[int]]:
    """The dummies, then the batches that are left for this rank, as indices.

    loader   of the new run, with a sampler as in the old one
    rest     "before": samples of the epoch that are used up; "dummies": batches that nobody trains on
    """
    sampler: Any = loader.batch_sampler
    inner: Any = sampler.sampler
    length = source_of(loader)["length"]
    if is_a(inner, DistributedSampler):
        whole: DistributedSampler[Any] = DistributedSampler(
            inner.dataset, num_replicas=1, rank=0, shuffle=inner.shuffle, seed=inner.seed
        )
        whole.set_epoch(inner.epoch)
        indices = share(list(whole), rest["before"], inner.rank, inner.num_replicas, inner.drop_last)
    else:
        indices = list(itertools.islice(inner, rest["before"], None))
    yield from led_by_dummies(indices, length, rest["dummies"], sampler.batch_size, sampler.drop_last)
