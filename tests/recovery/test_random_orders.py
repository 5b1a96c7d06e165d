"""Random faults and random orders of events: the promises of style.md must hold. Most are checked in `fake_world`."""

import re
from collections.abc import Iterator

from hypothesis import example, given
from hypothesis import strategies as st

from tests.recovery.fake_world import FakeWorld
from ttprun.protocol.from_rank import RankHindered, RankUnprotected
from ttprun.protocol.rank_events import Event, MismatchFound, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.recovery import RUNGS, CheckpointAsked, JobPhase, RankState, Settings

WORLDS = st.builds(
    FakeWorld,
    st.builds(
        Settings, world_size=st.integers(1, 4), max_attempts=st.integers(1, 3), saves_before_restart=st.booleans()
    ),
    restarts=st.integers(0, 2),
    replica_groups=st.integers(1, 2),
)
# Mostly it is the only way to train on in a smaller group.
OF_ELASTIC = st.builds(
    Settings,
    world_size=st.sampled_from([2, 4, 6]),
    rungs=st.sampled_from([RUNGS - {"replace", "rewind"}, RUNGS - {"replace", "rewind", "restart"}, RUNGS]),
    max_attempts=st.integers(1, 3),
    saves_before_restart=st.booleans(),
    max_same_faults=st.just(9),
    are_replicas_declared=st.just(True),
)
ELASTIC = st.builds(FakeWorld, OF_ELASTIC, restarts=st.integers(0, 2), tensor_parallel=st.integers(1, 2))
TAPES = st.binary(max_size=160) | st.binary(min_size=100, max_size=240)


def play(world: FakeWorld, tape: bytes) -> None:
    """Let the tape say what happens: each pair of bytes is one move, and what or whom it concerns."""
    for move, choice in pairs(tape):
        rank = choice % len(world.unheard)
        is_mute = choice >= 128
        if move < 146:
            world.hear_from(rank)
        elif move < 150:
            world.fault(rank)
        elif move < 170:
            world.hear_agent()
        elif move < 195:
            world.train()
        elif move < 208:
            world.hear_echo(choice)
        elif move < 211:
            world.hang(rank)
        elif move < 213:
            world.see_hung()
        elif move < 215:
            world.break_connections(is_echo=is_mute, rank=rank if move == 213 else None)
        elif move < 235:
            world.end(rank, None, 9, is_script_error=False, is_mute=is_mute)
        elif move < 241:
            world.end(rank, 1, None, is_script_error=True, is_mute=is_mute)
        elif move < 245:
            world.end(rank, 0, None, is_script_error=False, is_mute=False)
        elif move < 246:
            world.take_snapshot()
        elif move < 247 and not world.job.away:
            world.ask_replacement(rank, is_pair=is_mute)
        elif move < 247:
            world.ask_size(is_smaller=is_mute)
            world.has_room = choice % 3 > 0
        elif move < 248 and is_mute:
            world.renew_supervisor()
        elif move < 248:
            world.hear(CheckpointAsked(at_s=0.0))
        elif move < 249:
            world.pass_deadline(is_agent_blind=is_mute)
        elif move < 250:
            world.lose_node(rank, is_pair=is_mute)
        elif move < 251:
            world.flip_bit(rank)
        elif move < 253:
            world.hear(
                MismatchFound(rank=rank, generation=world.job.generation, reason=Reason(text="other shape"), at_s=0.0)
            )
        elif move < 254:
            world.hear(RankUnprotected(rank=rank, reason=Reason(text="a CUDA graph"), at_s=0.0))
        elif move < 255:
            world.hear(RankHindered(rank=rank, reason=Reason(text="a queue" if is_mute else ""), at_s=0.0))
        else:
            world.handles_stop = is_mute
            world.hear(StopAsked(reason="SIGTERM", at_s=0.0))


def pairs(tape: bytes) -> Iterator[tuple[int, int]]:
    """Bytes two by two."""
    return zip(tape[::2], tape[1::2], strict=False)


