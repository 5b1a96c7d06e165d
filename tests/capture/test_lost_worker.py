"""A DataLoader's worker that dies while its rank fetches from it: the error is that of a connection, the cause is named."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.rank.processes import run_alone
from ttprun.protocol.rank_events import RankExited
from ttprun.rank.bootstrap.install import lost_worker


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


class Unreadable(Points):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise FileNotFoundError(f"no file {index}")


class Sampled:
    def __init__(self, indexes: Callable[[], Iterator[int]]) -> None:
        self._indexes = indexes

    def __iter__(self) -> Iterator[int]:
        return self._indexes()


def wait_until_it_is_idle(batches: Any) -> None:
    """Wait for the only batch that a worker has to prepare: a worker that is killed before may leave a file."""
    batches._data_queue._reader.poll(None)


def fetch_from_a_dead_worker() -> tuple[str, str]:
    """What the script ends with, and what is known of it, if torch does not see yet that the worker is dead."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    batches = iter(DataLoader(Points(), batch_size=1, num_workers=1, prefetch_factor=1))
    wait_until_it_is_idle(batches)
    worker = batches._workers[0]  # type: ignore[attr-defined]
    worker.is_alive = lambda: True
    pid = worker.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    try:
        next(batches)
    except OSError as error:
        return type(error).__name__, lost_worker(error)
    return "", ""


def fetch_what_cannot_be_read() -> str:
    try:
        next(iter(DataLoader(Unreadable(), num_workers=0)))
    except OSError as error:
        return lost_worker(error)
    return "no error"


def lose_a_connection_with_one_worker_done() -> str:
    """What is known of a lost connection if a worker has ended, but by itself."""
    batches = iter(DataLoader(Points(), batch_size=1, num_workers=1))
    next(batches)
    worker = batches._workers[0]  # type: ignore[attr-defined]
    batches._shutdown_workers()  # type: ignore[attr-defined]
    assert worker.exitcode == 0
    batches._workers = [worker]  # type: ignore[attr-defined]
    batches._try_get_data = lambda: Client("/no/such/socket")  # type: ignore[attr-defined]
    batches._shutdown = False  # type: ignore[attr-defined]
    try:
        batches._get_data()  # type: ignore[attr-defined]
    except FileNotFoundError as error:
        return lost_worker(error)
    return "no error"


def fail_in_a_sampler_while_a_worker_dies() -> str:
    """What is known of a file that the script's own code does not find, when a worker is killed as well."""

    def indexes() -> Iterator[int]:
        yield from range(3)
        wait_until_it_is_idle(batches)
        os.kill(workers[0].pid, signal.SIGKILL)
        raise FileNotFoundError("no list of samples")

    batches = iter(DataLoader(Points(), batch_size=1, num_workers=1, sampler=Sampled(indexes), prefetch_factor=2))
    workers = batches._workers  # type: ignore[attr-defined]
    try:
        list(batches)
    except FileNotFoundError as error:
        return lost_worker(error)
    return "no error"


def test_a_worker_that_dies_while_it_is_fetched_from_is_the_cause_of_the_error() -> None:
    name, cause = run_alone(fetch_from_a_dead_worker)

    assert name in ("ConnectionRefusedError", "ConnectionResetError", "FileNotFoundError")
    assert re.fullmatch(r"DataLoader worker \(pid \d+\) exited unexpectedly", cause)
    fields = {"rank": 0, "pid": 1, "boundary": 6, "at_s": 1.0, "is_script_error": True}
    assert RankExited.ended(1, reason=f"{name}; {cause}", **fields).is_of_worker
    assert not RankExited.ended(1, reason=name, **fields).is_of_worker


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_of_the_scripts_own_data_is_no_lost_worker() -> None:
    assert run_alone(fetch_what_cannot_be_read) == ""
    assert lost_worker(OSError("elsewhere")) == ""


def test_a_worker_that_has_done_its_work_is_not_taken_for_a_killed_one() -> None:
    assert run_alone(lose_a_connection_with_one_worker_done) == ""


def test_an_error_of_the_scripts_sampler_is_not_blamed_on_a_worker_that_is_killed_as_well() -> None:
    assert run_alone(fail_in_a_sampler_while_a_worker_dies) == ""
