"""The controller: the agent of `ttprun --mindio` is it, so that these functions have little left to do."""

from __future__ import annotations

import ipaddress

from ttprun.mindio.framework import has_framework, this_rank
from ttprun.mindio.handlers import check_port, check_rank

OUTSIDE_OF_THE_JOB = -1


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool, enable_arf: bool = False, enable_zit: bool = False
) -> None:
    """Make the controller. Nothing is made: the agent is there already, and it can do all that it is asked for here.

    rank         -1: outside of the job
    enable_zit   the others may train on without ranks that are lost; so must tft_init_processor say, in every rank

    Raises ValueError for a rank that cannot be.
    """
    if rank != OUTSIDE_OF_THE_JOB:
        check_rank("tft_init_controller", rank, world_size)
    if has_framework():
        this_rank()[1].elastic.is_on_in_the_controller = enable_zit


def tft_start_controller(bind_ip: str, port: int, enable_tls: bool = True, tls_info: str = "") -> None:
    """Listen: nothing does, since ranks and agent have a connection of their own.

    bind_ip, port          checked, and not used
    enable_tls, tls_info   not used

    Raises ValueError for a wrong port, for what is no IP address, and for one of all interfaces (0.0.0.0).
    """
    check_port("tft_start_controller", port)
    if ipaddress.ip_address(bind_ip).is_unspecified:
        raise ValueError(f"tft_start_controller: {bind_ip} is no address of one machine")


def tft_destroy_controller() -> None:
    """End the controller. The agent ends with the job."""


def tft_query_high_availability_switch() -> bool:
    """Whether faults are recovered from."""
    return has_framework()
