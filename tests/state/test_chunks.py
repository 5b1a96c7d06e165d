"""What is missing of tensors that were sharded over ranks."""

from __future__ import annotations

from ttprun.state.chunks import Chunk, held_of, what_is_missing


def rows(begin: int, end: int) -> tuple[list[int], list[int], list[int]]:
    """A part of a weight of 10 x 4, as a rank reports it: shape, offsets, sizes."""
    return [10, 4], [begin, 0], [end - begin, 4]


def test_the_parts_of_lost_ranks_are_missing_and_each_is_named_with_its_rank() -> None:
    held = held_of([["weight", [[0, *rows(0, 4)], [1, *rows(4, 8)], [2, *rows(8, 10)]]]])

    assert what_is_missing(held, [0, 1, 2]) == []
    assert what_is_missing(held, [1]) == ["weight rows 0:4 (rank 0)", "weight rows 8:10 (rank 2)"]


def test_a_part_that_a_living_rank_holds_too_is_not_missing() -> None:
    held = held_of([["weight", [[0, *rows(0, 5)], [1, *rows(5, 10)], [2, *rows(0, 5)], [3, *rows(5, 10)]]]])

    assert what_is_missing(held, [0, 3]) == []
    assert what_is_missing(held, [0, 2]) == ["weight rows 5:10 (rank 1)"]


def test_a_rank_that_held_nothing_of_a_tensor_leaves_no_hole() -> None:
    held = held_of([["bias", [[0, [2], [0], [1]], [1, [2], [1], [1]], [2, [2], [2], [0]]]]])

    assert what_is_missing(held, [0, 1]) == []


def test_a_part_that_is_cut_in_other_dimensions_is_reported_as_a_slice() -> None:
    assert Chunk((4, 6), (0, 3), (4, 3)).sentence == "[0:4, 3:6]"
    assert Chunk((8,), (2,), (2,)).sentence == "rows 2:4"
