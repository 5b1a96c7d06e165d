"""What a rank does with a fault that it is ordered to suffer."""

from __future__ import annotations

from typing import Any

import pytest

from ttprun.chaos import strikes
from ttprun.protocol import from_rank, to_rank


class Line:
    """The line to the agent: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_a_fault_that_cannot_be_read_is_reported_and_the_line_goes_on_being_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strikes, "waiting", [])
    line, others = Line(), list[Any]()
    take = strikes.taken_from(others.append, line)  # type: ignore[arg-type]

    take(to_rank.InjectedFault(901, "kil:rank=1"))
    take(to_rank.EndAsked())
    take(to_rank.InjectedFault(902, "kill:rank=1,step=3"))

    assert [type(message) for message in line.sent] == [from_rank.FaultFailed]
    assert line.sent[0].number == 901
    assert "kil" in line.sent[0].reason
    assert [armed.number for armed in strikes.waiting] == [902]
    assert others == [to_rank.EndAsked()]
