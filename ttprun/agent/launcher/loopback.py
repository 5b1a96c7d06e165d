"""The stores of a job on one node: they listen on loopback, where torch's listen on every address of the machine.

Nobody outside has any business there, and whoever reaches a store can write to it. Begin with `stores_on_loopback`.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Iterator
from typing import Any

import torch

from ttprun import torch_versions

ADDRESS = "127.0.0.1"
# What torchrun makes of one node without an address: any free port.
ONE_NODE_ENDPOINT = "localhost:0"
# Where torch's rendezvous looks up the class of the stores that it makes.
_PLACES = ("torch.distributed", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")


@contextlib.contextmanager
def stores_on_loopback() -> Iterator[None]:
    """While in it, stores that torch makes in this process listen on loopback."""
    modules = [importlib.import_module(name) for name in _PLACES]
    original: Any = getattr(modules[0], "TCPStore")  # noqa: B009 - torch does not declare it

    class LoopbackStore(original):  # type: ignore[misc]
        """A TCPStore; its server gets a socket that listens on loopback already."""

        def __init__(self, host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> None:
            if not is_master or args:
                super().__init__(host_name, port, *args, is_master=is_master, **kwargs)
                return
            try:
                listener = socket.create_server((ADDRESS, port))
            except OSError:  # a machine without loopback: torch's way may work there
                super().__init__(host_name, port, is_master=True, **kwargs)
                return
            bound_port = listener.getsockname()[1]
            kwargs |= {"is_master": True, "master_listen_fd": listener.detach()}
            if torch_versions.takes_socket(torch.__version__):
                with contextlib.suppress(NotImplementedError):  # another build than those that were tried
                    super().__init__(ADDRESS, bound_port, **kwargs)
                    return
            super().__init__(ADDRESS, bound_port, **kwargs | {"use_libuv": False})

    for module in modules:
        module.TCPStore = LoopbackStore  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.TCPStore = original  # type: ignore[attr-defined]
