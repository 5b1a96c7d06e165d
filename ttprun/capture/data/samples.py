"""Which samples of an epoch are used up, and each rank's share of the rest for another number of ranks: pure functions.

All ranks of a `DistributedSampler` share one order of the samples, which does not depend on their number: of R ranks,
rank r takes the places r, r + R, r + 2R, ... Once each has trained on k batches of B, the first k * B * R places of the
order are used up, and the others are distributed again. Begin with `used_up`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence


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


def batches(indices: Iterable[int], size: int, drops_last: bool) -> Iterator[list[int]]:
    """Indices of samples, cut into batches.

    size         samples of a batch, at least 1
    drops_last   a smaller last batch is left out
    """
    iterator = iter(indices)
    while batch := list(itertools.islice(iterator, size)):
        if len(batch) == size or not drops_last:
            yield batch


def led_by_dummies(rest: Iterable[int], length: int, dummies: int, size: int, drops_last: bool) -> Iterator[list[int]]:
    """Dummy batches of any samples, which are not trained on, then the batches of what is left.

    length   samples in the dataset
    """
    for number in range(dummies):
        yield [index % length for index in range(number * size, (number + 1) * size)]
    yield from batches(rest, size, drops_last)