@given(world=WORLDS | ELASTIC, tape=TAPES)
def test_whatever_happens_every_incident_ends_and_nobody_goes_on_with_wrong_state(
    world: FakeWorld, tape: bytes
) -> None:
    play(world, tape)

    world.settle()

    assert len(world.closed) == world.job.incident_count
    assert all(incident.outcome != "open" and incident.total_s is not None for incident in world.closed)
    without_loss = [one for one in world.closed if one.outcome == "recovered" and one.rung not in ("rewind", "restart")]
    assert all(incident.steps_lost == 0 for incident in without_loss)


@given(world=WORLDS | ELASTIC, tape=TAPES)
def test_a_job_that_runs_in_the_end_has_a_living_process_for_every_rank_all_at_one_boundary(
    world: FakeWorld, tape: bytes
) -> None:
    play(world, tape)

    world.settle()

    running = [member for member in world.job.members if world.job.phase is JobPhase.RUNNING]
    assert all(member.life is not RankState.LOST for member in running)
    working = [member for member in running if member.life is RankState.LIVE]
    assert all(world.processes[member.rank].is_alive for member in working)
    assert all(world.processes[member.rank].pid == member.pid for member in working)
    assert len({world.processes[member.rank].boundary for member in working}) <= 1


@given(
    world=WORLDS | ELASTIC,
    before=st.binary(max_size=40),
    kinds=st.sampled_from([(StopAsked,), (CheckpointAsked,), (CheckpointAsked, StopAsked)]),
    handles_stop=st.booleans(),
    tape=st.binary(max_size=100),
)
def test_whatever_happens_around_a_checkpoint_and_an_end_that_were_asked_for(
    world: FakeWorld, before: bytes, kinds: tuple[type[Event], ...], handles_stop: bool, tape: bytes
) -> None:
    world.settle()
    world.train()
    play(world, before)

    for kind in kinds:
        world.handles_stop = handles_stop
        world.hear(StopAsked(reason="SIGTERM", at_s=0.0) if kind is StopAsked else CheckpointAsked(at_s=0.0))
        play(world, tape)
    world.settle()

    assert len(world.closed) == world.job.incident_count
    is_over = world.job.phase in (JobPhase.DONE, JobPhase.FAILED)
    assert is_over or not world.awaits_checkpoint
    assert is_over or StopAsked not in kinds


HEARD_LAST = {"before": b"", "handles_stop": True, "heard": 2, "rank": 0, "how": "hang", "is_asked_twice": False}


@example(world=FakeWorld(Settings(world_size=2), restarts=0), **HEARD_LAST)
@given(
    world=WORLDS,
    before=st.just(b"") | st.binary(max_size=60),
    handles_stop=st.booleans(),
    heard=st.integers(0, 6),
    rank=st.integers(0, 3),
    how=st.sampled_from(["", "error", "exit", "kill", "hang"]),
    is_asked_twice=st.booleans(),
)
def test_a_job_that_is_ended_waits_for_no_rank_longer_than_for_one_to_halt(
    world: FakeWorld, before: bytes, handles_stop: bool, heard: int, rank: int, how: str, is_asked_twice: bool
) -> None:
    world.settle()
    world.train()
    play(world, before)
    world.handles_stop, world.waited_s, rank = handles_stop, 0.0, rank % len(world.unheard)

    world.hear(StopAsked(reason="SIGTERM", at_s=0.0))
    for number in range(heard):
        world.hear_from(number) if number < len(world.unheard) else world.hear_agent()
    if how == "hang":
        world.hang(rank)
    elif how:
        code = {"error": 1, "exit": 0}.get(how)
        world.end(rank, code, 9 if how == "kill" else None, is_script_error=how == "error", is_mute=False)
    if is_asked_twice:
        world.hear(StopAsked(reason="SIGTERM", at_s=0.0))
    world.settle()

    assert world.job.phase in (JobPhase.DONE, JobPhase.FAILED)
    assert world.waited_s <= (len(world.unheard) + 1) * world.job.settings.limits.halt_s


EACH_FOR_ITSELF = st.builds(
    FakeWorld, st.builds(Settings, world_size=st.integers(2, 4)), restarts=st.integers(0, 2), replica_groups=st.just(4)
)


