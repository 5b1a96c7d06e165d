"""The backend `hccl`, and `torch.distributed.reinit_process_group`; the collectives are in csrc/hccl.cpp.

Begin with `_make`; csrc/kind.h names where it is kinder than a real one.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch_npu.npu import _C, current_device, hccl_backends

CONNECT_LIMIT_S = 120.0  # HCCL_CONNECT_TIMEOUT's value unless it is set
MOST_RESUMES = 8  # between two aborts


def _make(options: Any, further: Any = None) -> Any:
    """One group. A communicator is made by its first operation, that of all members also by an eager connect."""
    store, rank, size, timeout = options.store, options.group_rank, options.group_size, options.timeout

    def connect(generation: int, peer: int) -> Any:
        if generation < 0:
            for resumed in range(MOST_RESUMES):
                store.delete_key(f"hccl{resumed}")
            return None
        place, members, key = rank, size, f"hccl{generation}"
        if peer >= 0:
            low, high = sorted((rank, peer))
            place, members, key = int(rank == high), 2, f"hccl{generation} of {low} and {high}"
        if _C.is_kind("connect"):
            return dist.ProcessGroupGloo(dist.PrefixStore(key, store), place, members, timeout=timeout)
        return _Communicator(store, place, members, key).made(timeout)

    return _C.make_hccl(rank, size, timeout, connect)


class _Communicator:
    """What ncclCommInitRank and HcclCommInitRootInfo do, once rank 0's address has come through the group's store.

    All that follows is C++ without the GIL, and ends when all members have come: no abort and no error of the group's
    store is noticed, nor that a member is gone. After HCCL_CONNECT_TIMEOUT it fails.
    """

    def __init__(self, store: Any, rank: int, size: int, key: str) -> None:
        self._rank, self._size = rank, size
        self._limit_s = float(os.environ.get("HCCL_CONNECT_TIMEOUT", CONNECT_LIMIT_S))
        self._limit = timedelta(seconds=self._limit_s)
        self._root: Any = None
        if rank == 0:
            host = _own_address()
            self._root = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._limit)
            store.set(key, f"{host} {self._root.port}")
        self._host, port = store.get(key).decode().split()
        self._port = int(port)

    def made(self, timeout: timedelta) -> Any:
        """The gloo group that carries the data."""
        end_s = time.monotonic() + self._limit_s
        try:
            store = self._root or dist.TCPStore(self._host, self._port, is_master=False, timeout=self._limit)
            group = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=self._limit)
        except (RuntimeError, dist.DistError) as error:
            _C.block_for(max(0.0, end_s - time.monotonic()))
            raise RuntimeError(
                f"HcclCommInitRootInfo failed: EI0006: not all ranks have come within {self._limit_s:g} s (simulated)"
            ) from error
        group._set_default_timeout(timeout)
        return group


def _own_address() -> str:
    """Where the other ranks reach this one: as gloo finds out."""
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return _address_of(interface)
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def _address_of(interface: str) -> str:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        named = struct.pack("256s", interface.split(",")[0].encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, named)[20:24])  # SIOCGIFADDR


def reinit_process_group(group: Any = None, rebuild_link: bool = True) -> Any:
    """Without `rebuild_link` all groups that a stop has aborted work again; with it, one connects anew.

    The former on a stopped device, the latter on one that was restarted.

    group   torch's process group, or the backend of one; None: the default group
    """
    if not rebuild_link:
        if _C.is_kind("walk"):
            _C.resume_hccl(current_device())
        for backend in hccl_backends():
            backend.resume_hccl_comm(current_device())
        return None
    group = dist.distributed_c10d._get_default_group() if group is None else group
    backend = group._get_backend(torch.device("npu")) if isinstance(group, dist.ProcessGroup) else group
    backend._delete_tcpstore_key()
    backend.abort_hccl_comm("reinit")
    return group


_C.ProcessGroupHCCL.register_mem_pool = lambda *_: None  # as NCCL's has it
dist.Backend.register_backend("hccl", _make, extended_api=True, devices=["npu"])
dist.reinit_process_group = reinit_process_group
