"""gloo's own errors, as this release of torch prints them, are in the table. Both ranks live in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ttprun.device.device_errors import DeviceErrors, DeviceFault

LIMIT = timedelta(seconds=0.3)  # of an operation that never ends; to connect they have all the time they want
TABLE = DeviceErrors({})


def connect() -> list[dist.ProcessGroupGloo]:
    """Two ranks that are connected with each other."""
    store = dist.HashStore()
    groups: dict[int, dist.ProcessGroupGloo] = {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=100))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


def fault_of(operation: Callable[[], object]) -> DeviceFault:
    with pytest.raises(RuntimeError) as error:
        operation()
    return TABLE.diagnose(error.value).fault


def reduce_alone(group: dist.ProcessGroupGloo) -> None:
    options = dist.AllreduceOptions()
    options.timeout = LIMIT
    group.allreduce([torch.ones(3)], options).wait()


def test_a_peer_that_does_not_come_is_a_timeout_and_so_is_every_operation_after_it() -> None:
    group, _peer = connect()

    assert fault_of(lambda: reduce_alone(group)) == "collective-timeout"
    assert fault_of(lambda: reduce_alone(group)) == "collective-timeout"


def test_a_peer_that_has_gone_is_a_broken_link() -> None:
    groups = connect()
    del groups[1]

    assert fault_of(lambda: reduce_alone(groups[0])) == "link"


def test_a_barrier_that_names_who_is_missing_is_a_timeout() -> None:
    group, _peer = connect()

    assert fault_of(lambda: group.monitored_barrier(LIMIT)) == "collective-timeout"
