"""State between two processes of one node: through a ring of shared memory, whose ends may die at any moment."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ttprun.tensors import state_transfer
from ttprun.tensors.state_transfer import InDirectory, serve_gradients, take_gradients

LIMIT_S = 60.0
ELEMENTS = 1_500_000  # of 4 bytes: with slots of 1 MiB a tensor takes several turns


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "_SLOT_BYTES", 1 << 20)


def optimizer_with(*gradients: torch.Tensor) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.optim.SGD(parameters, lr=0.1)


def values() -> list[torch.Tensor]:
    """Of odd sizes, transposed, empty, of one element."""
    drawn = torch.Generator().manual_seed(3)
    shapes = ((ELEMENTS,), (7,), (0, 3), (), (999, 501))
    return [torch.randn(shape, generator=drawn) for shape in shapes[:-1]] + [
        torch.randn(shapes[-1], generator=drawn).t()
    ]


class Counted(socket.socket):
    """Counts what is sent."""

    sent = 0

    def sendall(self, data: Any, *flags: int) -> None:
        Counted.sent += memoryview(data).nbytes
        super().sendall(data, *flags)

    def accept(self) -> tuple[Counted, Any]:
        connection, address = super().accept()
        return Counted(fileno=connection.detach()), address


@contextlib.contextmanager
def source_of(place: InDirectory, gradients: list[torch.Tensor]) -> Iterator[multiprocessing.Process]:
    """A process that sends them once, and ends with 0 if it has."""
    context: Any = multiprocessing.get_context("fork")
    process = context.Process(
        target=serve_gradients, args=(place, optimizer_with(*gradients), 1, LIMIT_S, lambda: None)
    )
    process.start()
    try:
        yield process
    finally:
        process.join(LIMIT_S)
        process.kill()


def take(place: InDirectory, form: list[torch.Tensor]) -> list[torch.Tensor]:
    taker = optimizer_with(*map(torch.zeros_like, form))
    take_gradients(place, taker, LIMIT_S, lambda: None)
    return [parameter.grad for group in taker.param_groups for parameter in group["params"]]


def rings() -> list[str]:
    """Mappings and descriptors of a ring in this process."""
    mapped = Path("/proc/self/maps").read_text().splitlines()
    opened = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [line for line in mapped + opened if "ttprun-ring" in line]


def test_all_tensors_come_bit_for_bit_and_in_order_and_nothing_of_the_ring_stays(tmp_path: Path) -> None:
    place, sent = InDirectory(str(tmp_path), "state"), values()

    with source_of(place, sent) as source:
        taken = take(place, sent)

    assert source.exitcode == 0
    assert all(torch.equal(one, other) for one, other in zip(taken, sent, strict=True))
    assert rings() == []


@pytest.mark.parametrize(("free", "least", "most", "said"), [(1 << 40, 0, 4096, 0), (1 << 20, 8_000_000, 1 << 30, 1)])
def test_the_socket_carries_the_order_alone_unless_memory_is_short_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, least: int, most: int, said: int
) -> None:
    monkeypatch.setattr(state_transfer, "free_bytes", lambda: free)
    monkeypatch.setattr(socket, "socket", Counted)
    monkeypatch.setattr(Counted, "sent", 0)
    notes: list[str] = []
    place, gradients = InDirectory(str(tmp_path), "state", notes.append), values()

    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            take(place, gradients)
            os._exit(0)
        os._exit(1)
    serve_gradients(place, optimizer_with(*gradients), 1, LIMIT_S, lambda: None)

    assert os.waitpid(pid, 0)[1] == 0
    assert least <= Counted.sent < most
    assert [("over a socket" in note, "1 MiB are free" in note) for note in notes] == [(True, True)] * said


def test_a_source_that_is_killed_in_the_middle_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, sent = InDirectory(str(tmp_path), "state"), values()
    with source_of(place, sent) as source:
        turns = before_slot(monkeypatch, 3, lambda: os.kill(source.pid or 0, signal.SIGKILL) or source.join(LIMIT_S))

        with pytest.raises(ConnectionError):
            take(place, sent)

    assert (len(turns) >= 3, source.exitcode, rings()) == (True, -signal.SIGKILL, [])


def test_a_receiver_that_leaves_in_the_middle_ends_the_source_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, sent = InDirectory(str(tmp_path), "state"), values()

    def leave() -> None:
        raise InterruptedError

    with source_of(place, sent) as source:
        before_slot(monkeypatch, 3, leave)
        with pytest.raises(InterruptedError):
            take(place, sent)

    assert (source.exitcode, rings()) == (1, [])


def before_slot(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> list[int]:
    """Call `act` before this process reads the slot of this number; returns the numbers of those it came to."""
    turns: list[int] = []
    read = state_transfer._Ring._next

    def noted(ring: Any) -> None:
        turns.append(len(turns) + 1)
        if len(turns) == number:
            act()
        read(ring)

    monkeypatch.setattr(state_transfer._Ring, "_next", noted)
    return turns
