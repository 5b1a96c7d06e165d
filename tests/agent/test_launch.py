"""What a launch does before any rank is started."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.launcher.api import LaunchConfig

from ttprun.agent.launcher import launch as module
from ttprun.agent.launcher.launch import stores_on_loopback
from ttprun.config import Config
from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.state.files import SaveDirectoryInUseError
from ttprun.state.store import CheckpointStore


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[[], int]]:
    """Launches a job named night, which saves to tmp_path/save."""
    config = Config(save_dir=str(tmp_path / "save"), run_id="night")
    run = RunDirectory.create("night", tmp_path / "run")
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield lambda: module.launch(config, LaunchConfig(1, 1, 1), "python", ["-u", "train.py"], run, True, True)
    run.release()
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def test_nobody_else_writes_to_the_save_directory_while_a_checkpoint_is_chosen_and_anybody_may_after_a_failed_launch(
    launch: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = CheckpointStore(tmp_path / "save")

    def find(*_: Any) -> None:
        with pytest.raises(SaveDirectoryInUseError, match="run 'night'"):
            other.lock("day")
        raise ConfigError("the checkpoint is of another script", "start the same script")

    monkeypatch.setattr(module.Resumption, "find", find)

    with pytest.raises(ConfigError, match="of another script"):
        launch()

    other.lock("day")
    other.unlock()


def test_a_second_job_is_refused_before_any_checkpoint_is_read(
    launch: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = CheckpointStore(tmp_path / "save")
    holder.lock("day")
    is_read: list[bool] = []
    monkeypatch.setattr(module.Resumption, "find", lambda *_: is_read.append(True))

    with pytest.raises(SaveDirectoryInUseError, match="run 'day'"):
        launch()

    assert is_read == []
    holder.unlock()


def test_a_rendezvous_store_that_cannot_be_reached_is_one_line_and_no_traceback(
    launch: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def meet(*_: Any, **__: Any) -> None:
        cause = DistNetworkError("the client socket has timed out\nException raised from\nframe 0")
        raise RendezvousConnectionError("see inner exception") from cause

    monkeypatch.setattr(module.torch_launcher, "launch_agent", meet)

    code = launch()

    last = capfd.readouterr().err.splitlines()[-1]
    assert code == 143, "it may be started again: the script has not failed"
    assert last.startswith("ttprun: the job has ended: the agents cannot meet: ")
    assert last.endswith("has failed: the client socket has timed out")


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
