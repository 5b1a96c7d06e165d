"""Gradients and results that are passed on after a repair that was equal to rounding alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rank.fakes import FakeChannel, make_session
from ttprun.groups.collectives import unpack_given
from ttprun.groups.operations import Entry
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field
from ttprun.rank.proof import Alignment
from ttprun.tensors.state_transfer import InDirectory, serve_gradients, take_gradients

LIMIT_S = 60.0


def optimizer_with(*gradients: torch.Tensor | None) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.SGD(parameters, lr=0.1)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]


def pass_on(folder: Path, source: torch.optim.Optimizer, taker: torch.optim.Optimizer) -> None:
    place = InDirectory(str(folder), "gradients.sock")

    def serve() -> None:
        with contextlib.suppress(OSError):  # the taker may leave before it has all
            serve_gradients(place, source, 1, LIMIT_S, lambda: None)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        take_gradients(place, taker, LIMIT_S, lambda: None)
    finally:
        serving.join(LIMIT_S)


def test_a_taker_has_the_gradients_of_the_source_bit_for_bit(tmp_path: Path) -> None:
    source = optimizer_with(torch.randn(3, 4), None, torch.randn(4, 3).t())
    taker = optimizer_with(torch.zeros(3, 4), None, torch.zeros(3, 4))

    pass_on(tmp_path, source, taker)

    pairs = list(zip(gradients_of(source), gradients_of(taker), strict=True))
    assert [one is other or torch.equal(one, other) for one, other in pairs] == [True, True, True]


def test_whoever_waits_for_a_source_that_is_lost_stops_when_a_newer_generation_begins(tmp_path: Path) -> None:
    asked = []

    def overtaken() -> None:
        asked.append(time.monotonic())
        if len(asked) > 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        take_gradients(InDirectory(str(tmp_path), "nobody.sock"), optimizer_with(torch.ones(3, 4)), LIMIT_S, overtaken)

    assert len(asked) == 4


def test_gradients_of_other_parameters_are_not_taken(tmp_path: Path) -> None:
    source, taker = optimizer_with(torch.ones(3, 4), None), optimizer_with(None, torch.zeros(3, 4))

    with pytest.raises(NotRepairableError, match="other parameters"):
        pass_on(tmp_path, source, taker)

    assert not gradients_of(taker)[1].any()


@pytest.fixture
def session() -> Iterator[Rank]:
    channel = FakeChannel()
    yield make_session(channel=channel)
    channel.close()


def arriving(session: Rank, boundary: int) -> threading.Thread:
    """Its main thread comes to an optimizer step."""
    optimizer = optimizer_with(None)
    thread = threading.Thread(target=lambda: session[Alignment].arrive(session, boundary, optimizer), daemon=True)
    thread.start()
    return thread


def asked(session: Rank, times: int) -> list[tuple[int, int]]:
    """(generation, boundary) of what it has asked, once it has asked so often."""
    channel: Any = session.channel
    give_up_at_s = time.monotonic() + LIMIT_S
    while len(_questions(channel)) < times and time.monotonic() < give_up_at_s:
        time.sleep(0.01)  # nobody is notified of a message that was sent
    return _questions(channel)


def _questions(channel: Any) -> list[tuple[int, int]]:
    found = (message for message in channel.sent if isinstance(message, from_rank.Unaligned))
    return [(message.generation, message.boundary) for message in found]


def test_a_replacement_waits_through_another_recovery_until_it_has_the_gradients(session: Rank) -> None:
    alignment = session[Alignment]
    alignment.is_needed = True
    alignment.begin(session, session.generation, source=0)

    main = arriving(session, boundary=6)
    first = asked(session, 1)
    session.generation += 1
    alignment.begin(session, session.generation, source=2)
    second = asked(session, 2)
    was_waiting = main.is_alive()
    alignment.note_aligned(session, 6)
    main.join(LIMIT_S)

    generation = session.generation
    assert (first, second) == ([(generation - 1, 6)], [(generation - 1, 6), (generation, 6)])
    assert (was_waiting, main.is_alive()) == (True, False)


def test_a_replacement_whose_own_results_count_after_another_recovery_goes_on(session: Rank) -> None:
    alignment = session[Alignment]
    alignment.is_needed = True
    alignment.begin(session, session.generation, source=0)

    main = arriving(session, boundary=6)
    asked(session, 1)
    alignment.begin(session, session.generation, source=None)
    main.join(LIMIT_S)

    assert not main.is_alive()


def test_a_survivor_asks_nothing_and_its_step_is_known_once_it_has_recorded_it(session: Rank) -> None:
    optimizer = optimizer_with(None)
    session[Alignment].begin(session, session.generation, source=0)

    session[Alignment].arrive(session, 6, optimizer)
    before = session[Alignment].optimizer_at(session, 6)
    session.board.announce(session.rank, Field.RECORDED, 6)

    assert (before, session[Alignment].optimizer_at(session, 6)) == (None, optimizer)
    assert asked(session, 0) == []


def test_small_results_that_come_from_another_rank_are_taken_apart() -> None:
    group: Any = None
    outputs = [torch.zeros(2, 3).t(), torch.zeros(0), torch.zeros(4, dtype=torch.int64)]
    results = [torch.arange(6.0).view(3, 2), torch.zeros(0), torch.arange(4)]
    entry = Entry(group, "allgather", (), outputs)
    entry.given = torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in results])

    unpack_given(entry)

    assert all(torch.equal(one, other) for one, other in zip(outputs, results, strict=True))
    assert entry.given is None
