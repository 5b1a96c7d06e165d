"""What a rank does with a fault that it is ordered to suffer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttprun.chaos import broken, damage, strikes
from ttprun.chaos.damage import Armed
from ttprun.chaos.injected_faults import parse_fault
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


def test_one_bit_of_a_gradient_is_flipped_and_of_a_sticky_fault_in_each_later_step_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gradient = torch.ones(64)
    session = SimpleNamespace(applied=3, channel=Line())
    monkeypatch.setattr(broken, "_is_gradient", lambda tensor: True)
    monkeypatch.setattr(strikes, "current", lambda: session)
    once, sticky = (Armed(at, parse_fault(f"flip-gradient:rank=1,step=3,seed=5,sticky={at}")) for at in (1, 2))
    once = replace(once, fault=replace(once.fault, sticky=None))
    monkeypatch.setattr(strikes, "waiting", [once, sticky])

    for armed in (once, sticky):
        assert damage.spoil(session, armed, "backward", "allreduce", [gradient])  # type: ignore[arg-type]
        assert strikes._take(armed)

    assert [message.number for message in session.channel.sent] == [1, 2]
    assert torch.equal(gradient, torch.ones(64))  # the same bit twice
    assert [(armed.number, armed.fault.step) for armed in strikes.waiting] == [(2, 4)]
