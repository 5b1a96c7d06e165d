"""A job under the in-process restart of nvidia-resiliency-ext: the ranks and some spares, which nobody starts again.

    python nvrx_job.py --nproc-per-node 2 nvrx_train.py --steps 100 --step-logs logs --checkpoint last.pt

Takes the place of a launcher in faults.py; options of torchrun that mean nothing here are ignored. torchrun would end
all ranks when one is lost, so they are started by hand. The stores are this process', which is not killed; by default
they are those of rank 0, and its loss would end the job. Begin with main().
"""

import os
import subprocess
import sys

import torch.distributed as dist
from job import free_port, parse_launch

SPARES = 6  # a job that loses more goes on with fewer ranks


def main() -> int:
    ranks, words = parse_launch()
    stores = [dist.TCPStore("localhost", free_port(), is_master=True, wait_for_workers=False) for _ in range(2)]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(stores[0].port), "NVRX_STORE_PORT": str(stores[1].port)}
    common |= {"NVRX_RANKS": str(ranks), "WORLD_SIZE": str(ranks + SPARES)}
    processes = [
        subprocess.Popen([sys.executable, *words], env=os.environ | common | {"RANK": str(rank)})
        for rank in range(ranks + SPARES)
    ]
    codes = [process.wait() for process in processes]
    return 0 if 0 in codes else 1


if __name__ == "__main__":
    sys.exit(main())
