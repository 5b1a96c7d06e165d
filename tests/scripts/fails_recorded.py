"""Fails in one rank in a way that is asked for, under torch's `record` or not, while the other one waits.

It fails after the other one has written its lines: that one is ended at once.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
ELASTIC = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")


parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path)
parser.add_argument("--how", default="raise", choices=("raise", "exit", "unrecorded"))
args = parser.parse_args()
how, has_written = args.how, args.out / "written"


@record
def main():
    print("out", [os.environ[name] for name in NAMES + ELASTIC], flush=True)
    print("err", sorted(name for name in os.environ if name.startswith("PET_")), file=sys.stderr, flush=True)
    if os.environ["RANK"] == "1":
        while not has_written.exists():
            time.sleep(0.02)
        if how == "exit":
            sys.exit(7)
        raise ValueError("a bad value")
    args.out.mkdir()
    has_written.touch()
    threading.Event().wait()


if how == "unrecorded":
    main.__wrapped__()
main()
