"""The reduce-scatter that gloo lacks: it can be waited for with a limit, and says when it has ended."""

from __future__ import annotations

import time
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ttprun.groups.gloo import ReduceScatter, SpareMemory, is_for
from ttprun.groups.journal import has_ended

LIMIT_S = 60.0


@pytest.fixture
def backends() -> list[Any]:
    """Two ranks of one group, in this process."""
    store = dist.HashStore()
    made: list[Any] = [None, None]

    def make(rank: int) -> None:
        made[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=LIMIT_S))

    threads = [Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return made


def begin(
    backend: Any, rank: int, given: torch.Tensor, memory: SpareMemory | None = None
) -> tuple[ReduceScatter, torch.Tensor]:
    output = torch.full((2, 3), -1.0)
    return ReduceScatter(
        backend, rank, 2, (output, given, dist.ReduceScatterOptions()), memory or SpareMemory()
    ), output


def test_each_rank_gets_its_part_of_the_sum_and_the_inputs_stay_as_they_were(backends: list[Any]) -> None:
    given = [torch.randn(4, 3) for _ in range(2)]
    copies = [one.clone() for one in given]

    works = [begin(backend, rank, given[rank]) for rank, backend in enumerate(backends)]
    for work, _ in works:
        work.wait(timedelta(seconds=LIMIT_S))

    assert torch.equal(torch.cat([output for _, output in works]), copies[0] + copies[1])
    assert all(torch.equal(one, copy) for one, copy in zip(given, copies, strict=True))
    assert all(work.is_completed() and work.is_success() for work, _ in works)


def test_several_at_once_write_their_outputs_once(backends: list[Any]) -> None:
    """A script may keep a handle, and wait for it again when it has used the memory for something else."""
    args = [
        ([torch.zeros(2, 3), torch.zeros(1)], [torch.full((4, 3), 1.0 + rank), torch.arange(2.0)], options)
        for rank, options in enumerate([dist.ReduceScatterOptions()] * 2)
    ]
    works = [ReduceScatter(backend, rank, 2, args[rank], SpareMemory()) for rank, backend in enumerate(backends)]
    for work in works:
        work.wait(timedelta(seconds=LIMIT_S))
    sums = [torch.cat([one.flatten() for one in outputs]).tolist() for outputs, *_ in args]

    args[0][0][0].fill_(9.0)
    works[0].wait()

    assert sums == [[3.0] * 6 + [0.0], [3.0] * 6 + [2.0]]
    assert args[0][0][0].eq(9.0).all()
    assert is_for("reduce_scatter_tensor_coalesced", args[0])


def test_one_that_waits_for_another_rank_is_given_up_when_the_limit_is_over_and_ends_later(
    backends: list[Any],
) -> None:
    first, output = begin(backends[0], 0, torch.ones(4, 3))

    assert not has_ended(first, 0.05)
    assert output.eq(-1.0).all()
    second, _ = begin(backends[1], 1, torch.ones(4, 3))

    assert has_ended(first, LIMIT_S)
    assert has_ended(second, LIMIT_S)
    first.wait()
    assert output.eq(2.0).all()


def test_once_it_says_that_it_has_completed_the_output_is_there(backends: list[Any]) -> None:
    """A script may ask until it is so, and never wait."""
    works = [begin(backend, rank, torch.full((4, 3), 1.0 + rank)) for rank, backend in enumerate(backends)]
    end_s = time.monotonic() + LIMIT_S

    while not all(work.is_completed() for work, _ in works):
        assert time.monotonic() < end_s

    assert all(output.eq(3.0).all() for _, output in works)


def test_its_future_has_the_part(backends: list[Any]) -> None:
    works = [begin(backend, rank, torch.full((4, 3), 1.0 + rank)) for rank, backend in enumerate(backends)]

    parts = [work.get_future().wait() for work, _ in works]

    assert all(part[0] is output and output.eq(3.0).all() for part, (_, output) in zip(parts, works, strict=True))


def test_memory_is_used_again_by_later_operations_whatever_their_form_and_mode(backends: list[Any]) -> None:
    memory = [SpareMemory() for _ in range(2)]

    def reduced(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What both ranks get."""
        works = [begin(backend, rank, given, memory[rank]) for rank, backend in enumerate(backends)]
        for work, _ in works:
            work.wait(timedelta(seconds=LIMIT_S))
        return works[0][1], works[1][1]

    first = torch.randn(4, 3)
    with torch.inference_mode():
        in_inference = torch.cat(reduced(first)).clone()
    kept = memory[0].take(0)
    memory[0].take_back([kept])
    transposed = torch.randn(3, 4).t().requires_grad_()
    second = torch.cat(reduced(transposed))
    bytes_of_first = torch.cat(reduced(torch.arange(12, dtype=torch.uint8).view(4, 3)))
    used = memory[0].take(0)

    assert torch.equal(in_inference, 2 * first)
    assert torch.equal(second, 2 * transposed)
    assert bytes_of_first.tolist() == torch.arange(0.0, 24, 2).view(4, 3).tolist()
    assert used is kept


def test_memory_of_an_operation_that_has_not_ended_is_not_used_again(backends: list[Any]) -> None:
    memory = SpareMemory()
    first, output = begin(backends[0], 0, torch.ones(4, 3), memory)
    assert not has_ended(first, 0.05)

    second, _ = begin(backends[0], 0, torch.full((4, 3), 5.0), memory)
    for _ in range(2):
        begin(backends[1], 1, torch.zeros(4, 3))
    first.wait(timedelta(seconds=LIMIT_S))
    second.wait(timedelta(seconds=LIMIT_S))

    assert output.eq(1.0).all()


def test_little_memory_is_kept() -> None:
    memory = SpareMemory()
    taken = [memory.take(size) for size in (8, 16, 24)]

    memory.take_back([*taken, torch.empty(0)])

    assert memory.take(1).nbytes == 16
    assert memory.take(1).nbytes == 24
    assert memory.take(1).nbytes == 1
