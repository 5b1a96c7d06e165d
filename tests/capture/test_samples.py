"""Every sample of an epoch is used by one run or by the one that goes on from it, whatever their numbers of ranks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ttprun.capture.data.rest_of_epoch import fetched_ahead, led_by_dummies, share, used_up

ranks = st.integers(1, 7)


@given(
    n=st.integers(1, 200),
    size=st.integers(1, 9),
    stages=st.lists(st.tuples(ranks, st.integers(0, 9)), max_size=4),
    last=ranks,
)
def test_each_sample_is_used_at_least_once_in_the_epoch_and_at_most_once_but_for_the_padding(
    n: int, size: int, stages: list[tuple[int, int]], last: int
) -> None:
    order = [(7 * index + 3) % n for index in range(n)] if n % 7 else list(range(n))
    used, seen, padded = 0, Counter[int](), 0
    for replicas, steps in stages:
        shares = [share(order, used, rank, replicas, False) for rank in range(replicas)]
        of_rank = [list(led_by_dummies(indices, n, 0, size, False)) for indices in shares]
        for taken in (batch for left in of_rank for batch in left[:steps]):
            seen.update(taken)
        padded += -max(0, n - used) % replicas
        used = used_up(used, min(steps, len(of_rank[0])), 0, 0, size, replicas)
    left = [share(order, used, rank, last, False) for rank in range(last)]
    for indices in left:
        seen.update(indices)
    padded += -max(0, n - used) % last

    assert len(set(map(len, left))) == 1  # or some ranks would wait for the others in their last step
    assert set(seen) == set(order)
    assert seen.total() - n <= padded


@given(n=st.integers(1, 100), size=st.integers(1, 9), steps=st.integers(0, 9), old=ranks, new=ranks)
def test_if_the_last_samples_are_dropped_none_comes_twice_and_fewer_are_left_out_than_there_are_ranks(
    n: int, size: int, steps: int, old: int, new: int
) -> None:
    order = list(range(n))
    used = min(used_up(0, steps, 0, 0, size, old), n)

    rest = [index for rank in range(new) for index in share(order, used, rank, new, True)]

    assert len(set(rest)) == len(rest)
    assert set(rest) <= set(order[used:])
    assert n - used - len(rest) < new


def test_what_was_fetched_ahead_and_the_dummies_are_not_used_up() -> None:
    assert used_up(before=0, yielded=10, dummies=0, ahead=2, batch=4, replicas=3) == 96
    assert used_up(before=96, yielded=5, dummies=1, ahead=2, batch=4, replicas=2) == 112


def test_how_far_a_reader_reads_ahead_is_not_known_from_one_boundary_alone() -> None:
    assert fetched_ahead(lead=1, each=0) == 0
    assert fetched_ahead(lead=4, each=4) == 0
    assert fetched_ahead(lead=3, each=1) == 2
    assert fetched_ahead(lead=3, each=0) is None


def test_the_first_batches_are_dummies_and_then_comes_what_is_left() -> None:
    found = list(led_by_dummies([8, 9, 7], length=3, dummies=2, size=2, drops_last=False))

    assert found == [[0, 1], [2, 0], [8, 9], [7]]
    assert list(led_by_dummies([8, 9, 7], length=3, dummies=0, size=2, drops_last=True)) == [[8, 9]]
