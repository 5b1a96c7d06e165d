"""Which rank the others wait for, by what is seen of all."""

from ttprun.agent.lead.status_publisher import LEAST_LOOKS, MOST_LOOKS, BusyShares
from ttprun.protocol.board import Phase


def test_the_rank_that_is_seen_at_work_most_often_has_the_highest_share() -> None:
    shares = BusyShares()

    for look in range(LEAST_LOOKS):
        shares.note(0, Phase.COMPUTING)
        shares.note(1, Phase.COMPUTING if look % 2 else Phase.COMMITTING)
        shares.note(2, Phase.WAITING)

    assert [shares.share(rank) for rank in range(3)] == [1.0, 0.5, 0.0]


def test_nothing_is_said_of_a_rank_before_it_was_seen_often_enough() -> None:
    shares = BusyShares()

    for _ in range(LEAST_LOOKS - 1):
        shares.note(0, Phase.COMPUTING)

    assert shares.share(0) is None
    assert shares.share(1) is None


def test_a_rank_that_becomes_slow_is_seen_though_it_was_quick_for_long() -> None:
    shares = BusyShares()

    for _ in range(100 * MOST_LOOKS):
        shares.note(0, Phase.WAITING)
    for _ in range(MOST_LOOKS):
        shares.note(0, Phase.COMPUTING)

    share = shares.share(0)
    assert share is not None
    assert share > 0.6
