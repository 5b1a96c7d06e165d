"""A job under torchft: a lighthouse, and for each rank a supervisor that starts it again when it is lost.

    python torchft_job.py --nproc-per-node 2 torchft_train.py --steps 100 --step-logs logs

Takes the place of a launcher in faults.py; options of torchrun that mean nothing here are ignored. The lighthouse takes
a rank for lost after a second without a heartbeat, in place of 5 s, which is better for torchft. Begin with main().
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

from job import free_port, parse_launch

HEARTBEAT_TIMEOUT_MS = 1000


def supervise(rank: int, ranks: int, lighthouse: str, words: list[str]) -> None:
    """Start a rank until it has ended by itself."""
    groups = {"REPLICA_GROUP_ID": str(rank), "NUM_REPLICA_GROUPS": str(ranks), "TORCHFT_LIGHTHOUSE": lighthouse}
    while subprocess.run([sys.executable, *words], env=os.environ | groups, check=False).returncode:
        pass


def main() -> int:
    ranks, words = parse_launch()
    port = free_port()
    lighthouse = subprocess.Popen(
        [
            str(Path(sys.executable).parent / "torchft_lighthouse"),
            *("--min_replicas", "1", "--join_timeout_ms", "10000"),
            *("--heartbeat_timeout_ms", str(HEARTBEAT_TIMEOUT_MS), "--bind", f"[::]:{port}"),
        ]
    )
    where = f"http://localhost:{port}"
    threads = [threading.Thread(target=supervise, args=(rank, ranks, where, words)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lighthouse.kill()
    lighthouse.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
