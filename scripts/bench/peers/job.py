"""What the jobs of peers share: the command line of a launcher, and a port. The benchmark ends what they start."""

import argparse
import socket


def parse_launch() -> tuple[int, list[str]]:
    """(ranks, the script with its arguments) of a command as torchrun has it; other options are not used."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--max-restarts")
    parser.add_argument("--log-dir")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="script and arguments")
    options = parser.parse_args()
    return options.nproc_per_node, options.words


def free_port() -> int:
    """A TCP port that nobody has at the moment."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port
