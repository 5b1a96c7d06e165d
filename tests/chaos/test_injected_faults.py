"""How faults are written down, and what a schedule of them comes to."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ttprun.chaos.injected_faults import (
    DRAWN_PHASES,
    DRAWN_STEPS,
    ENDING_KINDS,
    KINDS,
    PHASES,
    Fault,
    parse_fault,
    phases_of,
    strikes,
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=1", Fault("kill", 1)),
        ("exit:rank=0,step=5", Fault("exit", 0, 5)),
        ("exception:rank=3,phase=in_step", Fault("exception", 3, None, "in_step")),
        ("kill:rank=1,step=0,phase=backward", Fault("kill", 1, 0, "backward")),
        ("exit:rank=1,code=7", Fault("exit", 1, code=7)),
        ("silent:rank=1,peer=0,seconds=2.5", Fault("silent", 1, peer=0, seconds=2.5)),
        ("slow:rank=1,rate=1000", Fault("slow", 1, rate=1000)),
        ("kill,exit:after=3,every=10s,count=4,seed=1", Fault("kill,exit", after=3.0, every="10s", count=4, seed=1)),
        ("random:every=5steps,seed=2", Fault("random", every="5steps", seed=2)),
        ("agent-kill", Fault("agent-kill")),
    ],
)
def test_a_fault_reads_back_as_it_was_written(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert str(fault) == text


@pytest.mark.parametrize(
    ("written", "read"), [("5step", "5steps"), ("1step", "1steps"), ("10", "10s"), ("2.5s", "2.5s")]
)
def test_a_period_has_one_spelling_inside(written: str, read: str) -> None:
    assert parse_fault(f"kill:rank=1,every={written}").every == read


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kil:rank=1", "there is no fault 'kil'; did you mean 'kill'?"),
        ("kill:rank=1,phase=backwards", "there is no phase 'backwards'; did you mean 'backward'?"),
        ("kill", "fault 'kill' names no rank; write KIND:rank=R[,step=N][,phase=P], or a seed to draw one"),
        ("kill:rank=-1", "fault 'kill:rank=-1': rank is '-1'; write a whole number from 0"),
        ("kill:rank=1,rank=2", "fault 'kill:rank=1,rank=2' names its rank twice; write KIND:rank=R[,step=N][,phase=P]"),
        ("kill:rnk=1", "fault 'kill:rnk=1' has no 'rnk'; did you mean 'rank'?"),
        ("\nkill:rnk=1\n", "fault 'kill:rnk=1' has no 'rnk'; did you mean 'rank'?"),
        ("kill:rank=1,every=soon", "every is 'soon'; write a number of seconds, as 10s, or of steps, as 5steps"),
        ("kill:rank=1,every=0steps", "every is '0steps'; write a whole number from 1"),
        ("kill:rank=1,count=3", "has a count and no interval; give every=5steps or every=10s, or a seed"),
        ("kill:rank=1,after=-1", "after is '-1'; write a number of seconds"),
        ("random:rank=1", "fault 'random:rank=1' leaves its kind open; add a seed, as in random:rank=1,seed=1"),
        ("exit:rank=1,code=0", "code is '0'; write a number from 1 to 255 (to end with 0: leave)"),
        ("kill:rank=1,code=2", "code does not fit kill; it is the exit code of exit"),
        ("silent:rank=1,peer=1", "peer is the rank itself; name another rank"),
        (
            "exception:rank=1,phase=start",
            "exception cannot strike in phase start (the script's code does not run there)",
        ),
        ("nan:rank=1,phase=forward", "(no gradient is reduced there); use one of backward, collective"),
        (
            "exception:rank=1,phase=fork",
            "exception cannot strike in phase fork (the script's code does not run there)",
        ),
        ("sleep:rank=1,phase=fork", "(only a signal from outside reaches it there); use one of start, "),
        ("silent:rank=1,phase=init", "silent cannot strike in phase init (the rank is not connected there)"),
    ],
)
def test_a_fault_that_cannot_be_read_is_answered_with_what_would_be_right(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the text is compared)
        parse_fault(text)

    assert complaint in str(error.value)
    assert "; " in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_strike_in_some_phase_and_is_explained(kind: str) -> None:
    assert set(phases_of(kind)) <= set(PHASES)
    assert {"forward", "backward"} & {*phases_of(kind)}
    assert "\n" not in KINDS[kind]


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
