"""Who is a replica of whom, and which replica has diverged: digests of what ranks hold, compared look by look."""

from __future__ import annotations

import pytest

from ttprun.recovery.replicas import (
    KEPT,
    UNKNOWN,
    Divergence,
    Look,
    Looks,
    Replicas,
    judge,
    why_not_one_whole,
)


def after(looks: Looks, boundary: int, weights: str, rest: str = "", is_full: bool = True) -> tuple[Looks, Look]:
    """All ranks report one parameter, in order; a letter each for its weights, and for its gradient and state."""
    found = None
    for rank, digest in enumerate(weights):
        held = {"w": (digest, rest[rank] if rest else "r")}
        looks, found = looks.note(rank, boundary, held, is_full)
    assert found is not None
    return looks, found


def alike(world_size: int) -> Looks:
    """Ranks that have held the same at boundary 1."""
    return after(Looks(world_size=world_size), 1, "a" * world_size)[0]


def test_what_meshes_declare_to_be_parts_is_distinguished_from_what_digests_alone_have_shown() -> None:
    looks, held = Looks(world_size=4), ["0 of 2", "1 of 2", "0 of 2", "1 of 2"]
    for rank, part in enumerate(held):
        of_rank = {"w": (part, "r"), "own": (f"table {rank % 2}", "r"), "norm": ("n", "r")}
        looks, _ = looks.note(rank, 1, of_rank, is_full=True, shards=["w"])

    assert (looks.replicas.shards, looks.replicas.differing) == ({"w": (0, 1, 0, 1)}, {"own": (0, 1, 0, 1)})
    assert looks.replicas.groups == [(0, 2), (1, 3)]
    assert looks.replicas.why_no_source(1, (0, 2)).text == "no other rank holds what rank 1 held: own, w"


def test_parts_whose_meshes_are_equal_and_whose_contents_differ_are_no_replicas() -> None:
    looks = Looks(world_size=2)
    for rank, digest in enumerate("ab"):
        looks, _ = looks.note(rank, 1, {"w": (digest, "r")}, is_full=True, shards=["w"])

    assert looks.replicas.groups == [(0,), (1,)]


def test_ranks_that_hold_the_same_at_a_full_look_are_replicas() -> None:
    looks = alike(3)

    assert looks.replicas == Replicas(compared_at=1)
    assert looks.replicas.peers(1, (0, 2)) == (0, 2)
    assert not looks.replicas.why_no_source(1, (0, 2))


def test_before_the_first_full_look_nobody_is_known_to_be_a_replica() -> None:
    assert (
        UNKNOWN.why_no_source(1, (0,)).text == "whether another rank holds the same as rank 1 has not been compared yet"
    )


def test_ranks_that_differ_at_the_first_look_are_no_replicas_of_each_other() -> None:
    looks, look = after(Looks(world_size=4), 1, "abab")

    assert (look.differing, look.divergence) == ({"w": (0, 1, 0, 1)}, None)
    assert looks.replicas.groups == [(0, 2), (1, 3)]
    assert looks.replicas.peers(3, (0, 1, 2)) == (1,)
    assert looks.replicas.why_no_source(3, (0, 2)).text == "no other rank holds what rank 3 held: w"


def test_shards_that_begin_with_equal_values_part_by_their_gradients() -> None:
    looks, _ = after(Looks(world_size=2), 1, "aa", rest="gh")

    assert looks.replicas.differing == {"w": (0, 1)}


def test_shards_whose_gradients_part_later_are_no_replicas_from_then_on_though_they_are_equal_again() -> None:
    looks, _ = after(alike(2), 2, "aa", rest="gh")
    looks, look = after(looks, 100, "aa", rest="gg", is_full=False)

    assert (look.differing, look.divergence) == ({}, None)
    assert looks.replicas.differing == {"w": (0, 1)}


def test_a_parameter_that_only_some_ranks_have_is_no_other_rank_s() -> None:
    looks, _ = Looks(world_size=2).note(0, 1, {"w": ("a", ""), "own": ("b", "")}, is_full=True)
    looks, _ = looks.note(1, 1, {"w": ("a", "")}, is_full=True)

    assert looks.replicas.differing == {"own": (0, 1)}


def test_a_rank_whose_parameters_are_held_by_different_peers_has_no_single_source() -> None:
    replicas = Replicas(compared_at=1, differing={"a": (0, 0, 2), "b": (0, 1, 0)})

    assert replicas.missing(0, (1, 2)) == []
    assert replicas.why_no_source(0, (1, 2)).text == "no single rank holds all that rank 0 held (a, b)"


def test_parameters_in_which_replicas_differ_in_a_snapshot_are_found() -> None:
    known = Replicas(compared_at=1, differing={"w": (0, 0, 2)})

    same = known.contradicted_by({0: {"w": "x", "v": "z"}, 1: {"w": "x", "v": "z"}, 2: {"w": "y", "v": "z"}})
    other = known.contradicted_by({0: {"w": "x", "v": "z"}, 1: {"w": "u", "v": "a"}})

    assert (same, other) == ([], ["w", "v"])


