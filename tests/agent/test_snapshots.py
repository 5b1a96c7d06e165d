"""When the agent asks for a snapshot, where it is put, and what becomes of it: decisions, with the ranks played."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from msgspec.structs import replace

from ttprun import recovery
from ttprun.agent.base import stored_states
from ttprun.agent.base.stored_states import path_of
from ttprun.agent.lead import schedules
from ttprun.agent.lead import snapshots as module
from ttprun.agent.lead.checkpoints import SnapshotBuffer
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.schedules import SnapshotTimes
from ttprun.agent.lead.snapshots import Snapshots
from ttprun.protocol.board import Board, Field
from ttprun.protocol.node_messages import TakeAgain
from ttprun.protocol.rank_events import Event
from ttprun.protocol.reason import Reason
from ttprun.protocol.snapshot_messages import Share, SnapshotTaken
from ttprun.recovery.replicas import UNKNOWN, Replicas
from ttprun.state.cost_limits import parse_interval
from ttprun.tensors.memory import Memory
from ttprun.tensors.shares import version_of

RANKS = 2
NO_ROOM = "it takes 1024 MiB of shared memory, and less than that is free"


class FakeCheckpoints:
    """Takes snapshots to write, and is done with each when it is ordered so."""

    def __init__(self) -> None:
        self.is_busy, self.why_never = False, ""
        self.written: list[int] = []
        self._done: list[Callable[[], None]] = []

    def write_snapshot(self, buffer: SnapshotBuffer, done: Callable[[], None]) -> None:
        self.is_busy = True
        self.written.append(buffer.boundary)
        self._done.append(done)

    def finish(self) -> None:
        self.is_busy = False
        self._done.pop(0)()


class FakeComparisons:
    """Notes what is known of the ranks."""

    def __init__(self) -> None:
        self.looked: list[int] = []
        self.reported = self.firsts = 0

    why_not_alike, names_of = Comparisons.why_not_alike, staticmethod(", ".join)

    def look_soon(self, boundary: int) -> None:
        self.looked.append(boundary)

    def report_owners(self, slot: Any) -> None:
        self.reported += 1

    def note_snapshot(self) -> None:
        self.firsts += 1


class FakeNode:
    """What the decisions look at and bring about: a job that runs, a board, and the events that are logged."""

    def __init__(self, every: str) -> None:
        self.interval = parse_interval(every)
        self.config = SimpleNamespace(
            verified_every=0, verifies_before=False, replay_timeout_s=600.0, commit_timeout_s=30.0, rungs=["rewind"]
        )
        self.peers = SimpleNamespace(is_follower=False, ranks_per_node=1)
        self.ordered: list[Any] = []
        self.job: Any = SimpleNamespace(
            phase=recovery.JobPhase.RUNNING,
            unprotected_reason=Reason(),
            are_alone=False,
            incident_count=0,
            generation=0,
            replicas=UNKNOWN,
            snapshot=None,
        )
        self.is_hindered = False
        self.here = self.slots = [SimpleNamespace(local_rank=rank, rank=rank, pid=100 + rank) for rank in range(RANKS)]
        self.board = Board.create(RANKS)[1]
        self.advanced: list[Event] = []
        self.logged: list[dict[str, Any]] = []

    def order(self, rank: int, order: Any) -> None:
        self.ordered.append(order)

    def advance(self, event: Event) -> None:
        self.advanced.append(event)
        if isinstance(event, recovery.SnapshotTaken) and not self.is_hindered:
            self.job.snapshot = event.boundary

    def log(self, event: str, **fields: Any) -> None:
        self.logged.append({"event": event} | fields)


class Job:
    """Snapshots of two ranks, which take part when they are ordered to.

    now_s   the clock
    """

    def __init__(self, every: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        for timed in (module, schedules):
            monkeypatch.setattr(timed, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.node = FakeNode(every)
        self.comparisons, self.checkpoints = FakeComparisons(), FakeCheckpoints()
        self.times = SnapshotTimes(self.node)  # type: ignore[arg-type]
        new = partial(stored_states.new_memory, "snapshot", RANKS)
        buffers = [SnapshotBuffer(new(), new()) for _ in range(2)]
        self.snapshots = Snapshots(self.node, self.times, self.comparisons, self.checkpoints, buffers)  # type: ignore[arg-type]

    @property
    def asked(self) -> int:
        """Number of the snapshot that is asked for last; 0: none."""
        return self.node.board.get(0, Field.SNAPSHOT_ASKED)

    def look(self) -> int:
        """Let the agent decide; returns the number that is asked for now."""
        self.snapshots.look()
        return self.asked

    def report(self, rank: int, boundary: int, **differing: Any) -> None:
        """A rank has put its part of the snapshot that is asked for where it belongs."""
        buffer = self.snapshots.buffers[self.asked % 2]
        os.pwrite(buffer.records[rank], msgpack.packb({"records": [[boundary, b"", b""]]}), 0)
        known = version_of(self.node.job.replicas.differing)
        share = Share(rank, bytes=10, xxh3="", header_xxh3="h", digests={"w": "same"}, differing=known)
        share = replace(share, **differing)
        self.take_report(rank, SnapshotTaken(self.asked, boundary, "", share, records_bytes=5, took_s=0.25))

    def fail(self, rank: int, boundary: int, why_not: str) -> None:
        """A rank could not do so."""
        self.take_report(rank, SnapshotTaken(self.asked, boundary, why_not))

    def take_report(self, rank: int, taken: SnapshotTaken) -> None:
        self.snapshots.take(self.node.slots[rank], taken)  # type: ignore[arg-type]

    def take(self, boundary: int) -> None:
        """All ranks take part."""
        for rank in range(RANKS):
            self.report(rank, boundary)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.node.logged if event["event"] == name]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Job]:
    """`job(every)`"""
    return lambda every: Job(every, monkeypatch)


def test_with_an_interval_of_time_it_is_asked_for_when_that_has_passed(job: Callable[[str], Job]) -> None:
    one = job("90s")

    assert one.look() == 0
    one.now_s += 90
    assert one.look() == 1
    one.take(7)
    one.now_s += 89
    assert one.look() == 1
    one.now_s += 1
    assert one.look() == 2


@pytest.mark.parametrize(("every", "after_s"), [("auto", 15 * 60), ("90s", 90), ("never", 1e9)])
def test_the_first_one_is_asked_for_after_its_interval_by_itself_a_quarter_of_an_hour(
    job: Callable[[str], Job], every: str, after_s: float
) -> None:
    one = job(every)

    one.now_s += after_s - 1
    assert one.look() == 0
    one.now_s += 1

    assert one.look() == (every != "never")


def test_where_it_is_the_only_source_it_is_taken_as_often_as_costs_one_hundredth_and_seldom_goes_to_disk(
    job: Callable[[str], Job],
) -> None:
    one = job("auto")
    one.node.job.replicas = Replicas(compared_at=1, differing={"w": (0, 1)})

    one.now_s += 2
    assert one.look() == 1
    one.take(7)  # it took 0.25 s
    one.checkpoints.finish()
    one.now_s += 24
    assert one.look() == 1
    one.now_s += 1
    assert one.look() == 2
    one.take(9)

    assert one.snapshots.newest is not None
    assert one.snapshots.newest.boundary == 9
    assert one.checkpoints.written == [7]


@pytest.mark.parametrize(
    "differing",
    [{"phase": recovery.JobPhase.FREEZING}, {"unprotected_reason": Reason(text="the ranks do not step together")}],
)
def test_nothing_is_asked_for_while_the_ranks_cannot_take_it_together(
    job: Callable[[str], Job], differing: dict[str, Any]
) -> None:
    one = job("20steps")
    vars(one.node.job).update(differing)

    assert one.look() == 0


def test_one_that_was_asked_for_before_a_rank_was_lost_is_asked_for_anew_afterwards(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    one.look()
    one.report(0, 20)

    one.node.job.phase = recovery.JobPhase.FREEZING
    one.look()
    one.node.job.phase = recovery.JobPhase.RUNNING

    assert one.look() == 2
    assert one.snapshots.newest is None


def test_a_complete_one_is_what_all_ranks_go_back_to_and_is_written_to_disk(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    one.look()

    one.report(1, 20)
    assert one.snapshots.newest is None
    one.report(0, 20)

    assert (one.snapshots.newest.boundary, one.snapshots.newest.as_stored().place) == (20, "shared memory")
    assert [type(event) for event in one.node.advanced] == [recovery.SnapshotTaken]
    assert one.events("snapshot_taken") == [
        {"event": "snapshot_taken", "boundary": 20, "bytes": 30, "took_s": 0.25, "number": 1}
    ]
    assert one.checkpoints.written == [20]


def test_the_newest_complete_one_is_never_written_over(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    one.checkpoints.is_busy = True  # with something else: snapshots stay in memory
    for boundary in (20, 40, 60):
        newest = one.snapshots.newest
        asked = one.look()

        assert one.snapshots.buffers[asked % 2] is not newest
        one.take(boundary)

    one.look()
    one.fail(0, 80, "rank 0: no")

    assert one.snapshots.newest is not None
    assert one.snapshots.newest.boundary == 60
    assert one.snapshots.buffers[one.look() % 2] is not one.snapshots.newest


def test_while_one_is_being_written_another_is_taken_and_then_none_until_it_is(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    one.look()
    one.take(20)
    assert one.look() == 2
    one.take(40)

    assert one.look() == 2
    one.checkpoints.finish()
    assert one.look() == 3
    one.take(60)

    assert one.checkpoints.written == [20, 60]


@pytest.mark.parametrize(
    ("differing", "why_not", "is_off"),
    [
        ({"header_xxh3": "another"}, "the ranks hold different parameters, of which there is no replica", True),
        ({"boundary": 40}, "the ranks have taken it at different steps", True),
        ({"digests": {"w": "others"}}, "ranks that were replicas of each other hold different values of w", False),
    ],
)
def test_parts_that_do_not_belong_together_are_no_snapshot_and_the_reason_is_reported(
    job: Callable[[str], Job], caplog: pytest.LogCaptureFixture, differing: dict[str, Any], why_not: str, is_off: bool
) -> None:
    one = job("20steps")
    one.look()

    one.report(0, 20)
    one.report(1, **{"boundary": 20} | differing)

    assert [(event["reason"], event["is_off"]) for event in one.events("snapshot_failed")] == [(why_not, is_off)]
    assert caplog.messages == [f"no snapshot{'s are taken from now on' if is_off else ' was taken'}: {why_not}"]
    assert one.snapshots.newest is None
    assert one.comparisons.looked == ([] if is_off else [20])  # in full
    assert one.look() == (1 if is_off else 2)


def test_a_snapshot_that_no_replay_could_reach_leaves_the_one_before_it_in_its_place(job: Callable[[str], Job]) -> None:
    one = job("1steps")
    one.look()
    one.take(1)
    one.node.is_hindered = True  # from step 2 on: the machine goes back to step 1 still

    for boundary in (2, 3, 4):
        one.look()
        one.take(boundary)

    assert one.snapshots.newest is not None
    assert one.snapshots.newest.boundary == 1
    assert msgpack.unpackb(os.pread(one.snapshots.newest.records[0], 100, 0))["records"] == [[1, b"", b""]]


def test_what_each_rank_holds_for_itself_is_in_its_own_share(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    one.node.job.replicas = Replicas(compared_at=1, differing={"w": (0, 1)})
    one.look()

    one.report(0, 20)
    one.report(1, 20, digests={"w": "others"}, header=["its own"])

    assert one.snapshots.newest is not None
    stored = one.snapshots.newest.as_stored()
    assert stored.owners == {"w": (0, 1)}
    assert (stored.header_of(0), stored.header_of(1)) == ([], ["its own"])


def test_a_snapshot_by_ranks_that_did_not_know_what_they_hold_alone_is_taken_again(job: Callable[[str], Job]) -> None:
    one = job("90s")
    one.now_s += 90
    one.look()

    one.report(0, 20)
    one.report(1, 20, differing="of before")

    assert one.snapshots.newest is None
    assert one.comparisons.reported == RANKS
    assert one.look() == 2


def test_by_itself_the_first_one_is_not_put_off_where_a_rank_holds_something_alone(job: Callable[[str], Job]) -> None:
    one, timed = job("auto"), job("90s")

    one.times.take_one_at_once()
    timed.times.take_one_at_once()

    assert (one.look(), timed.look()) == (1, 0)


def test_for_want_of_memory_it_is_said_once_and_tried_again_at_each_interval(
    job: Callable[[str], Job], caplog: pytest.LogCaptureFixture
) -> None:
    one = job("90s")
    for number in (1, 2, 3):
        one.now_s += 90
        assert one.look() == number
        one.fail(0, 100 * number, NO_ROOM)
        one.now_s += 89
        assert one.look() == number
        one.now_s -= 89

    assert [event["boundary"] for event in one.events("snapshot_failed")] == [100, 200, 300]
    assert not any(event["is_off"] for event in one.events("snapshot_failed"))
    assert [record.message for record in caplog.records] == [f"no snapshot was taken: {NO_ROOM}"]
    one.now_s += 90
    one.look()
    one.take(400)
    assert one.snapshots.newest.boundary == 400


@pytest.mark.parametrize(
    ("every", "after_s", "buffers"), [("20steps", 0, [0]), ("90s", 29, []), ("90s", 30, [0, 1]), ("5s", 0, [0, 1])]
)
def test_memory_is_taken_a_minute_before_the_first_snapshot_and_once_where_no_rank_may_be_writing(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch, every: str, after_s: float, buffers: list[int]
) -> None:
    taken: list[tuple[list[int], int]] = []

    def take_ahead(files: list[int], size_bytes: int) -> threading.Thread:
        taken.append((files, size_bytes))
        return threading.Thread()

    monkeypatch.setattr(stored_states, "take_ahead", take_ahead)
    one = job(every)

    one.now_s += after_s
    one.look()
    before_the_first_step = list(taken)
    one.snapshots.share_bytes = 1000
    one.look()
    one.look()

    files = [fd for buffer in buffers for fd in one.snapshots.buffers[buffer].shares]
    assert before_the_first_step == []
    assert taken == ([(files, 1000)] if buffers else [])


def test_nothing_is_asked_for_while_memory_is_being_taken(
    job: Callable[[str], Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_taken = threading.Event()
    taking = threading.Thread(target=is_taken.wait, args=(10.0,))
    monkeypatch.setattr(stored_states, "take_ahead", lambda files, size: taking)
    taking.start()
    one = job("5s")
    one.snapshots.share_bytes = 1000
    one.now_s += 5

    meanwhile = one.look()
    is_taken.set()
    taking.join()

    assert (meanwhile, one.look()) == (0, 1)


def test_a_share_that_is_smaller_than_the_memory_which_is_taken_keeps_its_size(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    share = one.snapshots.buffers[one.look() % 2].shares[1]
    Memory(path_of(share)).fill(4080, [memoryview(b"x" * 4080)])

    one.snapshots.share_bytes = 9080
    one.look()
    for thread in threading.enumerate():
        if thread.name == "ttprun-memory":
            thread.join(60)

    assert os.fstat(share).st_size == 4080


def test_what_a_rank_says_of_an_older_snapshot_is_void(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    one.look()
    one.take(20)
    one.look()

    share = Share(0, bytes=10, xxh3="", header_xxh3="h", digests={}, differing="")
    for rank in range(RANKS):
        one.take_report(rank, SnapshotTaken(1, 20, "", share))

    assert one.snapshots.newest is not None
    assert (one.snapshots.newest.boundary, len(one.events("snapshot_taken"))) == (20, 1)


def test_a_snapshot_of_a_group_that_is_gone_is_kept_until_it_is_on_the_disk(job: Callable[[str], Job]) -> None:
    one = job("20steps")
    one.look()
    one.take(20)
    (writing,) = [buffer for buffer in one.snapshots.buffers if buffer.is_read]

    one.snapshots.close()

    assert os.fstat(writing.records[0]).st_size > 0
    one.checkpoints.finish()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(writing.records[0])


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="ttprun")


def verified(
    monkeypatch: pytest.MonkeyPatch,
    is_proved: bool = True,
    rungs: tuple[str, ...] = ("rewind",),
    why_no_source: str = "",
) -> Job:
    """A job with a step of rank 1 that is verified, after its first snapshot; it is of boundary 20."""
    one = Job("never", monkeypatch)
    monkeypatch.setattr(recovery, "why_not_replaceable", lambda job, ranks, has_mirrors: Reason(text=why_no_source))
    one.node.config.verified_every, one.node.config.rungs = 20, rungs
    one.times = SnapshotTimes(one.node)  # type: ignore[arg-type]
    one.snapshots._times, one.snapshots._is_proved = one.times, is_proved
    assert one.look() == len(rungs)
    if rungs:
        one.report(0, 20)
        one.take_report(1, step_of("a"))  # read before what was sent earlier by the other rank
    one.report(1, 20)
    if not rungs:
        one.take_report(1, step_of("a"))
    return one


def step_of(digest: str, why_not: str = "", number: int = 0) -> SnapshotTaken:
    return SnapshotTaken(number, 20, why_not, rows=(("loss 1", digest, "1"),))


@pytest.mark.parametrize(
    ("others", "finding"), [("a", "equal"), ("ba", "other"), ("bb", "suspect"), ("bb", "inconclusive")]
)
def test_a_step_is_taken_again_until_two_agree_and_meanwhile_no_snapshot_is_taken(
    monkeypatch: pytest.MonkeyPatch, others: str, finding: str
) -> None:
    one = verified(monkeypatch, is_proved=finding != "inconclusive")

    for number, digest in enumerate(others, start=1):
        assert one.look() == 1
        assert one.node.ordered == [TakeAgain(1, 20, at) for at in range(1, number + 1)]
        one.take_report(1, step_of(digest, number=number))

    (event,) = one.events("step_verified")
    assert (event["rank"], event["step"], event["finding"]) == (1, 20, finding)
    assert ("; no step was equal before" in event["what"]) == (finding == "inconclusive")
    differing = [event.rank for event in one.node.advanced if isinstance(event, recovery.StepDiffers)]
    assert differing == ([1] if finding == "suspect" else [])
    assert one.look() == 2
    assert one.checkpoints.written == []  # such a snapshot is not for the disk


def test_of_a_rank_that_may_have_been_replaced_in_its_step_nothing_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    one = verified(monkeypatch)
    one.node.job.generation += 1

    assert one.look() == 2
    one.take_report(1, step_of("b", number=1))
    assert one.events("step_verified") == []


@pytest.mark.parametrize(
    ("rungs", "late_s", "why_not"),
    [
        (("rewind",), 0.0, "the script has failed"),
        ((), 31.0, "it takes longer than 30 s"),  # on several nodes
        ((), 0.0, "the shards of rank 1 would be lost with it"),
    ],
)
def test_a_step_that_cannot_be_taken_again_or_not_in_time_is_named_once_and_the_next_one_is_tried(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rungs: tuple[str, ...],
    late_s: float,
    why_not: str,
) -> None:
    one = verified(monkeypatch, rungs=rungs, why_no_source="" if rungs or late_s else why_not)

    one.now_s += late_s  # its rank may have gone on, and there is no way back
    one.take_report(1, step_of("b", "" if late_s else why_not, number=1))

    assert [event["reason"] for event in one.events("step_not_verified")] == [why_not]
    assert one.node.ordered[-1] == TakeAgain(1, 20, 0)
    assert one.look() == (2 if rungs else 0)
    one.snapshots.conclude()
    assert caplog.messages == [f"step 20 of rank 1 is not verified: {why_not}", f"no step was verified: {why_not}"]
