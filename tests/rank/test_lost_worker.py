"""A DataLoader's worker that dies while its rank fetches from it: the error is that of a connection, the cause is named."""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.rank.processes import run_alone
from ttprun.rank.data.lost_worker import lost_worker
from ttprun.recovery import RankExited


class Points(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


class Unreadable(Points):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise FileNotFoundError(f"no file {index}")


def fetch_from_a_dead_worker() -> tuple[str, str]:
    """What the script ends with, and what is known of it, if torch does not see yet that the worker is dead."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    batches = iter(DataLoader(Points(), batch_size=1, num_workers=1))
    batches._data_queue._reader.poll(None)  # type: ignore[attr-defined]  # it has prepared a batch
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
