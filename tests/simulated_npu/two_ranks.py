"""What the backend hccl does between two ranks; run under torchrun by tests/device/test_simulated_npu.py."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

PAUSE_S = 1.0
rank = int(os.environ["RANK"])
torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("hccl")
store = dist.distributed_c10d._get_default_store()
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

# A peer that does not come is waited for, and an abort ends nothing; the peer's coming does.
backend = dist.group.WORLD._get_backend(torch.device("npu"))
if rank == 0:
    late = torch.ones(2, device="npu")
    work = dist.all_reduce(late, async_op=True)
    assert work is not None
    work.wait()
    backend.abort()
    backend.shutdown()
    time.sleep(0.5)
    assert not work.is_completed()
    began = time.monotonic()
    store.set("waits", "1")
    backend.abort_hccl_comm("while it runs")
    assert time.monotonic() - began > PAUSE_S / 2, "the abort has not waited"
    assert late.tolist() == [2.0, 2.0]
else:
    store.wait(["waits"])
    time.sleep(PAUSE_S)
    dist.all_reduce(torch.ones(2, device="npu"))
    torch.npu.synchronize()
    backend.abort_hccl_comm("nothing runs")

# A communicator is made when all have come, by C++ that lets other threads run and does not hear an abort.
other = dist.new_group()
connecting = other._get_backend(torch.device("npu"))
if rank == 0:
    thread = threading.Thread(target=connecting.eager_connect_single_device, args=(torch.device("npu", 0),))
    thread.start()
    time.sleep(0.5)
    connecting.abort()
    connecting.abort_hccl_comm("it is not among the communicators yet")
    time.sleep(0.5)
    assert thread.is_alive()
    store.set("connects", "1")
    thread.join()
else:
    store.wait(["connects"])
    connecting.eager_connect_single_device(torch.device("npu", 1))

# A stop ends what waits for a peer, and leaves garbage; then an abort has nothing to wait for.
alone = torch.ones(2, device="npu")
dist.all_reduce(torch.ones(2, device="npu"))
if rank == 0:
    work = dist.all_reduce(alone, async_op=True)
    assert work is not None
    work.wait()
    time.sleep(0.5)
    assert not work.is_completed()
    torch.npu.stop_device(0)
    torch.npu.restart_device(0)
    backend.abort_hccl_comm("a peer is lost")
    assert work.is_completed()
    assert alone.tolist() != [1.0, 1.0]
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        work.wait()
else:
    backend.abort_hccl_comm("a peer is lost")
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
