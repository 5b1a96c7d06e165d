"""Parts of sharded tensors: their place in the whole, and what is missing of a whole.

Without torch: the agent uses it too, to find what is lost with a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add

# Between the key of a tensor that differs between ranks and the lowest rank that held this version.
OWNER = "@"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of elements of a larger tensor.

    shape    [n_dims] of the whole
    offsets  [n_dims] of the box's first element
    sizes    [n_dims] of the box; one of them is 0 if a rank holds nothing
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Chunk:
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.sizes == self.shape

    @property
    def ends(self) -> tuple[int, ...]:
        """[n_dims] behind the box's last element."""
        return tuple(map(add, self.offsets, self.sizes))

    @property
    def count(self) -> int:
        """Elements in it."""
        return prod(self.sizes)

    @property
    def sentence(self) -> str:
        """Where it lies: "rows 32:64", or a slice of each dimension."""
        slices = [f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.sizes, strict=True)]
        return f"rows {slices[0]}" if self.sizes[1:] == self.shape[1:] else f"[{', '.join(slices)}]"


@dataclass(frozen=True, slots=True)
class HeldChunks:
    """Who holds what of one tensor.

    by_rank  rank -> its box
    """

    by_rank: Mapping[int, Chunk]

    def missing(self, living: Sequence[int]) -> list[tuple[int, Chunk]]:
        """(a rank, its box) of each box that no living rank holds."""
        boxes = {(chunk.offsets, chunk.sizes) for rank, chunk in self.by_rank.items() if rank in living}
        missing: list[tuple[int, Chunk]] = []
        for rank, chunk in sorted(self.by_rank.items()):
            if chunk.count and (chunk.offsets, chunk.sizes) not in boxes:
                boxes.add((chunk.offsets, chunk.sizes))
                missing.append((rank, chunk))
        return missing


def held_of(
    reported: Sequence[tuple[str, Sequence[tuple[int, list[int], list[int], list[int]]]]],
) -> dict[str, HeldChunks]:
    """A rank's report, as name -> the parts of each rank.

    reported   [name, [[rank, shape, offsets, sizes] of each rank]] of each sharded tensor
    """
    return {
        name: HeldChunks(
            {rank: Chunk(tuple(shape), tuple(offsets), tuple(sizes)) for rank, shape, offsets, sizes in by_rank}
        )
        for name, by_rank in reported
    }


def what_is_missing(holders: Mapping[str, HeldChunks], living: Sequence[int]) -> list[str]:
    """The parts that no rank holds any more: "blocks.0.weight rows 32:64 (rank 1)", in the order of `holders`.

    holders name of each sharded tensor -> who holds what of it
    living  ranks that are left
    """
    return [
        f"{name} {chunk.sentence} (rank {rank})"
        for name, chunks in holders.items()
        for rank, chunk in chunks.missing(living)
    ]