def test_what_was_looked_at_in_full_is_not_compared_with_what_was_not() -> None:
    """A survivor's weights of the step in which another rank was lost, and its replacement's proof of the same step."""
    looks, _ = alike(2).note(0, 8, {"w": ("a", "")}, is_full=False)

    looks, look = looks.note(1, 8, {"w": ("a", "gradient and state")}, is_full=True)

    assert look is None


@pytest.mark.parametrize(
    ("alike_at", "before", "now", "blamed"),
    [
        (1, "aaa", "bcb", (1,)),
        (1, "aaaaa", "bcbdb", (1, 3)),
        (1, "aa", "bc", ()),
        (0, "ab", "cd", None),
        (0, "ababab", "cdcdxd", (4,)),
    ],
    ids=["one of three", "several", "of two nobody", "those that never were alike", "one of its replica group"],
)
def test_ranks_that_differ_from_the_majority_of_their_replicas_are_named(
    alike_at: int, before: str, now: str, blamed: tuple[int, ...] | None
) -> None:
    looks, _ = after(Looks(world_size=len(before)), 1, before)

    _, look = after(looks, 100, now, is_full=False)

    assert (look.divergence and look.divergence.ranks) == blamed
    if alike_at:
        assert look.divergence == Divergence(boundary=100, agreed_at=1, ranks=blamed or (), digests=tuple(now))
        assert look.differing == {}
        assert ("no majority" in look.divergence.sentence) == (blamed == ())


def test_boundaries_of_which_a_rank_never_reports_are_forgotten() -> None:
    looks = Looks(world_size=2)

    for boundary in range(3 * KEPT):
        looks, _ = looks.note(0, boundary, {}, is_full=False)

    assert sorted(looks.reported) == [(boundary, False) for boundary in range(2 * KEPT, 3 * KEPT)]


def test_an_older_boundary_that_is_completed_late_is_compared_too() -> None:
    looks = alike(2)
    looks, _ = looks.note(0, 100, {"w": ("b", "r")}, is_full=False)
    looks, _ = looks.note(0, 200, {"w": ("c", "r")}, is_full=False)

    looks, look = looks.note(1, 100, {"w": ("b", "r")}, is_full=False)

    assert look is not None
    assert look.divergence is None
    assert looks.agreed_at == 100
    assert sorted(looks.reported) == [(200, False)]


def test_parts_make_one_whole_if_all_are_cut_alike_and_equal_places_hold_the_same() -> None:
    two_by_two = [{"w": ("[8]: 2 by S(0)", place)} for place in ("0 of 2", "1 of 2", "0 of 2", "1 of 2")]
    other_way = [*two_by_two[:2], {"w": ("[8]: 2 by S(1)", "0 of 2")}, {}]

    assert not why_not_one_whole({"w": (0, 1, 0, 1)}, two_by_two, {})
    assert why_not_one_whole({"w": (0, 1, 2, 3)}, two_by_two, {}).text == (
        "rank 0 and rank 2 hold different parameters w in the same place"
    )
    assert (
        why_not_one_whole({"w": (0, 1, 2, 3)}, other_way, {"w": "up.weight"}).text
        == "not all ranks shard up.weight in the same way"
    )


def test_shards_that_are_mirrored_need_no_snapshots() -> None:
    shards = {"w": (0, 1, 0, 3)}

    assert [Replicas(shards=shards, mirrored=frozenset(ranks)).needs_snapshots for ranks in ((), (1,), (1, 3))] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("taken", "finding"),
    [
        (["a 1", "a 1"], "equal"),
        (["a 1", "b 2"], "again"),
        (["a 1", "b 2", "b 2"], "suspect"),
        (["a 1", "b 2", "a 1"], "other"),
        (["a 1", "b 1.0001", "c 1.0002"], "rounding"),
        (["a 1", "b 2", "c 1"], "inconclusive"),
        (["a 1", "b nan", "c 1"], "inconclusive"),
    ],
)
def test_a_step_that_was_taken_several_times_is_judged_by_two_that_agree(taken: list[str], finding: str) -> None:
    rows = [[("batch 1", "same", "0"), ("loss 1", *text.split())] for text in taken]

    found, what = judge([[(name, digest, size) for name, digest, size in of_one] for of_one in rows], {})

    assert (found, what) == (finding, "" if finding == "equal" else "loss 1")


def test_a_process_that_has_computed_more_or_less_differs() -> None:
    own = [("loss 1", "a", "1")]

    assert judge([own, [], []], {}) == ("suspect", "loss 1")
    assert judge([[], own, own], {}) == ("suspect", "loss 1")


def test_the_parameters_are_named_whose_gradients_are_in_the_first_part_that_differs() -> None:
    what = "input of allreduce 1"

    def taken(*parts: int) -> list[tuple[str, str, str]]:
        return [(what, "a" * 16 + "".join("1111" if at in parts else "0000" for at in range(64)), "")]

    layouts = {what: [("head", 64), ("mlp.weight", 120), ("mlp.bias", 8)]}  # a part: 3 elements
    said = [judge([taken(), taken(*parts)], layouts).what for parts in ((0,), (21, 40), (62,))]

    assert said == [f"the gradient of {name} ({what})" for name in ("head", "head to mlp.weight", "mlp.bias")]
