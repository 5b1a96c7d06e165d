"""What is passed through to torch: protection ends with the reason, and the script goes on."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import simulated_npu
from tests.device.test_gpus import unprotected
from tests.rank.worlds import run_world
from ttprun.device import accelerator
from ttprun.groups import device_link, group_making
from ttprun.introspect.current_rank import current
from ttprun.protocol.reason import Reason


def reduce_in_a_group_of(rank: int, backend: str) -> str:
    from torch.testing._internal.distributed import fake_pg

    dist.Backend.register_backend("another", fake_pg._create_fake_pg, extended_api=True, devices=["cpu"])
    group = dist.new_group(backend=backend)
    dist.all_reduce(torch.ones(2), group=group)
    return unprotected()


def test_a_group_of_another_backend_than_gloo_is_not_repaired() -> None:
    found = run_world(reduce_in_a_group_of, "another")

    assert found == ["backend 'another' of cpu is not repaired, only gloo, nccl, hccl (of a group)"] * 2


def test_a_group_that_communicates_nothing_costs_no_protection() -> None:
    found = run_world(reduce_in_a_group_of, "fake")

    assert found == ["", ""]


def receive_from_any(rank: int) -> tuple[str, int, list[float]]:
    x = torch.full((2,), float(rank))
    sender = dist.send(x, 0) if rank == 1 else dist.recv(x)
    return unprotected(), -1 if sender is None else sender, x.tolist()


def test_receiving_from_whoever_sends_is_not_repaired() -> None:
    found = run_world(receive_from_any)

    reason = "the script uses recv without src (which rank sends is not known before: name it), which is not repaired"
    assert found[0] == (reason, 1, [1.0, 1.0])


class Divided(torch.optim.SGD):
    """As Muon and ZeRO by hand: each rank updates some of the parameters and sends them to the others."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for number, weight in enumerate(self.param_groups[0]["params"]):
            if number == dist.get_rank():
                weight.data.add_(weight.grad, alpha=-1)
            dist.broadcast(weight.data, number)


def step_with_work_divided_among_the_ranks(rank: int) -> tuple[str, bool, list[float]]:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = Divided(weights, lr=1.0)
    sum(weights).sum().backward()  # type: ignore[union-attr]
    optimizer.step()
    session = current()
    return unprotected(), session is not None and session.has_collective_steps, [weight.item() for weight in weights]


def test_an_optimizer_that_divides_its_work_among_the_ranks_has_its_boundaries_before_its_steps() -> None:
    found = run_world(step_with_work_divided_among_the_ranks)

    assert found == [("", True, [-1.0, -1.0])] * 2


OF_BACKENDS = ("abort_hccl_comm", "abort", "_abort", "shutdown", "supports_coalescing", "eager_connect_single_device")
OF_GROUPS = ("_set_default_backend", "_register_backend", "_set_group_name")


def train_on_a_device_without(rank: int, place: str, path: str, owner: str, name: str) -> tuple[str, list[float]]:
    """What is reported, and the weights, if the simulated NPU, its backend or torch's class of groups lacks a name."""
    sys.path.insert(0, path)
    from torch_npu import npu  # type: ignore[import-not-found]

    class Lacking(device_link.ProcessGroup):
        def __getattribute__(self, asked: str) -> Any:
            if asked == name:
                raise AttributeError(asked)
            return super().__getattribute__(asked)

    if owner == "group":
        device_link.ProcessGroup = Lacking  # type: ignore[misc]
    elif owner == "device":
        torch.npu = SimpleNamespace(**{known: value for known, value in vars(npu).items() if known != name})
    elif owner == "backend":
        for kind in (npu._C.ProcessGroupHCCL, dist.Backend, dist.ProcessGroup):
            if name in vars(kind):
                delattr(kind, name)
    dist.init_process_group("hccl", init_method=f"file://{place}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    trained = torch.nn.parallel.DistributedDataParallel(model.to("npu"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dist.barrier()
    for step in range(3):
        optimizer.zero_grad()
        trained(torch.full((2, 8), 1.0 + rank + step).to("npu")).sum().backward()
        optimizer.step()
    return "" if current() is None else unprotected(), model.weight.detach().cpu().flatten().tolist()


@cache
def trained_by_torch(path: str, place: str) -> list[Any]:
    return run_world(train_on_a_device_without, place, path, "", "", is_begun=False, is_managed=False)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("device", "current_stream"),
        *(("backend", name) for name in OF_BACKENDS),
        *(("group", name) for name in OF_GROUPS),
    ],
)
def test_a_device_that_lacks_what_a_repair_needs_is_trained_on_as_under_torch(
    owner: str, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path, folder = simulated_npu.on_path(), tmp_path_factory.mktemp("store")

    found = run_world(train_on_a_device_without, f"{folder}/ours", path, owner, name, is_begun=False)

    of_torch = trained_by_torch(path, str(tmp_path_factory.getbasetemp() / "of torch"))
    assert [weights for _, weights in found] == [weights for _, weights in of_torch]
    assert owner != "device" or f"has no {name}, without which" in found[0][0]


@pytest.mark.parametrize("name", accelerator.NEEDED)
def test_whatever_a_devices_module_lacks_its_backend_is_left_to_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(**{known: None for known in accelerator.NEEDED if known != name})
    monkeypatch.setattr(torch, "npu", module, raising=False)

    why_not = group_making._why_not({"npu": "hccl"})

    assert why_not.text == f"torch.npu has no {name}, without which nothing on such a device is repaired"


def capture_on_an_npu(rank: int, place: str, path: str) -> list[str]:
    """What is reported in graphs: of the set-up, with a collective, after a step. Another rank's reports would come, too."""
    sys.path.insert(0, path)
    from torch_npu import npu

    dist.init_process_group("hccl", init_method=f"file://{place}", rank=rank, world_size=1)
    dist.barrier()
    said, session, x = [], current(), torch.ones(2, device="npu")
    assert session is not None
    for applied, work in ((0, x.zero_), (0, lambda: dist.all_reduce(x)), (1, x.zero_)):
        session.unprotected, session.applied = Reason(), applied
        with npu.graph(npu.NPUGraph()):
            work()
        said.append(unprotected())
    return said


def test_a_graph_of_an_npu_ends_protection_after_the_first_step_or_with_a_collective_in_it(tmp_path: Path) -> None:
    path = simulated_npu.on_path()
    found = run_world(capture_on_an_npu, f"{tmp_path}/store", path, size=1, is_begun=False)

    collective = "the script captures allreduce in a graph of the device, which cannot be repeated"
    assert found == [["", collective, group_making.REASON.text]]
