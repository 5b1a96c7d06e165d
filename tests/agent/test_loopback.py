"""The stores of a job on one node."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from ttprun.agent.launcher.launch import stores_on_loopback

LISTENS = "0A"


def listening_on(port: int) -> set[str]:
    """Addresses, as the kernel writes them."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    ends = [row[1].split(":") for row in rows if row[3] == LISTENS]
    return {address for address, found in ends if int(found, 16) == port}


def test_a_store_of_one_node_listens_on_loopback_alone() -> None:
    with stores_on_loopback():
        store = dist.TCPStore("localhost", 0, is_master=True, multi_tenant=True)
        store.set("key", "value")
        client = dist.TCPStore("localhost", store.port, is_master=False)

    assert listening_on(store.port) == {"0100007F"}
    assert client.get("key") == b"value"
    assert isinstance(store, dist.TCPStore)
