"""What the launcher makes of signals that come one after the other."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from ttprun.agent.launcher import signals as launcher_signals
from ttprun.agent.launcher.signals import Signals

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Job:
    """Counts what the signals do to it."""

    def __init__(self, grace_s: float | None = None) -> None:
        self.noted = self.ended_at_once = 0
        self.signals = Signals("SIGTERM,SIGINT,SIGHUP,SIGQUIT", grace_s, self.note, self.end_at_once)
        self.signals.install()

    def note(self) -> None:
        self.noted += 1

    def end_at_once(self) -> None:
        self.ended_at_once += 1

    def first(self, number: signal.Signals) -> None:
        with pytest.raises(SignalException):
            signal.raise_signal(number)


@pytest.mark.parametrize("further", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_or_a_different_signal_is_the_same_request(first: signal.Signals, further: signal.Signals) -> None:
    job = Job()
    job.first(first)

    signal.raise_signal(further)

    assert (job.noted, job.ended_at_once, job.signals.first) == (1, 0, first)


def test_a_persons_second_interrupt_means_now_whatever_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    job, now_s = Job(), [100.0]
    monkeypatch.setattr(launcher_signals.time, "monotonic", lambda: now_s[0])
    job.first(signal.SIGTERM)

    signal.raise_signal(signal.SIGINT)
    now_s[0] += 1.0
    signal.raise_signal(signal.SIGINT)

    assert job.ended_at_once == 1


def test_one_press_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal signals the launcher and its parent, which passes it on."""
    job, now_s = Job(), [100.0]
    monkeypatch.setattr(launcher_signals.time, "monotonic", lambda: now_s[0])
    job.first(signal.SIGINT)

    now_s[0] += 0.01
    signal.raise_signal(signal.SIGINT)

    assert job.ended_at_once == 0


def test_the_grace_time_begins_with_the_first_sigterm_and_not_with_an_announcement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(launcher_signals.time, "monotonic", lambda: now_s[0])
    job = Job(grace_s=30)
    job.first(signal.SIGUSR1)
    announced_s = job.signals.left_s()

    signal.raise_signal(signal.SIGTERM)
    now_s[0] += 7.0
    signal.raise_signal(signal.SIGTERM)

    assert announced_s == float("inf")
    assert job.signals.left_s() == 23.0
    assert job.signals.left_to_save_s() < job.signals.left_s() - 4


def test_without_a_grace_time_saving_is_not_bounded_by_one() -> None:
    job = Job()
    job.first(signal.SIGTERM)

    assert job.signals.left_to_save_s() == float("inf")
