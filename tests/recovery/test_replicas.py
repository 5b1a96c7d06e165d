"""Which rank has diverged: digests of weights, compared boundary by boundary."""

from __future__ import annotations

from ttprun.recovery.replicas import KEPT, Divergence, Replicas


def after(replicas: Replicas, boundary: int, digests: str) -> tuple[Replicas, Divergence | None]:
    """All ranks tell, in order; a letter each."""
    found = None
    for rank, digest in enumerate(digests):
        replicas, found = replicas.told(rank, boundary, digest)
    return replicas, found


def test_the_rank_that_differs_from_the_majority_is_named() -> None:
    replicas, _ = after(Replicas(world_size=3), 1, "aaa")

    _, divergence = after(replicas, 100, "bcb")

    assert divergence == Divergence(boundary=100, agreed_at=1, ranks=(1,), digests=("b", "c", "b"))


def test_several_ranks_that_differ_are_all_named() -> None:
    replicas, _ = after(Replicas(world_size=5), 1, "aaaaa")

    _, divergence = after(replicas, 100, "bcbdb")

    assert divergence is not None
    assert divergence.ranks == (1, 3)


def test_of_two_ranks_that_differ_none_is_blamed() -> None:
    replicas, _ = after(Replicas(world_size=2), 1, "aa")

    _, divergence = after(replicas, 100, "bc")

    assert divergence is not None
    assert divergence.ranks == ()
    assert "no majority" in divergence.sentence


def test_ranks_that_never_were_alike_are_left_alone() -> None:
    replicas, first = after(Replicas(world_size=2), 1, "ab")

    _, second = after(replicas, 100, "cd")

    assert (first, second) == (None, None)
    assert not replicas.are_alike


def test_boundaries_of_which_a_rank_never_tells_are_forgotten() -> None:
    replicas = Replicas(world_size=2)

    for boundary in range(3 * KEPT):
        replicas, _ = replicas.told(0, boundary, "a")

    assert sorted(replicas.digests) == list(range(2 * KEPT, 3 * KEPT))


def test_an_older_boundary_that_is_completed_late_is_compared_too() -> None:
    replicas, _ = after(Replicas(world_size=2), 1, "aa")
    replicas, _ = replicas.told(0, 100, "b")
    replicas, _ = replicas.told(0, 200, "c")

    replicas, divergence = replicas.told(1, 100, "b")

    assert divergence is None
    assert replicas.agreed_at == 100
    assert sorted(replicas.digests) == [200]
