"""Fails in one rank under torch's `record`, after the other one has written its lines: that one is ended at once."""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
ELASTIC = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    has_written = args.out / "written"
    print("out", [os.environ[name] for name in NAMES + ELASTIC], flush=True)
    print("err", sorted(name for name in os.environ if name.startswith("PET_")), file=sys.stderr, flush=True)
    if os.environ["RANK"] == "1":
        while not has_written.exists():
            time.sleep(0.02)
        raise ValueError("a bad value")
    args.out.mkdir()
    has_written.touch()
    threading.Event().wait()


main()
