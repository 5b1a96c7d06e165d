"""A tensor on a device that the group's backend does not serve is left to torch, and protection ends with the reason."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.rank.worlds import FakeAgent, run_world
from ttprun.device import accelerator
from ttprun.device.device_errors import DEBUG_NOTE
from ttprun.groups import group_making
from ttprun.groups.journal import Journal
from ttprun.introspect.current_rank import current
from ttprun.protocol import from_rank


def unprotected() -> str:
    session = current()
    assert session is not None
    return session.unprotected.text


def reduce_on_a_device(rank: int) -> Any:
    """Tensors without elements stand for those on a device: to torch they lie elsewhere than in the CPU's memory."""
    work = dist.all_reduce(torch.empty(3, device="meta"), async_op=True)
    x = torch.full((3,), rank + 1.0)
    dist.all_reduce(x)
    return type(work).__name__ == "ManagedWork", unprotected(), x.tolist()


def test_a_collective_of_tensors_on_a_device_is_left_to_gloo() -> None:
    found = run_world(reduce_on_a_device)

    assert (
        found
        == [(False, "collectives of tensors on meta are not repaired with the backend 'gloo'", [3.0, 3.0, 3.0])] * 2
    )


def step_in_a_graph(rank: int) -> str:
    accelerator.in_use = lambda: ("cuda", SimpleNamespace(is_current_stream_capturing=lambda: True))
    accelerator.random_states = lambda: None
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=1.0).step()
    return unprotected()


def test_a_step_that_is_captured_in_a_graph_is_not_repaired() -> None:
    found = run_world(step_in_a_graph)

    assert found == ["the script captures its optimizer's step in a graph of the device: use it outside"] * 2


def split_and_train(rank: int) -> Any:
    """As a mesh of torch does where the script has given a device: one call for all parts."""
    world: Any = dist.group.WORLD
    world.links.member = dataclasses.replace(world.links.member, device=torch.device("cuda", rank), is_given=True)
    seen = str(world.bound_device_id)
    part = dist.split_group(split_ranks=[[0, 1]], group_desc="both")
    outside = dist.split_group(split_ranks=[[1 - rank]])
    x = torch.full((2,), rank + 1.0)
    dist.all_reduce(x, group=part)
    return seen, type(part).__name__, outside, x.tolist(), unprotected()


def test_the_parts_of_a_group_that_is_bound_to_a_device_are_managed_too() -> None:
    found = run_world(split_and_train)

    assert found == [(f"cuda:{rank}", "ManagedGroup", None, [3.0, 3.0], "") for rank in range(2)]


def split_without_a_device(rank: int) -> str:
    try:
        dist.split_group(split_ranks=[[0, 1]])
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_without_a_device_torch_says_itself_that_it_cannot_split() -> None:
    found = run_world(split_without_a_device)

    assert ["not safe to split" in error for error in found] == [True, True]


def share_memory(rank: int) -> str:
    import torch.distributed._symmetric_memory as symm_mem

    with contextlib.suppress(Exception):  # there is no such memory on a CPU
        symm_mem.rendezvous(torch.zeros(1), "0")
    return unprotected()


def test_a_script_whose_kernels_reach_into_other_ranks_memory_is_not_repaired() -> None:
    found = run_world(share_memory)

    assert ["symmetric memory" in reason for reason in found] == [True, True]


def synchronize(rank: int) -> Any:
    """With an operation on a device and one on the CPU under way; the first that a script may use after it."""
    session = current()
    assert session is not None
    accelerator.in_use = lambda: ("meta", SimpleNamespace())
    journal: Any = session[Journal]
    under_way = [SimpleNamespace(outputs=[torch.empty(1, device=device)]) for device in ("meta", "cpu")]
    waited: list[str] = []
    journal.unfinished = lambda: under_way
    journal.wait = lambda entry: waited.append(entry.outputs[0].device.type)
    seen: list[list[str]] = []
    group_making.wrap_synchronize(lambda: seen.append([*waited]))()
    return seen


def test_synchronize_waits_for_the_operations_of_a_device_first() -> None:
    found = run_world(synchronize)

    assert found == [[["meta"]]] * 2


def begin_to_debug(rank: int) -> str:
    session = current()
    assert session is not None
    session.generation = 0  # the job's first; later ones have nothing new to say
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    group_making._chosen = lambda backend, device_id: ({"cpu": "gloo", "cuda": "nccl"}, "")
    with contextlib.suppress(Exception), tempfile.TemporaryDirectory() as folder:  # there is no NCCL here
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return "said"


def listen(agent: FakeAgent) -> None:
    agent.wait_for(0, from_rank.Note, text=DEBUG_NOTE)


def test_torchs_own_handling_of_errors_is_named() -> None:
    found = run_world(begin_to_debug, scenario=listen, is_begun=False)

    assert found == ["said"] * 2
