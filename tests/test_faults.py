"""How faults are written down."""

import pytest

from ttprun.faults import Fault, parse_fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:rank=1", Fault("kill", 1)),
        ("exit:rank=0,step=5", Fault("exit", 0, 5)),
        ("exception:rank=3,phase=in_step", Fault("exception", 3, None, "in_step")),
        ("kill:rank=1,step=0,phase=backward", Fault("kill", 1, 0, "backward")),
    ],
)
def test_a_fault_reads_back_as_it_was_written(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault
    assert str(fault) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("kil:rank=1", "there is no fault 'kil'; did you mean 'kill'?"),
        ("kill:rank=1,phase=backwards", "there is no phase 'backwards'; did you mean 'backward'?"),
        ("kill", "fault 'kill' names no rank; write KIND:rank=R[,step=N][,phase=P], or a seed to draw one"),
        ("kill:rank=-1", "fault 'kill:rank=-1': rank is '-1'; write a whole number from 0"),
        ("kill:rank=1,rank=2", "fault 'kill:rank=1,rank=2' names its rank twice; write KIND:rank=R[,step=N][,phase=P]"),
        ("kill:rnk=1", "fault 'kill:rnk=1' has no 'rnk'; did you mean 'rank'?"),
    ],
)
def test_a_fault_that_cannot_be_read_is_answered_with_what_would_be_right(text: str, complaint: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the whole text is compared)
        parse_fault(text)

    assert str(error.value) == complaint
