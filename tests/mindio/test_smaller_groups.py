"""Training with fewer ranks: what handlers are called with, and what a scheduler may ask for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from mindio_ttp.framework_ttp import (
    tft_register_rebuild_group_handler,
    tft_register_repair_handler,
    tft_register_rollback_handler,
    tft_register_zit_downgrade_rebuild_handler,
    tft_register_zit_upgrade_rebuild_handler,
    tft_register_zit_upgrade_repair_handler,
    tft_register_zit_upgrade_rollback_handler,
)

from ttprun.groups.collectives import OPERATION_NUMBERS
from ttprun.groups.connection import Exchange
from ttprun.groups.process_group import ManagedGroup
from ttprun.introspect.current_rank import Rank
from ttprun.mindio.framework import Framework
from ttprun.mindio.handlers import CallbackFailedError, Size
from ttprun.protocol.board import Field

SMALLER = Size(ranks=(0, 1), data_parallel=(0,), params='{"scale-in-strategy": "DP"}')
WHOLE_AGAIN = Size(params='{"scale-out-strategy": "DP"}')
INFO = {"type": [0], "repair_type": 0, "src": [0], "dst": [2], "rank_list": [0, 2]}


class Calls(list[tuple[Any, ...]]):
    """What handlers were called with."""

    def noted_as(self, name: str) -> Any:
        """A handler that notes its arguments."""
        return lambda *arguments: self.append((name, *arguments))


@pytest.fixture
def calls(session: Rank, framework: Framework) -> Calls:
    """All ordinary handlers are registered, with the ctx "c", and args are ["model"]."""
    found = Calls()
    framework.handlers.args = ["model"]
    tft_register_rebuild_group_handler(found.noted_as("rebuild_group"), "c")
    tft_register_repair_handler(found.noted_as("repair"), "c")
    tft_register_rollback_handler(found.noted_as("rollback"), "c")
    return found


def carry_out(framework: Framework, size: Size) -> None:
    """A whole recovery that leads to so many ranks."""
    framework.handlers.rebuild_group([2, 3], size)
    framework.handlers.repair(7, False, [2], INFO, size)
    framework.handlers.rollback(7, size)


def test_the_ranks_that_are_left_rebuild_their_groups_as_mindio_calls_it(framework: Framework, calls: Calls) -> None:
    tft_register_zit_downgrade_rebuild_handler(calls.noted_as("downgrade_rebuild"), "never passed on")

    carry_out(framework, SMALLER)

    assert calls == [
        ("downgrade_rebuild", [0], [0, 1], ["model"], SMALLER.params),
        ("repair", 7, False, [2], INFO, ["model"], "c"),
        ("rollback", 7, ["model"], "c"),
    ]


def test_when_all_are_back_the_handlers_of_an_upgrade_take_the_place_of_the_others(
    framework: Framework, calls: Calls
) -> None:
    tft_register_zit_upgrade_rebuild_handler(calls.noted_as("upgrade_rebuild"), "never passed on")
    tft_register_zit_upgrade_repair_handler(calls.noted_as("upgrade_repair"))
    tft_register_zit_upgrade_rollback_handler(calls.noted_as("upgrade_rollback"))

    carry_out(framework, WHOLE_AGAIN)

    assert calls == [
        ("upgrade_rebuild", [2, 3], ["model"], WHOLE_AGAIN.params),
        ("upgrade_repair", 7, False, [2], INFO, ["model"], WHOLE_AGAIN.params),
        ("upgrade_rollback", 7, ["model"], WHOLE_AGAIN.params),
    ]


@pytest.mark.parametrize("size", [WHOLE_AGAIN, Size()])
def test_a_handler_of_an_upgrade_that_is_not_there_leaves_it_to_the_ordinary_one(
    framework: Framework, calls: Calls, size: Size
) -> None:
    carry_out(framework, size)

    assert [call[0] for call in calls] == ["rebuild_group", "repair", "rollback"]
    assert {call[-1] for call in calls} == {"c"}


def test_without_its_handler_no_smaller_group_is_gone_on_with(framework: Framework, calls: Calls) -> None:
    with pytest.raises(CallbackFailedError, match="no zit_downgrade_rebuild handler is registered"):
        framework.handlers.rebuild_group([], SMALLER)


def test_a_group_with_a_rank_that_is_away_says_so_and_does_not_wait_for_it(session: Rank, framework: Framework) -> None:
    session.away = frozenset({1})
    group = ManagedGroup(session, session[Exchange], "world", [0, 1], 0, timedelta(seconds=5))

    with pytest.raises(RuntimeError, match="process group 'world' includes rank 1, which is away"):
        group.issue("barrier", (dist.BarrierOptions(),))


def test_all_that_are_there_meet_though_one_is_away(session: Rank) -> None:
    session.meet(OPERATION_NUMBERS["allreduce"], size=1)
    before = session.board.get(0, Field.MEETINGS)
    session.away = frozenset({1})
    session.meet(OPERATION_NUMBERS["allreduce"], size=1)

    assert (before, session.board.get(0, Field.MEETINGS)) == (0, 1)
