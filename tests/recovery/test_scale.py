"""What an incident costs the machine grows with the number of ranks, and not with its square."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from tests.recovery.fake_world import FakeWorld
from ttprun import recovery
from ttprun.protocol.from_rank import RankFrozen
from ttprun.protocol.rank_events import RankExited, RankStarted
from ttprun.protocol.reason import Reason
from ttprun.recovery import Settings
from ttprun.recovery.members import CHUNK, COUNTED, Member, Members, RankState
from ttprun.recovery.replicas import Looks, Replicas


class Counted:
    """Counts the instructions of Python that run inside it."""

    def __init__(self) -> None:
        self.instructions = 0

    def __enter__(self) -> Counted:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if "/ttprun/recovery/" not in frame.f_code.co_filename:
            return None  # what the fake world does is not the machine's
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        self.instructions += event == "opcode"
        return self._trace


def instructions_of_incident(world_size: int, lost: int) -> int:
    """How many instructions the machine needs until ranks that were killed at once are replaced."""
    world = FakeWorld(Settings(world_size=world_size), restarts=0)
    world.settle()
    world.train()
    with Counted() as counted:
        for rank in range(lost):
            world.end(rank, None, 9, is_script_error=False, is_mute=True)
        world.settle()
    assert [incident.outcome for incident in world.closed] == ["recovered"]
    return counted.instructions


@pytest.mark.parametrize("lost", [1, 4])
def test_an_incident_of_twice_as_many_ranks_takes_twice_the_work(lost: int) -> None:
    instructions_of_incident(2, 1)  # Python 3.12.1 gives no instruction to the first function that is traced so
    found = [instructions_of_incident(world_size, lost) for world_size in (64, 128, 256)]

    assert all(after / before < 2.2 for before, after in pairwise(found)), found


@pytest.mark.parametrize("are_sharded", [False, True])
def test_a_sixteenth_of_all_ranks_lost_at_once_costs_twice_as_much_among_twice_as_many(are_sharded: bool) -> None:
    found = []
    for world_size in (128, 256):
        groups = world_size // 2 if are_sharded else 1
        world = FakeWorld(Settings(world_size=world_size), restarts=0, replica_groups=groups)
        world.settle()
        world.train()
        lost = tuple(range(world_size // 16))
        with Counted() as counted:
            world.lose_ranks(lost)
            world.settle()
        assert [incident.ranks for incident in world.closed] == [lost]
        found.append(counted.instructions)

    assert all(after / before < 2.2 for before, after in pairwise(found)), found


def test_an_answer_that_is_not_the_last_one_costs_the_same_among_many_ranks_as_among_few() -> None:
    found = []
    for world_size in (256, 2048):
        job = recovery.new_job(Settings(world_size=world_size))
        for rank in range(world_size):
            job, _ = recovery.advance(job, RankStarted(rank=rank, pid=rank + 1, at_s=0.0))
        job = replace(job, replicas=Replicas(compared_at=1))
        exited = RankExited(rank=0, pid=1, code=None, signal=9, boundary=5, at_s=1.0)
        job, _ = recovery.advance(job, exited)
        answers = [
            RankFrozen(rank=rank, generation=1, boundary=5, digest="w", has_group=True, at_s=2.0)
            for rank in range(1, 201)
        ]

        with Counted() as counted:
            for answer in answers:
                job, _ = recovery.advance(job, answer)

        assert job.count("quiesced") == 200
        found.append(counted.instructions)

    assert found[0] == found[1], found


@pytest.mark.parametrize("are_sharded", [False, True])
def test_a_comparison_of_twice_as_many_ranks_takes_twice_the_work(are_sharded: bool) -> None:
    found = []
    for world_size in (128, 256, 512):
        looks = Looks(world_size=world_size)
        with Counted() as counted:
            for boundary in (1, 2):
                for rank in range(world_size):
                    held = {"w": (f"shard {rank // 2 * are_sharded}", "r")}
                    looks, look = looks.note(rank, boundary, held, is_full=True)
        assert look is not None
        found.append(counted.instructions)

    assert all(after / before < 2.3 for before, after in pairwise(found)), found


def test_members_count_what_they_wait_for_as_a_scan_would() -> None:
    members = Members.of(Member(rank=rank) for rank in range(2 * CHUNK + 3))

    for rank in (0, CHUNK - 1, CHUNK, 2 * CHUNK + 2):
        members = members.with_changed([Member(rank=rank, life=RankState.LOST, hindrance=Reason(text="a loop"))])
    members = members.with_each(lambda it: Member(rank=it.rank, life=RankState.LOST, pid=1) if it.rank > 250 else it)

    assert members == Members.of(members)
    assert all(members.count(what) == sum(map(holds, members)) for what, holds in COUNTED.items())
    assert members.count("lost") == 11 == members.count("must replay")
    assert members.count("hindered") == 3
    assert [member.rank for member in members] == list(range(len(members)))
    assert members[CHUNK].hindrance.text == "a loop"
    assert members.count("must start") == 3
