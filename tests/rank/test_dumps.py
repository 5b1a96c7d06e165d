"""What a rank says of its share of a checkpoint."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.rank.fakes import FakeChannel, make_session
from ttprun.protocol import to_rank
from ttprun.protocol.snapshot_messages import Dumped
from ttprun.rank.replay import recovery_orders


def test_a_rank_that_cannot_write_its_share_says_so_as_a_part_of_its_answer(tmp_path: Path) -> None:
    """A mismatch would be a reason to restart all ranks, as soon as they train again."""
    channel = FakeChannel()
    session = make_session(channel=channel, rank=1)
    path = tmp_path / "gone" / "tensors-00000.safetensors"

    recovery_orders.dump(session, to_rank.Dump(4, 6, str(path), share=0, of=1, owners={}, writers=[0]))

    why = f"no checkpoint can be written to '{tmp_path}': No such file or directory; name another directory with --save-dir"
    why_not = f"rank 1: {why}"
    assert channel.sent == [Dumped(4, why_not, is_handled=False)]
    channel.close()


class Handler:
    """As a script may have it: it cannot be a key of a dictionary."""

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, number: int, frame: object) -> None:
        pass


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_script_that_handles_a_signal_which_ends_jobs_has_something_to_do_then(tmp_path: Path, name: str) -> None:
    """Python's own handler of SIGINT does not count: what it raises, it raises in a rank that is quiesced as well."""
    channel = FakeChannel()
    session = make_session(channel=channel, rank=1)
    order = to_rank.Dump(4, 6, str(tmp_path / "gone" / "x"), share=0, of=1, owners={}, writers=[0])

    recovery_orders.dump(session, order)
    old = signal.signal(signal.Signals[name], Handler())
    recovery_orders.dump(session, order)
    signal.signal(signal.Signals[name], old)

    assert [message.is_handled for message in channel.sent] == [False, True]
    channel.close()
