"""train.py with the changes that the in-process restart of nvidia-resiliency-ext asks for.

The whole training is a function that is wrapped; when a rank is lost, the others abort what they do, and call it again
with new ranks: it makes its process group over a store of its own, and goes on from the newest checkpoint. Ranks beyond
--ranks are spares. The abort that comes with it looks for NCCL alone: with gloo the groups are destroyed. Started by
nvrx_job.py. Begin with train().
"""

import time

STARTED_AT_S = time.time()

import os  # noqa: E402
import sys  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402

import nvidia_resiliency_ext.inprocess as inprocess  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measured import Log, sha256_of  # noqa: E402
from train import draw_batch, load_checkpoint, parse_arguments, save_checkpoint, set_up  # noqa: E402

IMPORTED_AT_S = time.time()
INTERVAL = timedelta(seconds=0.1)  # a second by default, with which it is slower


class AbortGloo(inprocess.abort.Abort):
    """Destroy the process groups: collectives that wait for a lost rank have failed by then."""

    def __call__(self, state):
        if dist.is_initialized():
            dist.destroy_process_group()
        return state


@inprocess.Wrapper(
    store_kwargs={"port": int(os.environ["NVRX_STORE_PORT"])},
    abort=AbortGloo(),
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(int(os.environ["NVRX_RANKS"])),
        inprocess.rank_assignment.ShiftRanks(),
    ),
    monitor_thread_interval=INTERVAL,
    monitor_process_interval=INTERVAL,
    heartbeat_interval=INTERVAL,
    progress_watchdog_interval=INTERVAL,
    last_call_wait=INTERVAL,
)
def train(args, base_store, call_wrapper: inprocess.CallWrapper = None) -> None:
    store = dist.PrefixStore(f"group {call_wrapper.iteration}", base_store)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    log = Log(args.step_logs / f"rank{rank}.log")
    log.write("start", STARTED_AT_S)
    log.write("imported", IMPORTED_AT_S)

    data, labels, model, optimizer = set_up(args.width, args.depth)
    steps_done = load_checkpoint(args.checkpoint, model, optimizer)
    ddp_model = DDP(model)
    for step in range(steps_done, args.steps):
        inputs, targets = draw_batch(data, labels, args.batch_size, step * ranks + rank)
        loss = F.cross_entropy(ddp_model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.write("step", time.time(), step)
        if (step + 1) % args.checkpoint_every == 0:
            save_checkpoint(args.checkpoint, model, optimizer, step + 1)
    if rank == 0:
        print(f"sha256 {sha256_of(model)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(
        parse_arguments(),
        dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False),
    )
