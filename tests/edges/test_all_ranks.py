"""A list of all ranks does not cross nodes: what is read is what was sent."""

from __future__ import annotations

from typing import Any

import pytest

from ttprun.protocol.codec import encode
from ttprun.protocol.from_rank import GroupJournal, RankFrozen, RankReissued
from ttprun.protocol.node_messages import in_full, shortened
from ttprun.protocol.to_rank import Freeze

RANKS = 1000
EVERYONE = list(range(RANKS))


@pytest.mark.parametrize(
    "message",
    [
        RankFrozen(1, 4, journal={"world": GroupJournal(EVERYONE, ["allreduce"]), "pair": GroupJournal([0, 1], [])}),
        RankFrozen(1, 4, journal={"pair": GroupJournal([0, 1], ["allreduce"])}),
        Freeze(tuple(EVERYONE[1:]), 1, (0,)),
        Freeze(tuple(EVERYONE[2:]), 1, (0,)),  # rank 1 is away
        RankReissued(1),
    ],
)
def test_a_message_of_all_ranks_is_read_as_it_was_before_it_was_shortened(message: Any) -> None:
    assert in_full(shortened(message, RANKS), RANKS) == message


def test_a_message_of_all_ranks_is_short_however_many_they_are() -> None:
    for message in (
        RankFrozen(1, 4, journal={"world": GroupJournal(EVERYONE, [])}),
        Freeze(tuple(EVERYONE[1:]), 1, (0,)),
    ):
        assert len(encode(shortened(message, RANKS))) < 250
