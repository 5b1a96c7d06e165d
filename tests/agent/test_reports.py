"""What becomes of what ranks tell: the real state machine decides, and nothing that it orders is carried out."""

from __future__ import annotations

import os
from typing import Any

import pytest

from ttprun import recovery
from ttprun.agent.comparisons import Comparisons
from ttprun.agent.reports import Reports
from ttprun.agent.seat import Seat
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Board
from ttprun.protocol.channel import KNOWN
from ttprun.protocol.codec import decode

N_RANKS = 3
SCRIPT_ERROR = from_rank.ScriptError("no file", traceback="no file caf\udce9\n", detail="", device_fault="")


class FakeHandler:
    """A rank's process and line: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    @property
    def channel(self) -> FakeHandler:
        return self

    def send(self, message: Any) -> None:
        self.told.append(message)


class FakeSupervisor:
    """Three ranks that train, as the state machine sees them."""

    def __init__(self) -> None:
        self.board = Board.create(N_RANKS)[1]
        self.refills = 0
        self.handlers = [FakeHandler() for _ in range(N_RANKS)]
        self.seats = [Seat(rank, rank, handler, record_fd=-1) for rank, handler in enumerate(self.handlers)]  # type: ignore[arg-type]
        self.job = recovery.new_job(recovery.Settings(world_size=N_RANKS))
        for seat in self.seats:
            seat.pid, seat.is_present = 100 + seat.rank, True
            self.advance(recovery.RankStarted(at_s=0.0, rank=seat.rank, pid=seat.pid))
            self.advance(recovery.RankProtected(at_s=0.0, rank=seat.rank))

    def advance(self, event: recovery.Event) -> None:
        self.job, _ = recovery.advance(self.job, event)

    def log(self, event: str, **fields: object) -> None: ...

    @property
    def watch(self) -> FakeSupervisor:
        return self

    injections = watch

    def greeted(self, seat: Seat) -> None: ...

    def refill_standbys(self) -> None:
        self.refills += 1


@pytest.fixture
def supervisor() -> FakeSupervisor:
    return FakeSupervisor()


@pytest.fixture
def reports(supervisor: FakeSupervisor) -> Reports:
    """Its ranks have held the same weights at boundary 1."""
    supervisor.comparisons = Comparisons(supervisor)  # type: ignore[arg-type]
    supervisor.comparisons.begin_group(N_RANKS)
    found = Reports(supervisor)  # type: ignore[arg-type]
    found.begin_group()
    hold(found, supervisor, 1, "aaa")
    return found


def hold(reports: Reports, supervisor: FakeSupervisor, boundary: int, digests: str) -> None:
    """Each rank tells the digest of its weights, one letter."""
    for seat, digest in zip(supervisor.seats, digests, strict=True):
        held = {"w": (digest, "gradient")}
        reports.take(seat, from_rank.Held(boundary, is_full=boundary == 1, held=held, names={}))


def test_a_rank_that_stood_aside_while_a_checkpoint_was_written_is_told_again_after_the_next_comparison(
    supervisor: FakeSupervisor, reports: Reports
) -> None:
    odd, line = supervisor.seats[1], supervisor.handlers[1]
    hold(reports, supervisor, 2, "aba")
    hold(reports, supervisor, 3, "aba")  # on its way: it is not told twice
    told_once, training = list(line.told), supervisor.job

    supervisor.advance(recovery.CheckpointAsked(at_s=1.0))
    reports.take(odd, from_rank.SteppedAside())
    survivors = supervisor.job.survivors
    supervisor.job = training  # the checkpoint is there, and all go on
    hold(reports, supervisor, 4, "aba")

    assert survivors == (0, 1, 2)
    assert told_once == [to_rank.StandAside()]
    assert line.told == [to_rank.StandAside()] * 2


def test_a_replacement_is_told_what_others_have_told_in_its_generation_while_there_was_no_process(
    supervisor: FakeSupervisor, reports: Reports
) -> None:
    teller, seat, line = supervisor.seats[1], supervisor.seats[0], supervisor.handlers[0]
    put = from_rank.Put(1, "port 1", "")
    reports.take(teller, from_rank.Put(0, "port 1", ""))
    line.told.clear()

    seat.leave(-9, supervisor.board, lambda number, pid: "")
    supervisor.advance(recovery.RankExited(at_s=1.0, rank=0, pid=100, code=None, signal=9, boundary=0))
    reports.take(teller, put)
    reports.take(seat, put)  # of its own, for the others
    before = list(line.told)
    reports.take(seat, from_rank.Present(pid=200, main_thread=1))

    assert supervisor.job.generation == 1
    assert before == []
    assert line.told == [put]


def test_a_traceback_with_a_name_that_is_no_text_is_shown_all_the_same(
    supervisor: FakeSupervisor, reports: Reports, capfd: pytest.CaptureFixture[str]
) -> None:
    reports.take(supervisor.seats[0], SCRIPT_ERROR)

    assert capfd.readouterr().err == "no file caf\\udce9\n"
    assert supervisor.seats[0].script_error == "no file"


def test_a_traceback_that_nobody_reads_does_no_harm(supervisor: FakeSupervisor, reports: Reports) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        reports.take(supervisor.seats[0], SCRIPT_ERROR)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(writer)

    assert supervisor.seats[0].script_error == "no file"


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b'{"op": "Freeze"}', b'{"op": "Frozen"}', b'{"op": "Frozen", "generation": 1, "boundary": "2"}'],
)
def test_what_is_no_message_of_a_rank_is_ignored_with_a_reason(
    supervisor: FakeSupervisor, reports: Reports, caplog: pytest.LogCaptureFixture, line: bytes
) -> None:
    job = supervisor.job

    reports.take(supervisor.seats[1], decode(line, KNOWN))

    assert supervisor.job == job
    (record,) = caplog.records
    assert record.message.startswith("a message of rank 1 is ignored: ")
