"""What an incident costs the machine grows with the number of ranks, and not with its square."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from tests.recovery.fake_world import FakeWorld
from ttprun.recovery import Settings
from ttprun.recovery.members import CHUNK, Life, Member, MemberFlag, Members, flags_of
from ttprun.recovery.replicas import Looks


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
        if "recovery" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
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
        members = members.with_changed([Member(rank=rank, life=Life.LOST, hindrance="a loop")])
    members = members.with_each(lambda one: Member(rank=one.rank, life=Life.LOST, pid=1) if one.rank > 250 else one)

    marks = [mark for member in members for mark in flags_of(member)]
    assert members.counts == [marks.count(mark) for mark in MemberFlag]
    assert [member.rank for member in members] == list(range(len(members)))
    assert members[CHUNK].hindrance == "a loop"
    assert members.counts[MemberFlag.MUST_START] == 3
