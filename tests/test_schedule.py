"""What a fault's schedule comes to."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttprun.chaos.faults import DRAWN_PHASES, DRAWN_STEPS, ENDING_KINDS, KINDS, parse_fault, phases_of, strikes


def reported(text: str, ranks: int = 4, running_step: int = 0, count: int = 9) -> list[tuple[float | None, str]]:
    """Seconds and text of an order's first strikes."""
    return [(one.after_s, str(one.fault)) for one in islice(strikes(parse_fault(text), ranks, running_step), count)]


@pytest.mark.parametrize(
    ("order", "coming"),
    [
        ("kill:rank=1", [(None, "kill:rank=1")]),
        ("exit:rank=1,step=5,code=3", [(None, "exit:rank=1,step=5,code=3")]),
        ("kill:rank=1,after=2.5", [(2.5, "kill:rank=1")]),
        ("kill:rank=1,every=10s,count=2", [(10.0, "kill:rank=1"), (20.0, "kill:rank=1")]),
        ("kill:rank=1,after=1,every=10,count=2", [(1.0, "kill:rank=1"), (11.0, "kill:rank=1")]),
        ("kill:rank=1,every=5steps,count=2", [(None, "kill:rank=1,step=12"), (None, "kill:rank=1,step=17")]),
        ("kill:rank=0,step=9,every=1step,count=2", [(None, "kill:rank=0,step=9"), (None, "kill:rank=0,step=10")]),
        ("agent-kill:after=3", [(3.0, "agent-kill")]),
    ],
)
def test_an_order_comes_to_these_strikes(order: str, coming: list[tuple[float | None, str]]) -> None:
    assert reported(order, running_step=7) == coming


def test_a_period_without_a_count_has_no_end() -> None:
    assert len(reported("kill:rank=1,every=5s", count=1000)) == 1000


def test_keys_of_one_kind_are_not_given_to_another() -> None:
    drawn = reported("kill,exit:rank=1,seed=1,count=8,code=4")

    assert {"code=4" in text for _, text in drawn if text.startswith("exit")} == {True}
    assert {"code=4" in text for _, text in drawn if text.startswith("kill")} == {False}


@given(st.integers(0, 1 << 32), st.integers(1, 16), st.integers(0, 1000))
def test_whatever_is_drawn_can_strike_and_is_the_same_each_time(seed: int, ranks: int, running_step: int) -> None:
    order = parse_fault(f"random:seed={seed},count=4")

    drawn = list(strikes(order, ranks, running_step))

    assert drawn == list(strikes(order, ranks, running_step))
    step = running_step
    for one in drawn:
        assert one.fault.kind in ENDING_KINDS
        assert one.fault.rank in range(ranks)
        assert one.fault.phase in DRAWN_PHASES
        assert one.fault.step is not None
        assert step < one.fault.step <= step + DRAWN_STEPS
        assert parse_fault(str(one.fault)) == one.fault
        step = one.fault.step


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"agent-kill"}))
def test_every_kind_can_be_drawn_a_phase(kind: str) -> None:
    fault = next(strikes(parse_fault(f"{kind}:seed=1"), 2, 0)).fault

    assert fault.phase is None or fault.phase in phases_of(kind)
