"""What a launch does before any rank is started."""

from __future__ import annotations

import json
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
from ttprun.agent.launcher.outcome import DO_NOT_RESTART, Outcomes, path_of
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


COMMAND = ["train.py", "--lr", "0.1"]


def _start(save_dir: Path, number: int, command: list[str] = COMMAND) -> Outcomes:
    """The `number`th time that Slurm starts job 77 again; 0: the first start."""
    return Outcomes(save_dir, "77", command, {"SLURM_RESTART_COUNT": str(number)} if number else {})


def _checkpoint(save_dir: Path, boundary: int) -> None:
    """A valid one, of that step."""
    from ttprun.state.checkpoint import Description
    from ttprun.state.store import CheckpointStore

    store = CheckpointStore(save_dir)
    store.lock("77")
    draft = store.begin(boundary)
    draft.add("state", b"x")
    draft.commit(Description(world_size=1, cause="ended", script="train.py", model={}))
    store.unlock()


@pytest.mark.parametrize(
    ("code", "restart"), [(0, False), (1, False), (93, False), (130, False), (143, True), (137, True)]
)
def test_a_job_that_has_ended_says_how_and_whether_a_restart_makes_sense(
    tmp_path: Path, code: int, restart: bool
) -> None:
    outcomes = _start(tmp_path, 0)
    outcomes.begin()

    outcomes.end(code, 40, "why")

    found = json.loads((tmp_path / "outcome-77.json").read_text())
    assert (found["state"], found["exit_code"], found["step"], found["reason"]) == ("ended", code, 40, "why")
    assert found["restart"] is restart


def test_a_job_that_runs_or_was_killed_has_no_exit_code(tmp_path: Path) -> None:
    _start(tmp_path, 0).end(143, 40, "ended by SIGTERM")

    _start(tmp_path, 1).begin()

    found = json.loads(path_of(tmp_path, "77").read_text())
    assert (found["state"], found["exit_code"]) == ("running", None)


def test_a_job_that_is_done_is_not_trained_again_by_the_same_command(tmp_path: Path) -> None:
    _start(tmp_path, 0).end(0, 40, "")

    code, why = _start(tmp_path, 1).judge() or (-1, "")

    assert code == 0
    assert why.startswith("job 77 is done: 40 steps")
    assert _start(tmp_path, 1, [*COMMAND, "--epochs", "9"]).judge() is None


def test_a_leader_that_was_cut_off_does_not_take_back_that_the_others_are_done(tmp_path: Path) -> None:
    cut_off, successor = _start(tmp_path, 0), _start(tmp_path, 0)
    cut_off.begin()
    successor.end(0, 60, "")

    cut_off.end(143, 9, "node 1 was lost, and no other took its place")

    assert _start(tmp_path, 0).judge() is not None
    assert json.loads(path_of(tmp_path, "77").read_text())["exit_code"] == 0


def test_a_job_that_failed_may_be_started_again(tmp_path: Path) -> None:
    _start(tmp_path, 0).end(1, 40, "rank 1 raised ValueError")

    assert _start(tmp_path, 0).judge() is None


def _ends_in_vain(save_dir: Path, number: int, step: int) -> None:
    outcomes = _start(save_dir, number)
    assert outcomes.judge() is None
    outcomes.begin()
    outcomes.end(143, step, "ended by SIGUSR1")


def test_a_job_that_was_queued_again_three_times_without_a_newer_checkpoint_is_not_started(tmp_path: Path) -> None:
    _checkpoint(tmp_path, 8)
    for number in range(3):
        _ends_in_vain(tmp_path, number, step=9)

    code, why = _start(tmp_path, 3).judge() or (-1, "")

    assert code == DO_NOT_RESTART
    assert _start(tmp_path, 0).judge() is None  # who starts it by hand is not refused
    assert why.startswith("job 77 was started 3 times, and the checkpoint is still step-00000008: ")
    assert json.loads(path_of(tmp_path, "77").read_text())["restart"] is False


def test_a_newer_checkpoint_is_progress(tmp_path: Path) -> None:
    for number in range(5):
        _ends_in_vain(tmp_path, number, step=number)
        _checkpoint(tmp_path, number + 1)

    assert _start(tmp_path, 5).judge() is None


def test_starts_that_have_not_even_come_to_their_ranks_count_too(tmp_path: Path) -> None:
    assert _start(tmp_path, 2).judge() is None

    code, why = _start(tmp_path, 3).judge() or (-1, "")

    assert code == DO_NOT_RESTART
    assert "there is no checkpoint" in why


def test_steps_of_a_script_with_checkpoints_of_its_own_are_progress(tmp_path: Path) -> None:
    for number in range(6):
        _ends_in_vain(tmp_path, number, step=100)


def test_a_file_that_is_no_outcome_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    path_of(tmp_path, "77").write_text("{")

    assert _start(tmp_path, 1).judge() is None
