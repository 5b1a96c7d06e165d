"""What a rank says of its share of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.rank.fakes import FakeChannel, make_session
from ttprun.rank.recovery import Recovery


def test_a_rank_that_cannot_write_its_share_says_so_as_a_part_of_its_answer(tmp_path: Path) -> None:
    """A mismatch would be a reason to restart all ranks, as soon as they train again."""
    channel = FakeChannel()
    recovery = Recovery(make_session(channel=channel, rank=1))
    path = tmp_path / "gone" / "tensors-00000.safetensors"

    recovery._on_dump({"op": "dump", "generation": 4, "path": str(path), "share": 0, "of": 1})

    why_not = f"rank 1: [Errno 2] No such file or directory: '{path}'"
    assert channel.sent == [{"op": "dumped", "generation": 4, "why_not": why_not, "is_handled": False}]
    channel.close()
