"""Which set-ups are run ahead (`--standby-depth setup`), and which of them take the place of a lost rank."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent.nodes import NothingFails
from tests.agent.starting import start_of, wait_for_end
from tests.options import OPTIONS
from ttprun import recovery
from ttprun.agent.processes import set_ups as module
from ttprun.agent.processes.rank_processes import StandbyCopy
from ttprun.agent.processes.set_ups import SetUps
from ttprun.protocol import channel, from_rank, standbys, to_rank
from ttprun.protocol.board import Board, Field

RANKS = 2


class FakeStandbys:
    """Copies of a standby: processes that only sleep."""

    def __init__(self) -> None:
        self.are_settled = True
        self.copies: list[tuple[Any, Any, Any]] = []  # process, its end of the line, and ours

    def copy(self) -> StandbyCopy:
        ours, theirs = channel.pair()
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        self.copies.append((process, theirs, ours))
        return StandbyCopy(process, ours)  # type: ignore[arg-type]


class FakeWatch:
    """Welcomes each process in the same way, but for what is set."""

    def __init__(self) -> None:
        self.changes: dict[str, Any] = {}

    def introduction(self, slot: Any, handler: Any, is_replacement: bool) -> tuple[to_rank.Welcome, list[int]]:
        known = {"rank": slot.rank, "local_rank": slot.rank, "world_size": RANKS, "local_world_size": RANKS}
        known |= {"generation": 1, "run_dir": "run", "is_replacement": is_replacement, "options": OPTIONS}
        fd = slot.record_fd
        return to_rank.Welcome(**known | self.changes), [fd, fd, fd]


class Ranks:
    """Two ranks that train on one node, and the set-ups that are run for them."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.config = SimpleNamespace(**{"standby_depth": "setup", "mindio": False, "standbys": 1} | config)
        self.peers = SimpleNamespace(address=config.pop("address", ""))
        self.job: Any = SimpleNamespace(phase=recovery.JobPhase.RUNNING)
        self.board = Board.create(RANKS)[1]
        self.selector = selectors.DefaultSelector()
        self.domains = NothingFails()
        self.logged: list[dict[str, Any]] = []
        self.here = [
            SimpleNamespace(
                rank=rank, pid=os.getpid(), is_present=True, stored=None, record_fd=os.memfd_create("records"),
                handler=SimpleNamespace(start=start_of(folder, "train.py")),
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        self.standbys, self.watch = FakeStandbys(), FakeWatch()
        self.set_ups = SetUps(self, self.standbys, self.watch)  # type: ignore[arg-type]
        self.set_ups.begin_group()
        self.pass_boundary(3)

    def in_background(self, work: Callable[[], Any], failed: Callable[[Exception], None]) -> None:
        work()

    def log(self, event: str, **fields: Any) -> None:
        self.logged.append({"event": event} | fields)

    def pass_boundary(self, boundary: int) -> None:
        for slot in self.here:
            self.board.set(slot.rank, Field.RECORDED, boundary)

    def look(self, times: int = 1) -> int:
        """Let it decide; returns how many processes it has begun so far."""
        for _ in range(times):
            self.set_ups.look()
        return len(self.standbys.copies)

    def say(self, number: int, message: Any) -> None:
        """The process that was begun as this one reports something, and it is read."""
        self.standbys.copies[number][1].send(message)
        for key, _ in self.selector.select(timeout=60):
            key.data()

    def begin_all(self) -> None:
        """Each rank has a set-up that waits."""
        for number in range(RANKS):
            self.look()
            self.say(number, standbys.SetUpDone("", took_s=1.0))

    def has_ended(self, number: int) -> bool:
        return wait_for_end(self.standbys.copies[number][0].pid)

    def close(self) -> None:
        self.set_ups.end()
        self.selector.close()
        for slot in self.here:
            os.close(slot.record_fd)
        for process, *ends in self.standbys.copies:
            process.kill()
            process.wait()
            for end in ends:
                end.close()


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    begun: list[Ranks] = []

    def make(**config: Any) -> Ranks:
        begun.append(Ranks(tmp_path, **config))
        return begun[-1]

    yield make
    for one in begun:
        one.close()


def test_one_set_up_is_run_at_a_time_until_each_rank_has_one(begin: Callable[..., Ranks]) -> None:
    ranks = begin()

    first = ranks.look(times=3)
    ranks.say(0, standbys.SetUpDone("", took_s=1.0))
    second = ranks.look(times=3)
    ranks.say(1, standbys.SetUpDone("", took_s=1.0))

    assert (first, second, ranks.look(times=3)) == (1, 2, 2)
    assert ranks.set_ups.state == "set-ups run ahead: 2 of 2"
    assert [one["rank"] for one in ranks.logged] == [0, 1]


@pytest.mark.parametrize(
    ("config", "state"),
    [
        ({"standby_depth": "imports"}, ""),
        ({"mindio": True}, "no set-up is run ahead: the framework recovers by itself (--mindio)"),
        ({"standbys": 0}, "no set-up is run ahead: there is no standby (--standbys 0)"),
        ({"address": "10.0.0.1"}, "no set-up is run ahead: the job is on several nodes"),
    ],
)
def test_none_is_run_where_it_is_not_wanted_or_cannot_be_of_use(
    begin: Callable[..., Ranks], config: dict[str, Any], state: str
) -> None:
    ranks = begin(**config)

    assert ranks.look() == 0
    assert ranks.set_ups.state == state


def test_none_is_begun_before_a_replay_would_begin_in_the_loop_in_a_recovery_or_beside_other_preparations(
    begin: Callable[..., Ranks],
) -> None:
    early, recovering, unsettled = begin(), begin(), begin()
    early.pass_boundary(2)
    recovering.job.phase = recovery.JobPhase.REPLAYING
    unsettled.standbys.are_settled = False

    assert [one.look() for one in (early, recovering, unsettled)] == [0, 0, 0]


def test_none_is_begun_where_memory_is_short(begin: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda: 1 << 20)
    ranks = begin()

    assert ranks.look() == 0
    assert "and 1 MiB are free" in ranks.set_ups.state


@pytest.mark.parametrize(
    ("message", "why_not"),
    [
        (standbys.SetUpDone("a device is used", took_s=1.0), "rank 0: a device is used"),
        (from_rank.RankUnprotected("the script starts a process"), "rank 0: the script starts a process"),
        (from_rank.ScriptError("no file", "", "", ""), "rank 0: no file"),
    ],
)
def test_a_set_up_that_is_of_no_use_ends_and_no_other_is_tried(
    begin: Callable[..., Ranks], message: Any, why_not: str
) -> None:
    ranks = begin()
    ranks.look()

    ranks.say(0, message)

    assert ranks.has_ended(0)
    assert (ranks.look(), ranks.set_ups.state) == (1, f"no set-up is run ahead: {why_not}")


def test_a_set_up_that_ends_its_process_is_not_tried_again(begin: Callable[..., Ranks]) -> None:
    ranks = begin()
    ranks.look()

    ranks.standbys.copies[0][1].close()
    for key, _ in ranks.selector.select(timeout=60):
        key.data()

    assert (ranks.look(), ranks.set_ups.state) == (1, "no set-up is run ahead: the set-up of rank 0 ends its process")


def test_a_lost_rank_gets_the_process_that_has_run_its_set_up_and_later_another_one(
    begin: Callable[..., Ranks],
) -> None:
    ranks = begin()
    ranks.begin_all()

    taken = ranks.set_ups.take(ranks.here[1])

    assert taken is not None
    assert taken.proc is ranks.standbys.copies[1][0]
    assert ranks.set_ups.take(ranks.here[1]) is None
    assert ranks.look() == 3


def _not_ready(ranks: Ranks) -> None:
    ranks.set_ups._waiting[0].is_ready = False


def _other_welcome(ranks: Ranks) -> None:
    ranks.watch.changes = {"run_dir": "another"}


def _other_records(ranks: Ranks) -> None:
    os.close(ranks.here[0].record_fd)
    ranks.here[0].record_fd = os.memfd_create("records")


def _from_other_ranks(ranks: Ranks) -> None:
    ranks.here[0].stored = SimpleNamespace(origin="another run")


def _gone_back(ranks: Ranks) -> None:
    ranks.pass_boundary(1)


def _dead(ranks: Ranks) -> None:
    process = ranks.standbys.copies[0][0]
    process.kill()
    process.wait()


@pytest.mark.parametrize("change", [_not_ready, _other_welcome, _other_records, _from_other_ranks, _gone_back, _dead])
def test_a_set_up_that_does_not_fit_any_more_is_ended_and_takes_no_rank_s_place(
    begin: Callable[..., Ranks], change: Callable[[Ranks], None]
) -> None:
    ranks = begin()
    ranks.begin_all()

    change(ranks)

    assert ranks.set_ups.take(ranks.here[0]) is None
    assert ranks.has_ended(0)


def test_another_generation_and_torch_that_was_imported_since_are_no_difference(begin: Callable[..., Ranks]) -> None:
    ranks = begin()
    ranks.begin_all()
    ranks.watch.changes = {"generation": 7, "had_torch": True}

    assert ranks.set_ups.take(ranks.here[0]) is not None


def test_a_new_group_has_none_of_the_old_ones_set_ups(begin: Callable[..., Ranks]) -> None:
    ranks = begin()
    ranks.begin_all()

    ranks.set_ups.begin_group()

    assert ranks.has_ended(0)
    assert ranks.has_ended(1)
    assert ranks.set_ups.take(ranks.here[0]) is None
