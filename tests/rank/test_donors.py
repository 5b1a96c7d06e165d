"""Which old rank a rank of another layout continues: the one with the same random generators at first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.rank.records import record_of
from ttprun.elastic_resume.donors import Closest, OldRank, closest
from ttprun.rank import values
from ttprun.rank.records.boundary_record import Record
from ttprun.rank.records.packing import pack
from ttprun.rank.values import Tree


def record(data_seed: int, drawn: int, own: int = 0) -> Record:
    """Of a rank that has drawn so much from the generator of its data; it has another one that nobody seeds or uses."""
    batches = torch.Generator().manual_seed(data_seed)
    torch.rand(drawn, generator=batches)
    snapshot = values.Snapshot({})
    scope = {"batches": batches, "other": torch.Generator().manual_seed(1000 + own), "rank": own}
    return Record.of(pack(record_of(1, variables=[snapshot.variables(scope)])), b"")


def old(seeds: list[int]) -> list[OldRank]:
    return [OldRank(record(seed, 4, rank), record(seed, 40, rank)) for rank, seed in enumerate(seeds)]


@pytest.mark.parametrize(
    ("seeds", "seed", "default", "expected"),
    [
        ([10, 10, 11, 11], 10, 0, Closest(0, is_new=False)),
        ([10, 10, 11, 11], 10, 3, Closest(0, is_new=False)),
        ([10, 10, 11, 11], 11, 1, Closest(2, is_new=False)),
        ([10, 10, 11, 11], 12, 2, Closest(None, is_new=True)),
        ([10, 11], 11, 1, Closest(1, is_new=False)),
        ([10, 11], 12, 0, Closest(None, is_new=False)),
        ([10, 10], 12, 1, Closest(None, is_new=False)),
        ([10], 12, 0, Closest(None, is_new=False)),
    ],
    ids=["itself", "another's data", "its data elsewhere", "new data", "as before", "one more", "all alike", "alone"],
)
def test_a_rank_continues_the_one_that_had_its_data(
    seeds: list[int], seed: int, default: int, expected: Closest
) -> None:
    mine: Any = record(seed, 4, own=77)

    assert closest(old(seeds), Tree(*mine), mine.fields.rng, default) == expected
