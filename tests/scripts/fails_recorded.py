"""Fails in one rank under torch's `record`, while the other one waits."""

import argparse
import os
import sys
import threading

from torch.distributed.elastic.multiprocessing.errors import record

NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE")
ELASTIC = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT")


@record
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.parse_args()
    print("out", [os.environ[name] for name in NAMES + ELASTIC], flush=True)
    print("err", sorted(name for name in os.environ if name.startswith("PET_")), file=sys.stderr, flush=True)
    if os.environ["RANK"] == "1":
        raise ValueError("a bad value")
    threading.Event().wait()


main()
