"""train.py with the changes that torchft asks for: one replica group of one rank.

Manager, its process group, DistributedDataParallel and Optimizer are wrapped around; the loop goes by the manager's
steps, as a rank that comes back takes over the step, the weights and the optimizer from a living one. If all are lost
they go on from checkpoints, which hold the manager's state, too. Started by torchft_job.py. Begin with main().
"""

import time

STARTED_AT_S = time.time()

import os  # noqa: E402
import sys  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measured import Log, sha256_of  # noqa: E402
from train import draw_batch, parse_arguments, set_up  # noqa: E402

IMPORTED_AT_S = time.time()


def main() -> None:
    args = parse_arguments()
    rank, ranks = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
    log = Log(args.step_logs / f"rank{rank}.log")
    log.write("start", STARTED_AT_S)
    log.write("imported", IMPORTED_AT_S)

    data, labels, model, optimizer = set_up(args.width, args.depth)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def keep() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=keep,
        min_replica_size=1,
        replica_id=f"train_{rank}",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
    )
    ddp_model = DistributedDataParallel(manager, model)
    managed = Optimizer(manager, optimizer)
    saved = args.checkpoint.with_name(f"torchft{rank}.pt")
    if saved.exists():
        state = torch.load(saved)
        load(state)
        manager.load_state_dict(state["manager"])
    while manager.current_step() < args.steps:
        managed.zero_grad()
        inputs, targets = draw_batch(data, labels, args.batch_size, manager.current_step() * ranks + rank)
        F.cross_entropy(ddp_model(inputs), targets).backward()
        before = manager.current_step()
        managed.step()
        if manager.current_step() > before:
            log.write("step", time.time(), before)
            if (before + 1) % args.checkpoint_every == 0:
                draft = saved.with_suffix(".tmp")
                torch.save({**keep(), "manager": manager.state_dict()}, draft)
                os.replace(draft, saved)
    if rank == 0:
        print(f"sha256 {sha256_of(model)}", flush=True)
    manager.shutdown(wait=False)
    os._exit(0)  # its threads wait for others, which may have ended


if __name__ == "__main__":
    main()