@given(world=EACH_FOR_ITSELF, tape=TAPES)
def test_ranks_that_hold_something_each_for_itself_are_never_repaired_from_one_another(
    world: FakeWorld, tape: bytes
) -> None:
    world.settle()
    world.train()
    world.take_snapshot()

    play(world, tape)
    world.settle()

    assert len(world.closed) == world.job.incident_count
    assert world.job.restarts or not any(
        one.rung in ("replace", "rerun") and one.outcome == "recovered" and one.boundary for one in world.closed
    )


@given(
    world=st.builds(FakeWorld, st.builds(Settings, world_size=st.integers(2, 4)), restarts=st.just(0)),
    kills=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), max_size=6),
)
def test_ranks_killed_one_after_the_other_are_all_replaced(world: FakeWorld, kills: list[tuple[int, int]]) -> None:
    world.settle()

    for rank, boundaries in kills:
        for _ in range(boundaries + 1):
            world.train()
        world.end(rank % len(world.unheard), None, 9, is_script_error=False, is_mute=True)
        world.settle()

    assert world.job.phase is JobPhase.RUNNING
    assert [incident.outcome for incident in world.closed] == ["recovered"] * len(kills)
    assert len({process.boundary for process in world.processes.values()}) == 1


@given(
    world=st.builds(
        FakeWorld, st.builds(Settings, world_size=st.integers(3, 5), max_same_faults=st.just(9)), restarts=st.just(0)
    ),
    kills=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.booleans()), min_size=2, max_size=4),
)
def test_ranks_killed_in_mid_repair_are_replaced_unless_none_is_left_or_it_has_been_tried_too_often(
    world: FakeWorld, kills: list[tuple[int, int, bool]]
) -> None:
    world.settle()
    world.train()

    for rank, rounds, is_mute in kills:
        world.end(rank % len(world.unheard), None, 9, is_script_error=False, is_mute=is_mute)
        for _ in range(rounds):
            world.hear_next()
    world.settle()

    given_up = [incident for incident in world.closed if incident.outcome != "recovered"]
    assert all(re.search("all ranks of the group were lost|3 attempts", incident.reason.text) for incident in given_up)


@given(
    world=st.builds(
        FakeWorld, st.builds(Settings, world_size=st.integers(3, 5), max_same_faults=st.just(9)), restarts=st.just(0)
    ),
    hangs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.booleans()), min_size=1, max_size=3),
)
def test_ranks_that_hang_at_any_moment_are_replaced_unless_none_is_left_or_it_has_been_tried_too_often(
    world: FakeWorld, hangs: list[tuple[int, int, bool]]
) -> None:
    world.settle()
    world.train()

    for rank, rounds, is_kill in hangs:
        if is_kill:
            world.end(rank % len(world.unheard), None, 9, is_script_error=False, is_mute=True)
        else:
            world.hang(rank % len(world.unheard))
        for _ in range(rounds):
            world.hear_next()
    world.settle()

    assert world.hung == () or world.job.phase is JobPhase.FAILED
    given_up = [incident for incident in world.closed if incident.outcome != "recovered"]
    assert all(re.search("all ranks of the group were lost|3 attempts|waited for", one.reason.text) for one in given_up)


@given(
    world=st.builds(FakeWorld, st.builds(Settings, world_size=st.integers(2, 4)), restarts=st.just(0)),
    rank=st.integers(0, 3),
    rounds=st.integers(0, 12),
)
def test_a_rank_that_answers_is_never_killed_if_the_agent_sees_who_hangs(
    world: FakeWorld, rank: int, rounds: int
) -> None:
    world.settle()
    world.train()
    first, second = rank % len(world.unheard), (rank + 1) % len(world.unheard)
    pids = {other: process.pid for other, process in world.processes.items()}

    world.end(first, None, 9, is_script_error=False, is_mute=True)
    for _ in range(rounds):
        world.hear_next()
    world.hang(second)
    world.settle()

    spared = {other for other in pids if other not in (first, second)}
    assert {other: world.processes[other].pid for other in spared} == {other: pids[other] for other in spared}


