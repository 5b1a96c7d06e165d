"""Which old rank a rank of another layout continues: the one with the same random generators at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.capture.records import record_of
from ttprun.capture import values
from ttprun.capture.records.packing import Record, pack
from ttprun.capture.values import Tree
from ttprun.elastic_resume.adapted import Closest, OldRank, closest


def record(data_seed: int, drawn: int, own: int = 0) -> Record:
    """Of a rank that has drawn so much from the generator of its data; it has another one that nobody seeds or uses."""
    batches = torch.Generator().manual_seed(data_seed)
    torch.rand(drawn, generator=batches)
    snapshot = values.Snapshot({})
    scope = {"batches": batches, "other": torch.Generator().manual_seed(1000 + own), "rank": own}
    return Record.of(pack(record_of(1, variables=[snapshot.variables(scope)])), b"")


def old(seeds: list[int]) -> list[OldRank]:
    return [OldRank(record(seed, 4, rank), record(seed, 40, rank)) for rank, seed in enumerate(seeds)]


def seeds_of(seed: int) -> bytes:
    """Of a rank that is like no old one: the first state that it draws data with."""
    mine: Any = record(seed, 4, own=77)
    return closest(old([10, 10, 11, 11]), Tree(*mine), mine.fields.rng, 1).seeds


@pytest.mark.parametrize(
    ("seeds", "seed", "default", "expected"),
    [
        ([10, 10, 11, 11], 10, 0, Closest(0)),
        ([10, 10, 11, 11], 10, 3, Closest(0)),
        ([10, 10, 11, 11], 11, 1, Closest(2)),
        ([10, 10, 11, 11], 12, 2, Closest(0, seeds_of(12))),
        ([10, 11], 11, 1, Closest(1)),
        ([10, 11], 12, 0, Closest(None)),
        ([10, 10], 12, 1, Closest(None)),
        ([10], 12, 0, Closest(None)),
    ],
    ids=["itself", "another's data", "its data elsewhere", "new data", "as before", "one more", "all alike", "alone"],
)
def test_a_rank_continues_the_one_that_had_its_data(
    seeds: list[int], seed: int, default: int, expected: Closest
) -> None:
    mine: Any = record(seed, 4, own=77)

    assert closest(old(seeds), Tree(*mine), mine.fields.rng, default) == expected


def test_new_ranks_with_the_same_data_continue_alike_and_those_with_other_data_do_not() -> None:
    first: Any = record(12, 4, own=4)
    same: Any = record(12, 4, own=5)

    found = [
        closest(old([10, 10, 11, 11]), Tree(*one), one.fields.rng, default) for default, one in ((0, first), (1, same))
    ]

    assert found == [Closest(0, seeds_of(12))] * 2
    assert found[0].seeds
    assert found[0].seeds != seeds_of(13)
