"""Everything that another process can write is read without a crash, a hang, or a wrong acceptance.

python -m tests.fuzz --cases 100000 [--seed 1] [target ...]     many more cases than an ordinary run
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.damage import damaged, with_each_text_replaced
from tests.fuzz.targets import OF_NODES, TARGETS, traffic
from ttprun.protocol import meeting, node_messages
from ttprun.protocol.board import FINISHED, SHARED, Field
from ttprun.protocol.codec import decode

CASES = 200


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("name", TARGETS)
def test_what_another_process_can_write_is_read_without_harm(name: str) -> None:
    fuzz(name, CASES)


@pytest.mark.parametrize("name", TARGETS)
def test_a_text_that_is_no_unicode_is_read_without_harm_wherever_it_stands(name: str) -> None:
    target = TARGETS[name]
    with ExitStack() as stack:
        feed = target.open(stack)
        for data in target.seeds():
            for damaged_text in with_each_text_replaced(data, "\ud800"):
                feed(damaged_text)


def test_what_agents_send_each_other_is_taken_also_of_a_rank_that_has_finished() -> None:
    values = [FINISHED if field == Field.RECORDED else 0 for field in SHARED]
    messages = [decode(line, OF_NODES) for line in traffic(OF_NODES)]

    reasons = [
        node_messages.why_unfit(message, 2)
        for message in (*messages, node_messages.Rows(1, [meeting.BoardRow(1, values)]))
    ]

    assert len(reasons) > 20
    assert {*reasons} == {""}


def fuzz(name: str, cases: int, drawn_from: int | None = None) -> None:
    """Feed a target with so many damaged pieces of what was recorded.

    drawn_from   what the cases are drawn from; None: as the profile of the tests says, the same each time
    """
    target = TARGETS[name]
    with ExitStack() as stack:
        seeds, feed = target.seeds(), target.open(stack)
        for whole in seeds:
            feed(whole)

        # Not made smaller: that takes minutes, and what failed is printed.
        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(damaged(seeds))
        def run(data: bytes) -> None:
            feed(data)

        (run if drawn_from is None else seed(drawn_from)(run))()
