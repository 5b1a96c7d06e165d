"""How faults are written down."""

import pytest

from ttprun.chaos.faults import KINDS, PHASES, Fault, parse_fault, phases_of


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
    assert "backward" in phases_of(kind)
    assert "\n" not in KINDS[kind]
