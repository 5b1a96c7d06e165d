"""Who hangs, who is slow and who only waits: fake ranks on a fake clock, looked at four times a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ttprun.recovery.hang_observations import Doing, Observation
from ttprun.recovery.hangs import HangVerdict, HangWatch, Hung, Stalled, Straggler, Way

EVERY_S = 0.25
ABSENT = [
    # what it is at, which signs of life it still gives, how it is reported
    (Doing.COMPUTING, {"has_pulse": True}, Way.IDLE),
    (Doing.COMPUTING, {"has_pulse": False}, Way.HELD),
    (Doing.STEPPING, {"has_pulse": True}, Way.IDLE),
    (Doing.COLLECTIVE, {"has_pulse": True}, Way.IDLE),
]


@dataclass
class Rank:
    """A fake rank: what it is at, and the signs of life that it gives."""

    observation: Observation
    has_pulse: bool = True
    runs_bytecode: bool = False
    cpu_share: float = 0.0

    def pass_time(self, at_s: float) -> None:
        """One look later."""
        self.observation = replace(
            self.observation,
            pulse_at_s=at_s if self.has_pulse else self.observation.pulse_at_s,
            beats=self.observation.beats + self.runs_bytecode,
            cpu_s=self.observation.cpu_s + self.cpu_share * EVERY_S,
        )


@dataclass
class Ranks:
    """All ranks of a job, watched."""

    watch: HangWatch
    ranks: list[Rank]
    at_s: float = 100.0
    verdicts: list[tuple[float, HangVerdict]] = field(default_factory=list)

    def pass_time(self, seconds: float, is_repair: bool = False) -> list[HangVerdict]:
        """Look for so long; returns what was said."""
        said: list[HangVerdict] = []
        for _ in range(round(seconds / EVERY_S)):
            self.at_s += EVERY_S
            for rank in self.ranks:
                rank.pass_time(self.at_s)
            look = self.watch.look_at_repair if is_repair else self.watch.look
            found = look(self.at_s, [rank.observation for rank in self.ranks])
            said += found
            self.verdicts += [(self.at_s, verdict) for verdict in found]
        return said

    def repair(self, seconds: float, **groups: list[int]) -> list[HangVerdict]:
        """Look at a repair for so long."""
        said: list[HangVerdict] = []
        for _ in range(round(seconds / EVERY_S)):
            self.at_s += EVERY_S
            for rank in self.ranks:
                rank.pass_time(self.at_s)
            said += self.watch.look_at_repair(self.at_s, [rank.observation for rank in self.ranks], **groups)
        return said

    def be(self, rank: int, doing: Doing, **changes: object) -> None:
        """A rank is at something else now."""
        changed = {"doing": doing, "seen_at_s": self.at_s, **changes}
        self.ranks[rank].observation = replace(self.ranks[rank].observation, **changed)  # type: ignore[arg-type]

    def train(self, steps: int, step_s: float = 1.0) -> None:
        """All ranks do so many steps, each with one collective."""
        for _ in range(steps):
            for rank in range(len(self.ranks)):
                boundary = self.ranks[rank].observation.boundary + 1
                self.be(rank, Doing.COMPUTING, boundary=boundary, meetings=0)
            self.pass_time(step_s)

    def wait_for(self, guilty: int) -> None:
        """All but one stand in the first collective of the step."""
        for rank in range(len(self.ranks)):
            if rank != guilty:
                self.be(rank, Doing.COLLECTIVE, meetings=1, operation="allreduce")


def watched(world_size: int = 3, hang_s: float | None = 5.0, steps: int = 8) -> Ranks:
    """Ranks that have done some steps."""
    observations = [
        Observation(rank=rank, pid=100 + rank, boundary=0, meetings=0, doing=Doing.SETUP, pulse_at_s=100.0)
        for rank in range(world_size)
    ]
    ranks = Ranks(HangWatch(hang_s), [Rank(observation) for observation in observations])
    ranks.train(steps)
    return ranks


def hung(verdicts: list[HangVerdict]) -> list[Hung]:
    return [verdict for verdict in verdicts if isinstance(verdict, Hung) and verdict.is_due]


def _stop_for_a_moment(ranks: Ranks) -> None:
    ranks.be(1, Doing.COMPUTING, is_stopped=True)
    ranks.pass_time(4.0)
    ranks.be(1, Doing.COMPUTING, is_stopped=False)


def _meet_without_one(ranks: Ranks, **of_one: Any) -> None:
    ranks.wait_for(guilty=1)
    ranks.be(1, **of_one)


def _meet_without_hooks(ranks: Ranks) -> None:
    ranks.wait_for(guilty=1)
    ranks.ranks[1] = Rank(Observation(rank=1, pid=999, boundary=0, meetings=0, doing=Doing.STARTING), has_pulse=False)


def _use_the_processor(ranks: Ranks, doing: Doing) -> None:
    for rank in range(3):
        ranks.be(rank, doing, meetings=1, operation="allreduce")
        ranks.ranks[rank].cpu_share = 0.3


def _connect_without_one(ranks: Ranks) -> None:
    for rank in (0, 2):
        ranks.be(rank, Doing.CONNECTING, meetings=1)


@pytest.mark.parametrize(
    ("how", "act", "seconds"),
    [
        ({}, lambda ranks: ranks.train(30), 0.0),
        ({}, _stop_for_a_moment, 4.0),
        ({"hang_s": 60.0}, lambda ranks: None, 30.0),
        ({"steps": 0}, lambda ranks: _meet_without_one(ranks, doing=Doing.COMMITTING, meetings=0), 30.0),
        ({}, lambda ranks: _meet_without_one(ranks, doing=Doing.FINISHED), 30.0),
        ({}, lambda ranks: _meet_without_one(ranks, doing=Doing.SAVING, is_in_io=True), 30.0),
        ({}, _meet_without_hooks, 60.0),
        ({}, lambda ranks: _use_the_processor(ranks, Doing.COLLECTIVE), 60.0),
        ({}, lambda ranks: _use_the_processor(ranks, Doing.WAITING), 60.0),
        ({"hang_s": None, "steps": 0}, _connect_without_one, 60.0),
    ],
    ids=["they train", "stopped for a moment", "a step slow in all", "it may step alone", "its group is done",
         "it waits for its disk", "its hooks say nothing yet", "a collective that computes", "a wait that computes",
         "a silent rank in set-up"],
)  # fmt: skip
def test_nobody_hangs(how: dict[str, Any], act: Callable[[Ranks], Any], seconds: float) -> None:
    ranks = watched(**how)

    act(ranks)
    ranks.pass_time(seconds)

    assert hung([verdict for _, verdict in ranks.verdicts]) == []
    assert how.get("steps") == 0 or not any(isinstance(verdict, Stalled) for _, verdict in ranks.verdicts)


def test_in_set_up_a_stopped_rank_has_no_time() -> None:
    ranks = watched(hang_s=None, steps=0)
    _connect_without_one(ranks)

    ranks.be(1, Doing.SETUP, is_stopped=True)

    assert {verdict.way for verdict in hung(ranks.pass_time(11.0))} == {Way.STOPPED}


def test_a_stopped_process_is_found_within_its_limit_though_nobody_waits_for_it() -> None:
    ranks = watched()
    ranks.be(1, Doing.COMPUTING, is_stopped=True)
    ranks.ranks[1].has_pulse = False
    stopped_at_s = ranks.at_s

    ranks.pass_time(5.75)

    found_at_s, verdict = ranks.verdicts[0]
    assert isinstance(verdict, Hung)
    assert (verdict.observation.rank, verdict.way, verdict.awaited) == (1, Way.STOPPED, None)
    assert 5.0 < found_at_s - stopped_at_s <= 5.5


@pytest.mark.parametrize(("doing", "signs", "way"), ABSENT)
def test_the_rank_that_does_not_come_is_guilty_and_not_those_that_wait(
    doing: Doing, signs: dict[str, bool], way: Way
) -> None:
    ranks = watched()
    ranks.wait_for(guilty=1)
    ranks.be(1, doing)
    ranks.ranks[1].has_pulse = signs["has_pulse"]

    said = hung(ranks.pass_time(9.0))

    assert {verdict.observation.rank for verdict in said} == {1}
    assert said[0].way is way
    assert said[0].awaited is not None
    assert said[0].awaited.rank == 0
    assert "while rank 0 waits in allreduce, number 1 of step 8" in said[0].reason


AT_IT, AT_COMMIT = (Doing.COLLECTIVE, {"meetings": 1}), (Doing.COMMITTING, {"meetings": 1})
IN_GROUP = (Doing.WAITING, {"operation": "allreduce"})
CONNECTS = (Doing.CONNECTING, {"meetings": 1, "operation": "connect"})


@pytest.mark.parametrize(
    ("steps", "doing", "guilty", "reason"),
    [
        (8, {0: AT_COMMIT, 1: AT_IT, 2: AT_COMMIT}, {1}, "before its optimizer step 8"),
        (0, {0: CONNECTS, 2: CONNECTS}, {1}, "waits for its process group to connect"),
        (8, {0: AT_IT, 3: AT_IT}, {1, 2}, ""),
        (8, {0: (Doing.COLLECTIVE, {"meetings": 0}), 2: AT_IT}, {1}, ""),  # the first of a group with rank 1 only
        (8, {0: IN_GROUP, 2: IN_GROUP, 3: (Doing.WAITING, {"operation": "recv"})}, {1}, "allreduce"),
    ],
    ids=["before the commit", "a group is made", "two ranks", "a group of a part of the ranks", "a pipeline"],
)
def test_those_for_whom_others_wait_are_guilty_and_no_others(
    steps: int, doing: dict[int, tuple[Doing, dict[str, Any]]], guilty: set[int], reason: str
) -> None:
    ranks = watched(world_size=1 + max(doing), steps=steps)
    for rank, (at, more) in doing.items():
        ranks.be(rank, at, **more)

    said = hung(ranks.pass_time(6.0))

    assert {verdict.observation.rank for verdict in said} == guilty
    assert all(verdict.awaited is not None and reason in verdict.reason for verdict in said)


@pytest.mark.parametrize("doing", [Doing.COLLECTIVE, Doing.WAITING])
def test_if_all_stand_in_the_same_collective_no_rank_is_guilty_but_the_connection(doing: Doing) -> None:
    ranks = watched()
    for rank in range(3):
        ranks.be(rank, doing, meetings=1, operation="allreduce")
        ranks.ranks[rank].runs_bytecode = doing is Doing.WAITING  # it answers heartbeats, and does not work

    said = ranks.pass_time(6.5)

    assert isinstance(said[0], Stalled)
    assert said[0].described({}).startswith("all ranks are in allreduce, number 1 of step 8, and none has made")


def test_a_rank_that_has_left_out_a_collective_is_guilty_though_it_waits_too() -> None:
    ranks = watched()
    ranks.wait_for(guilty=1)
    ranks.be(1, Doing.COMMITTING, meetings=0)
    ranks.ranks[1].runs_bytecode = True  # it looks at the board now and then

    said = hung(ranks.pass_time(6.0))

    assert said[0].observation.rank == 1
    assert said[0].way is Way.ASTRAY
    assert said[0].reason.endswith("waits in allreduce, number 1 of step 8, which it has skipped")


@pytest.mark.parametrize("signs", [{"runs_bytecode": True}, {"cpu_share": 0.5}], ids=["bytecode", "processor"])
def test_a_rank_that_works_is_no_hang_until_ten_times_the_limit_and_an_endless_loop_is_found_then(
    signs: dict[str, float],
) -> None:
    ranks = watched()
    ranks.ranks[1] = replace(ranks.ranks[1], **signs)  # type: ignore[arg-type]
    ranks.wait_for(guilty=1)

    assert hung(ranks.pass_time(49.0)) == []
    said = hung(ranks.pass_time(2.0))

    assert (said[0].observation.rank, said[0].way) == (1, Way.BUSY)


@pytest.mark.parametrize(
    ("signs", "way", "named_at_s", "limit_s"),
    [
        ({}, Way.IDLE, 10, 300),
        ({"has_pulse": False}, Way.HELD, 10, 300),
        ({"runs_bytecode": True}, Way.BUSY, 10, 600),
        ({"cpu_share": 0.5}, Way.BUSY, 10, 600),
        ({"doing": Doing.COMMITTING}, Way.ASTRAY, 10, 10),
        ({"doing": Doing.WAITING}, Way.IDLE, 30, 30),
    ],
    ids=["in a call", "holds the GIL", "runs bytecode", "computes", "elsewhere", "in an earlier collective"],
)
def test_only_a_rank_that_waits_for_others_is_shown_to_be_stuck_and_one_in_a_call_of_its_own_is_named_first(
    signs: dict[str, Any], way: Way, named_at_s: int, limit_s: int
) -> None:
    ranks = watched(hang_s=None, steps=300)
    ranks.wait_for(guilty=1)
    ranks.be(1, signs.get("doing", Doing.COMPUTING))
    ranks.ranks[1] = replace(ranks.ranks[1], **{name: sign for name, sign in signs.items() if name != "doing"})
    began_at_s, named, due = ranks.at_s, 0.0, 0.0

    for at_s, verdict in (ranks.pass_time(650), ranks.verdicts)[1]:
        if isinstance(verdict, Hung):
            assert (verdict.observation.rank, verdict.way, verdict.limit_s) == (1, way, limit_s)
            named = named or at_s - began_at_s
            due = due or (verdict.is_due and at_s - began_at_s)

    assert (named, due) == (pytest.approx(named_at_s, abs=4.0), pytest.approx(limit_s, abs=4.0))


def test_a_rank_is_waited_for_longer_than_any_step_of_the_run_has_taken_whoever_took_it() -> None:
    ranks = watched(hang_s=None)
    ranks.train(1, step_s=200.0)
    ranks.train(300)
    in_script = ranks.ranks[1].observation

    assert ranks.watch.limits.hang_limit_s(in_script) == 10.0
    assert ranks.watch.limits.own_limit_s(in_script) == pytest.approx(400.0, abs=2.0)

    ranks.be(1, Doing.COMPUTING)
    ranks.repair(250.0, stepping=[1])
    ranks.watch.begin_anew(ranks.at_s)

    assert ranks.watch.limits.own_limit_s(in_script) == pytest.approx(500.0, abs=2.0)


def test_a_rank_is_not_guilty_for_longer_than_somebody_has_waited_for_it() -> None:
    ranks = watched()
    ranks.pass_time(60.0)
    ranks.wait_for(guilty=1)

    assert hung(ranks.pass_time(4.5)) == []
    assert hung(ranks.pass_time(1.0))


def test_if_ranks_stand_in_different_collectives_each_is_named_with_its_own_and_its_line() -> None:
    ranks = watched()
    ranks.wait_for(guilty=1)
    ranks.be(1, Doing.WAITING, meetings=1, operation="barrier")

    stalled = next(verdict for verdict in ranks.pass_time(6.5) if isinstance(verdict, Stalled))

    assert stalled.described({0: "train.py:55", 1: "train.py:61"}).startswith(
        "rank 1 is in barrier (train.py:61), rank 0 in allreduce (train.py:55), after step 8: they have waited for"
    )


def test_a_straggler_is_reported_once_an_episode_and_is_no_hang() -> None:
    ranks = watched(hang_s=60.0)

    ranks.wait_for(guilty=2)
    ranks.ranks[2].runs_bytecode = True
    first = ranks.pass_time(8.0)
    ranks.train(3)
    ranks.wait_for(guilty=2)
    second = ranks.pass_time(10.0)

    (reported,) = first
    assert isinstance(reported, Straggler)
    assert (reported.observation.rank, reported.observation.boundary) == (2, 8)
    assert reported.took_s == pytest.approx(5.0, abs=0.5)
    assert reported.usual_s == pytest.approx(1.0, abs=0.1)
    assert len(second) == 1


def test_learnt_limits_follow_the_slowest_step_and_are_never_under_ten_seconds() -> None:
    quick, slow = watched(hang_s=None), watched(hang_s=None)
    slow.train(1, step_s=6.0)
    slow.train(1)

    at_work = quick.ranks[1].observation
    saving, in_setup = replace(at_work, doing=Doing.SAVING), replace(at_work, boundary=0)
    at_barrier = replace(at_work, doing=Doing.COLLECTIVE, operation="barrier")
    assert quick.watch.limits.hang_limit_s(at_work) == 10.0
    assert slow.watch.limits.hang_limit_s(at_work) == pytest.approx(30.0, abs=2.0)
    assert quick.watch.limits.hang_limit_s(saving) == 120.0
    assert quick.watch.limits.hang_limit_s(at_work, at_barrier) == 120.0
    assert quick.watch.limits.hang_limit_s(in_setup) == 600.0
    assert quick.watch.limits.busy_limit_s == 600.0
    assert quick.watch.limits.stall_limit_s(8) == 30.0


def test_time_in_which_the_agent_itself_was_held_up_does_not_count() -> None:
    ranks = watched()
    ranks.wait_for(guilty=1)
    ranks.pass_time(3.0)

    ranks.at_s += 3600.0
    soon = ranks.pass_time(1.0)
    later = ranks.pass_time(4.0)

    assert hung(soon) == []
    assert hung(later)


def test_after_a_recovery_everybody_has_the_whole_limit_again() -> None:
    ranks = watched()
    ranks.wait_for(guilty=1)
    ranks.pass_time(4.0)

    ranks.pass_time(20.0, is_repair=True)
    ranks.watch.begin_anew(ranks.at_s)

    assert hung(ranks.pass_time(4.5)) == []
    assert hung(ranks.pass_time(1.0))


def test_in_a_recovery_only_processes_that_are_as_good_as_dead_are_found() -> None:
    ranks = watched(world_size=4)
    ranks.wait_for(guilty=1)
    ranks.ranks[2].has_pulse = False
    ranks.be(3, Doing.COLLECTIVE, is_stopped=True)

    said = hung(ranks.pass_time(5.5, is_repair=True))

    assert {(verdict.observation.rank, verdict.way) for verdict in said} == {(2, Way.HELD), (3, Way.STOPPED)}


@pytest.mark.parametrize(
    ("doing", "groups"),
    [(Doing.REPLAYING, {"replaying": [1]}), (Doing.COMPUTING, {"stepping": [0, 1]})],
    ids=["in its replay", "in the step it takes over"],
)
def test_a_replacement_that_is_stuck_is_found_and_those_that_wait_for_it_are_not(
    doing: Doing, groups: dict[str, list[int]]
) -> None:
    ranks = watched()
    ranks.wait_for(guilty=1)
    ranks.be(1, doing)

    said = ranks.repair(6.0, **groups)

    assert {verdict.observation.rank for verdict in hung(said)} == {1}
