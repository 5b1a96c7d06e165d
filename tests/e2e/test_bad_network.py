"""A bad network between the nodes: histories picked by hand. Many more are drawn by scripts/histories.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import histories
from tests.e2e.harness import Undisturbed
from tests.histories import History, Spell, Told
from tests.network import cut_between
from tests.nodes import why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())
ALL = {size: tuple(cut_between(tuple((node,) for node in range(nodes)))) for size, nodes in histories.SIZES.items()}
Tell = Callable[..., Told]


@pytest.fixture
def tell(tmp_path: Path, undisturbed: Undisturbed) -> Tell:
    """`tell(size, spells, moment=8, ...)`: what becomes of such a history."""

    def told(size: str, spells: list[Spell], moment: int = 8, **how: object) -> Told:
        references = {ranks: undisturbed(histories.SCRIPT, ranks) for ranks in (int(size[0]),)}
        history = History(0, 0, size, True, moment, tuple(spells), **how)  # type: ignore[arg-type]
        return histories.tell(history, tmp_path / "history", references)

    return told


def cut(shape: str, links: tuple[tuple[int, int], ...], for_s: float, at_s: float = 0.0) -> Spell:
    return Spell("cut", shape, links, at_s, for_s)


def test_on_a_slow_network_that_loses_packets_nobody_is_taken_for_lost(tell: Tell) -> None:
    told = tell("3", [Spell("both", "all", ALL["3"], 0.0, 8.0)])

    assert told.problems == []
    assert (told.end, told.lost) == ("undisturbed", 0)


@pytest.mark.parametrize("size", ["2:3"])
def test_three_seconds_without_a_network_lose_nobody(tell: Tell, size: str) -> None:
    told = tell(size, [cut("each alone", ALL[size], 3.0), cut("each alone", ALL[size], 3.0, at_s=4.0)])

    assert told.problems == []
    assert (told.end, told.lost) == ("undisturbed", 0)


def test_a_cut_between_two_nodes_without_a_spare_ends_both_and_each_says_why(tell: Tell) -> None:
    told = tell("2", [cut("halves", ALL["2"], 40.0)])

    assert told.problems == []
    assert (told.end, told.exit_codes) == ("ended", [[143], [143]])
    assert any("reaches 1 of 2 agents: the others may go on without it" in reason for reason in told.reasons)
    assert any("no other took its place within 15 s (--node-wait-s)" in reason for reason in told.reasons)


def test_of_three_nodes_the_two_that_reach_each_other_go_on_with_the_spare(tell: Tell) -> None:
    told = tell("2:3", [cut("1 | 0 2", tuple(cut_between(((1,), (0, 2)))), 20.0)], is_last_spare=True)

    assert told.problems == []
    assert (told.end, told.exit_codes) == ("repaired", [[0], [143], [0]])


def test_after_a_cut_into_thirds_launchers_that_are_started_again_train_to_the_same_weights(tell: Tell) -> None:
    told = tell("3", [cut("each alone", ALL["3"], 20.0)], is_requeued=True)

    assert told.problems == []
    assert told.end == "done later"


def test_a_launcher_that_comes_back_to_serve_the_store_finds_the_job_that_goes_on_without_it(tell: Tell) -> None:
    told = tell("2:3", [], killed="launcher", on=0, kill_at_s=0.5, is_requeued=True)

    assert told.problems == []
    assert (told.end, [codes[-1] for codes in told.exit_codes]) == ("done later", [0, 0, 0])
