"""What the backend hccl does between two ranks; run under torchrun by tests/device/test_simulated_npu.py."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
large = torch.ones(1000, 1000, device="npu")

# It returns before it is done, also from wait().
summed = (large @ large)[0, :2].clone()
work = dist.all_reduce(summed, async_op=True)
assert work is not None
was_done = work.is_completed()
work.wait()
assert not was_done
assert summed.tolist() == [2000.0, 2000.0]
assert work.is_completed()
dist.barrier()

# From rank to rank.
sent = torch.full((3,), 7.0, device="npu")
dist.send(sent, 1) if rank == 0 else dist.recv(sent.zero_(), 0)
assert sent.tolist() == [7.0] * 3

# A peer that does not come is waited for; an abort wakes the waiters, and leaves garbage.
backend = dist.group.WORLD._get_backend(torch.device("npu"))
if rank == 0:
    alone = torch.ones(2, device="npu")
    work = dist.all_reduce(alone, async_op=True)
    assert work is not None
    work.wait()
    time.sleep(0.5)
    assert not work.is_completed()
    backend.abort()
    torch.npu.synchronize()
    assert work.is_completed()
    assert alone.tolist() != [1.0, 1.0]
    with pytest.raises(RuntimeError, match="was aborted"):
        work.wait()

# Connections are made anew by reinit_process_group.
dist.reinit_process_group(dist.group.WORLD, rebuild_link=True)
again = torch.ones(2, device="npu")
dist.all_reduce(again)
assert again.tolist() == [2.0, 2.0]

# A stopped device takes part in nothing until its groups are resumed, in all ranks.
torch.npu.stop_device(rank)
torch.npu.restart_device(rank)
with pytest.raises(RuntimeError, match="FORCE STOP"):
    dist.all_reduce(again)
dist.reinit_process_group(None, rebuild_link=False)
dist.all_reduce(again)
assert again.tolist() == [4.0, 4.0]
dist.destroy_process_group()
print(f"rank {rank} is well", flush=True)
