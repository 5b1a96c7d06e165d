"""What most scripts here have around their training loop: arguments, and an end."""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist


def arguments(**defaults):
    """--out, and each of these. False: a flag; a list: choices, the first one by default; else a value of that type."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(option, choices=default, default=default[0])
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser.parse_args()


def finish(weights, out, saved, says=""):
    """Print a digest of this rank's weights; rank 0 saves what final.pt is to hold; leave the group."""
    rank = dist.get_rank()
    values = b"".join(one.detach().cpu().contiguous().numpy().tobytes() for one in weights)
    print(f"{says or f'[rank {rank}] sha256 model'} {hashlib.sha256(values).hexdigest()}", flush=True)
    if rank == 0:
        os.makedirs(out, exist_ok=True)
        torch.save(saved, os.path.join(out, "final.pt"))
    dist.destroy_process_group()
