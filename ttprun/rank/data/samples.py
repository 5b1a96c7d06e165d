"""Which samples of an epoch are used up, and who gets the rest when a run goes on with another number of ranks: pure.

All ranks of a `DistributedSampler` walk over one order of the samples, which does not depend on how many they are: of
R ranks, rank r takes the places r, r + R, r + 2R, ... So once each has been trained on k batches of B, the first
k * B * R places of the order are used up, and the others are dealt out anew. Begin with `used_up`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence


def fetched_ahead(lead: int, each: int) -> int | None:
    """Batches that were handed out at a boundary and not trained on yet; None if that is not known.

    lead   batches that had been handed out when the iterator's first boundary was reached
    each   batches between two boundaries; 0 if that is not known
    """
    if lead <= 1:
        return 0
    return max(0, lead - each) if each else None


def used_up(before: int, yielded: int, dummies: int, ahead: int, batch: int, replicas: int) -> int:
    """Places of the order that have been trained on.

    before     places that were used up when the iterator was made: in another run, with other ranks
    yielded    batches that the iterator has handed out
    dummies    the first of these, which were not trained on
    ahead      the last of these, which were not trained on yet
    batch      samples in a batch
    replicas   ranks that have used up as much
    """
    return before + max(0, yielded - dummies - ahead) * batch * replicas


def share(order: Sequence[int], used: int, rank: int, replicas: int, drops_last: bool) -> list[int]:
    """What of an epoch is left for one rank.

    order       of all samples
    used        places of it that are used up; it may lie behind the end, by what was padded
    drops_last  the rest is cut to a multiple of `replicas`; else some samples come twice, the first ones of the order
    """
    left = list(order[used:])
    odd = len(left) % replicas
    if odd and drops_last:
        left = left[: len(left) - odd]
    elif odd:
        left += itertools.islice(itertools.cycle(order), replicas - odd)
    return left[rank::replicas]


def batches(indices: Iterable[int], size: int, drops_last: bool) -> Iterator[list[int]]:
    """Cut into batches of `size`; a last one that is smaller is left out if `drops_last`."""
    iterator = iter(indices)
    while batch := list(itertools.islice(iterator, size)):
        if len(batch) == size or not drops_last:
            yield batch


def led_by_dummies(left: Iterable[int], length: int, dummies: int, size: int, drops_last: bool) -> Iterator[list[int]]:
    """The batches of what is left, behind some that are handed out and not trained on.

    length   samples in the dataset: the dummies are any of them
    """
    for number in range(dummies):
        yield [index % length for index in range(number * size, (number + 1) * size)]
    yield from batches(left, size, drops_last)
