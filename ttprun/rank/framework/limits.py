"""MindIO's limits for arguments. Standard library only."""

from __future__ import annotations

MOST_RANKS = 100_000
PORTS = range(1024, 65536)


def check_rank(who: str, rank: int, world_size: int) -> None:
    """Raise ValueError unless the rank is in the world, and the world is not too large.

    who          MindIO's function, for the message
    rank         0 to world_size - 1
    world_size   1 to MOST_RANKS
    """
    if not 0 < world_size <= MOST_RANKS:
        raise ValueError(f"{who}: world_size is {world_size}; give 1 to {MOST_RANKS}")
    if not 0 <= rank < world_size:
        raise ValueError(f"{who}: rank is {rank}; give 0 to {world_size - 1}")


def check_port(who: str, port: int) -> None:
    """Raise ValueError for privileged or impossible ports."""
    if port not in PORTS:
        raise ValueError(f"{who}: port is {port}; give {PORTS.start} to {PORTS.stop - 1}")