@given(
    world=st.builds(FakeWorld, st.builds(Settings, world_size=st.integers(2, 4)), restarts=st.just(0)),
    breaks=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_connections_that_break_cost_no_process(world: FakeWorld, breaks: list[int]) -> None:
    world.settle()
    pids = {rank: process.pid for rank, process in world.processes.items()}

    for rounds in breaks:
        world.train()
        world.break_connections(is_echo=False, rank=None)
        for _ in range(rounds):
            world.hear_next()
        world.break_connections(is_echo=True, rank=None)
        world.settle()

    assert {rank: process.pid for rank, process in world.processes.items()} == pids
    assert [incident.rung for incident in world.closed] == ["reconnect"] * len(breaks)
    assert all(incident.outcome == "recovered" for incident in world.closed)


@given(
    world=st.builds(
        FakeWorld, st.builds(Settings, world_size=st.integers(2, 4), max_same_faults=st.just(9)), restarts=st.just(0)
    ),
    faulted=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True), min_size=1, max_size=4),
)
def test_transient_errors_cost_no_process_as_long_as_one_rank_has_none(
    world: FakeWorld, faulted: list[list[int]]
) -> None:
    world.settle()
    pids = {rank: process.pid for rank, process in world.processes.items()}

    for together in faulted:
        world.train()
        for rank in {rank % len(pids) for rank in together} - {0}:
            world.fault(rank)
        world.settle()

    assert {rank: process.pid for rank, process in world.processes.items()} == pids
    assert {incident.rung for incident in world.closed} <= {"rerun"}
    assert all(incident.outcome == "recovered" for incident in world.closed)
    assert len({process.boundary for process in world.processes.values()}) == 1


@given(
    world=st.builds(
        FakeWorld, st.builds(Settings, world_size=st.integers(3, 5), max_same_faults=st.just(9)), restarts=st.just(0)
    ),
    faults=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.booleans()), min_size=2, max_size=4),
)
def test_transient_errors_and_kills_in_mid_repair_end_well_unless_none_is_left_or_it_has_been_tried_too_often(
    world: FakeWorld, faults: list[tuple[int, int, bool]]
) -> None:
    world.settle()
    world.train()

    for rank, rounds, is_kill in faults:
        if is_kill:
            world.end(rank % len(world.unheard), None, 9, is_script_error=False, is_mute=True)
        else:
            world.fault(rank % len(world.unheard))
        for _ in range(rounds):
            world.hear_next()
    world.settle()

    given_up = [incident for incident in world.closed if incident.outcome != "recovered"]
    expected = "all ranks of the group were lost|3 attempts|error of the script itself|the script fails again in a"
    assert all(re.search(expected, incident.reason.text) for incident in given_up)


@given(
    world=st.builds(FakeWorld, OF_ELASTIC, restarts=st.just(0), tensor_parallel=st.integers(1, 2)),
    moves=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12), st.booleans()), min_size=1, max_size=7),
)
def test_a_group_becomes_smaller_and_whole_again_and_the_rest_always_holds_a_whole_copy(
    world: FakeWorld, moves: list[tuple[int, int, bool]]
) -> None:
    world.settle()
    world.train()

    for who, rounds, is_mute in moves:
        if who < len(world.unheard):
            world.end(who, None, 9, is_script_error=False, is_mute=is_mute)
        elif who == 11:
            world.has_room = not world.has_room
        else:
            world.ask_size(is_smaller=is_mute)
        for _ in range(rounds):
            world.hear_next()
    world.settle()
    world.train()

    given_up = [incident for incident in world.closed if incident.outcome != "recovered"]
    expected = "no rank would remain|all ranks of the group were lost|no copy would remain"
    assert all(re.search(expected, incident.reason.text) for incident in given_up)
    away = [world.processes[rank] for rank in world.job.away]
    assert not any(process.is_alive for process in away)
    working = [world.processes[rank] for rank in world.job.survivors]
    assert len({process.boundary for process in working}) == 1 or world.job.phase is not JobPhase.RUNNING
