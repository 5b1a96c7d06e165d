"""Ranks without a process group: whatever happens to one, the others are not touched, and every incident ends."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.recovery.fake_world import FakeWorld
from ttprun import recovery
from ttprun.protocol import to_rank
from ttprun.protocol.from_rank import RankJoined, RankRebuilt, RankReissued, RankRepaired, RankTrainsAlone
from ttprun.protocol.process_orders import Action, Rewind
from ttprun.protocol.rank_events import Event, RankExited, StopAsked
from ttprun.protocol.to_rank import Replay
from ttprun.recovery import Incident, JobPhase, Settings


class AloneWorld(FakeWorld):
    """Ranks each of which trains for itself; what it holds is kept at every `kept_every`-th step.

    touched   ranks that an order was given to, since it was last emptied
    """

    def __init__(self, ranks: int, kept_every: int) -> None:
        super().__init__(Settings(world_size=ranks, max_same_faults=9), restarts=0, replica_groups=ranks)
        self.kept_every = kept_every
        self.touched: set[int] = set()
        self.went_back_to: dict[int, int] = {}  # by rank
        while self.hear_next():
            pass
        for rank in range(ranks):
            self.hear(RankTrainsAlone(rank=rank, at_s=0.0))

    def train(self) -> None:
        """Each rank that can takes a step."""
        for rank, process in self.processes.items():
            is_ready = self.job.members[rank].life is recovery.RankState.LIVE
            if is_ready and process.is_alive and process.is_whole and not process.is_stuck:
                process.boundary += 1

    def hear(self, event: Event) -> None:
        """As the agent does: what a lost rank has left is reported before its loss."""
        is_loss = isinstance(event, RankExited | recovery.RankHung)
        if is_loss and recovery.is_alone(self.job, event.rank) and self.job.members[event.rank].pid == event.pid:
            kept = event.boundary - event.boundary % self.kept_every
            self.snapshot_boundary = kept
            super().hear(recovery.SnapshotTaken(rank=event.rank, boundary=kept or None, is_own=True, at_s=0.0))
        if isinstance(event, recovery.DeadlinePassed) and event.rank is None:
            for rank, own in self.job.alone.items():
                super().hear(replace(event, rank=rank, generation=own.generation))
        super().hear(event)

    def obey(self, action: Action) -> None:
        """Carry out an order, and note whom it concerns."""
        ranks = getattr(action, "ranks", None) or [getattr(action, "rank", None)]
        self.touched |= {rank for rank in ranks if rank is not None}
        if isinstance(action, Rewind):
            self.snapshot_boundary = action.boundary
            self.went_back_to |= dict.fromkeys(action.ranks, action.boundary)
        if isinstance(action, Replay | to_rank.LoadState):
            self.stored_boundary = self.went_back_to[ranks[0]]
        super().obey(action)

    def check_number(self, incident: Incident) -> None:
        """Incidents of several ranks may go on side by side; each has its own number, and is closed once."""
        assert incident.id not in [one.id for one in self.closed]

    def load_state(self, ranks: tuple[int, ...], generation: int, boundary: int) -> None:
        """A rank loads what it has left itself."""
        (rank,) = ranks
        process = self.processes[rank]
        assert process.boundary == boundary
        self.say(rank, RankRepaired(rank=rank, generation=generation, digest=process.digest, at_s=0.0))

    def resume(self, ranks: tuple[int, ...], generation: int, boundary: int) -> None:
        """One rank trains again."""
        (rank,) = ranks
        self.processes[rank].boundary = boundary
        self.processes[rank].is_whole = True
        self.say(rank, RankRebuilt(rank=rank, generation=generation, at_s=0.0))
        self.say(rank, RankReissued(rank=rank, generation=generation, at_s=0.0))

    def settle(self) -> None:
        """Until nobody has anything to say; deadlines pass for those that are silent."""
        for _ in range(200):
            if self.hear_next():
                continue
            are_settled = all(own.phase in (JobPhase.RUNNING, JobPhase.DONE) for own in self.job.alone.values())
            if self.job.phase in (JobPhase.DONE, JobPhase.FAILED) or (are_settled and not self.hung):
                return
            self.see_hung()
            self.pass_deadline()
        raise AssertionError(f"the job does not settle: {self.job}")


WORLDS = st.builds(AloneWorld, st.integers(2, 4), kept_every=st.integers(1, 4))
MOVES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from(["kill", "hang", "error"])), max_size=6
)


@given(world=WORLDS, moves=MOVES, spared=st.integers(0, 3))
def test_what_happens_to_some_ranks_costs_them_alone_and_at_most_what_they_had_not_kept(
    world: AloneWorld, moves: list[tuple[int, int, str]], spared: int
) -> None:
    ranks = len(world.unheard)
    spared %= ranks
    pid = world.processes[spared].pid

    for who, rounds, how in moves:
        rank = who % ranks
        world.train()
        if rank == spared:
            continue
        if how == "hang":
            world.hang(rank)
        else:
            world.end(rank, 1 if how == "error" else None, 9 if how == "kill" else None, how == "error", is_mute=True)
        for _ in range(rounds):
            world.hear_next()
            world.train()
    world.settle()

    is_over = world.job.phase in (JobPhase.DONE, JobPhase.FAILED)  # an error of the script that has come back
    assert len(world.closed) == world.job.incident_count
    assert all(incident.outcome == "recovered" for incident in world.closed) or is_over
    assert is_over or (spared not in world.touched and world.processes[spared].pid == pid)
    assert is_over or world.job.generation == 0
    lost = [one.steps_lost or 0 for one in world.closed if one.rung != "fail"]
    assert all(steps < world.kept_every or one.boundary == 0 for steps, one in zip(lost, world.closed, strict=False))


@given(world=WORLDS, moves=MOVES, joins=st.integers(0, 3))
def test_when_a_rank_joins_a_group_in_between_every_incident_still_ends(
    world: AloneWorld, moves: list[tuple[int, int, str]], joins: int
) -> None:
    ranks = len(world.unheard)

    for number, (who, rounds, _) in enumerate(moves):
        if number == joins:
            world.hear(RankJoined(rank=who % ranks, at_s=0.0))
        world.train()
        if world.job.phase is JobPhase.RUNNING:
            world.end(who % ranks, None, 9, is_script_error=False, is_mute=True)
        for _ in range(rounds):
            if world.job.phase is JobPhase.RUNNING:
                world.hear_next()
    if world.job.phase is JobPhase.RUNNING:
        world.hear(StopAsked(reason="SIGTERM", at_s=0.0))

    opened = [incident for incident in world.closed if incident.outcome == "open"]
    assert opened == []
