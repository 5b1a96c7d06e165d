"""A job's processes, as far as the machine can distinguish them from real ones: they answer orders and die.

Each order is checked as it is carried out: a broken promise fails there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from tests.recovery.validity import advance
from ttprun import recovery
from ttprun.protocol import to_rank
from ttprun.protocol.from_rank import (
    RankFaulted,
    RankFrozen,
    RankProtected,
    RankRebuilt,
    RankReissued,
    RankRepaired,
    RankReplayed,
    StateSent,
)
from ttprun.protocol.process_orders import Action, KillRank, ParkRank, Rewind, SpawnRank, TakeBack
from ttprun.protocol.rank_events import Event, RankExited, RankStarted, RepairEvent, SpawnFailed, StopAsked
from ttprun.protocol.to_rank import Replay
from ttprun.recovery import Incident, Job, JobPhase, Settings, new_job
from ttprun.recovery.phases import DEADLINE_NAMES, HALT
from ttprun.recovery.replicas import Replicas
from ttprun.recovery.shards import ReplicaGroup

SETTLED = (JobPhase.RUNNING, JobPhase.DONE, JobPhase.FAILED)


@dataclass
class Process:
    """One process of a rank.

    boundary        where it stands
    agreed_digest   of its weights, as it has reported it to the machine in this generation
    has_orders      it has been ordered to replay
    is_whole        it may train
    is_hung         it lives, but says nothing any more
    is_faulted      its script has ended by a transient error, and the machine has not heard of it yet
    """

    pid: int
    weights: str = "weights"
    boundary: int = 0
    agreed_digest: str = ""
    has_orders: bool = False
    is_whole: bool = False
    is_alive: bool = True
    is_hung: bool = False
    is_faulted: bool = False

    @property
    def is_stuck(self) -> bool:
        """It does nothing that it is ordered to."""
        return self.is_hung or self.is_faulted

    def begin_anew(self, weights: str) -> None:
        """It waits for orders like a replacement that has just started, but stands where it stood."""
        self.is_faulted = self.is_whole = self.has_orders = False
        self.weights = weights

    @property
    def digest(self) -> str:
        """Of the weights as they are at the boundary."""
        return f"{self.weights}-{self.boundary}"


class FakeWorld:
    """Processes and agent of one job, with what they have said and the machine has not heard yet.

    replica_groups    their number; they hold nothing in common: rank r is in group r modulo this number
    tensor_parallel   ranks that hold one replica of the model together, if they can train on in a smaller group; 0: no
    has_room          another process can be started
    handles_stop      the scripts have something to do when they are ordered to end
    awaits_checkpoint somebody has asked for a checkpoint, and knows neither that it is there nor why not
    """

    def __init__(self, settings: Settings, restarts: int, tensor_parallel: int = 0, replica_groups: int = 1) -> None:
        self.replica_groups = replica_groups
        self.job: Job = new_job(settings)
        self.tensor_parallel = tensor_parallel
        self.has_room = True
        self.handles_stop = False
        self.awaits_checkpoint = False
        self.restarts = restarts
        self.at_s = 0.0
        self.next_pid = 100
        self.processes: dict[int, Process] = {}
        self.parked: dict[int, Process] = {}
        self.unheard: dict[int, deque[Event]] = {rank: deque() for rank in range(settings.world_size)}
        self.agent_unheard: deque[Event] = deque()
        self.newest_generation = 0
        self.echoes: list[Event] = []
        self.finished: set[int] = set()
        self.closed: list[Incident] = []
        self.snapshot_boundary = -1
        self.limits: dict[str, float] = {}  # of the deadlines that were ordered last, by name
        self.waited_s = 0.0  # for deadlines, until all was settled
        self.stored_boundary = -1  # of the state that the ranks were ordered back to
        self.unusable: set[str] = set()
        self.start_all()

    # What happens

    def start_all(self) -> None:
        """Every rank gets a process that runs the script."""
        self.finished = set()
        for rank in self.unheard:
            self.start(rank).is_whole = True
        owners = tuple(rank % self.replica_groups for rank in self.unheard)
        replicas = Replicas(compared_at=1, differing={"w": owners} if any(owners) else {})
        self.agent_unheard.append(recovery.RanksCompared(replicas=replicas, at_s=0.0))

    def start(self, rank: int) -> Process:
        """A rank gets a process."""
        self.next_pid += 1
        process = self.processes[rank] = Process(self.next_pid, self.weights_of(rank))
        self.unheard[rank].append(RankStarted(rank=rank, pid=process.pid, at_s=0.0))
        self.unheard[rank].append(RankProtected(rank=rank, at_s=0.0))
        if self.tensor_parallel:
            declared = recovery.ElasticDeclared(rank=rank, replicas=(self.replicas_of(rank),), at_s=0.0)
            self.unheard[rank].append(declared)
        return process

    def weights_of(self, rank: int) -> str:
        """What a rank holds when nothing has gone wrong."""
        return f"weights {rank % self.replica_groups}"

    def replicas_of(self, rank: int) -> ReplicaGroup:
        """Ranks that hold the same as this one."""
        alike = tuple(range(rank % self.tensor_parallel, len(self.unheard), self.tensor_parallel))
        return ReplicaGroup(alike, len(alike))

    def end(self, rank: int, code: int | None, signal: int | None, is_script_error: bool, is_mute: bool) -> None:
        """A process ends; if it is mute, what it has not sent yet is lost with it."""
        process = self.processes.get(rank)
        if process is None or not process.is_alive:
            return
        process.is_alive = False
        if code == 0:
            self.finished.add(rank)
        elif is_mute:
            said = self.unheard[rank]
            self.unheard[rank] = deque(event for event in said if isinstance(event, RankStarted))
        self.unheard[rank].append(
            RankExited(
                rank=rank,
                pid=process.pid,
                code=code,
                signal=signal,
                boundary=process.boundary,
                is_script_error=is_script_error,
                at_s=0.0,
            )
        )

    def lose_node(self, rank: int, is_pair: bool) -> None:
        """A node of one rank or two is lost."""
        self.lose_ranks(tuple(sorted({rank, (rank + is_pair) % len(self.unheard)})))

    def lose_ranks(self, ranks: tuple[int, ...]) -> None:
        """All processes of their node are gone; nothing that they have said is heard any more."""
        for one in ranks:
            if one not in self.finished:
                self.processes[one].is_alive = False
            self.unheard[one].clear()
        boundary = max(self.processes[one].boundary for one in ranks)
        self.hear(recovery.NodeLost(ranks=ranks, name="node 1", boundary=boundary, at_s=0.0))

    def fault(self, rank: int) -> None:
        """A transient error ends the script of a rank that trains; the process says so, and then only listens."""
        process = self.processes[rank]
        if process.is_alive and process.is_whole and not process.is_hung and not process.is_faulted:
            event = RankFaulted(rank=rank, pid=process.pid, boundary=process.boundary, at_s=0.0)
            self.say(rank, event)
            process.is_faulted = True

    def hang(self, rank: int) -> None:
        """A process does not get on any more; what it has said is on its way."""
        if rank not in self.finished:
            self.processes[rank].is_hung = True

    def renew_supervisor(self) -> None:
        """The agent has failed, and a new one reports first which processes there are."""
        for rank, process in self.processes.items():
            member = self.job.members[rank]
            if process.is_alive and member.pid is None and member.life is recovery.RankState.LOST:
                self.hear(RankStarted(rank=rank, pid=process.pid, at_s=0.0))
        for rank in [*self.job.alone, None]:
            self.hear(recovery.SupervisorRenewed(reason="a bug of ours", rank=rank, at_s=0.0))

    def ask_replacement(self, rank: int, is_pair: bool) -> None:
        """A healthy rank, or it and its neighbour, are to have new processes."""
        ranks = tuple(sorted({rank, (rank + is_pair) % len(self.unheard)}))
        is_kept = rank % 2 == 0
        node = "node 1" if is_pair and not is_kept else ""
        asked = recovery.ReplacementAsked(ranks=ranks, reason="it was asked", node=node, is_kept=is_kept, at_s=0.0)
        self.hear(asked)

    def ask_size(self, is_smaller: bool) -> None:
        """Somebody wants no replacements, or those back that are away."""
        asked = recovery.DowngradeAsked if is_smaller else recovery.UpgradeAsked
        self.hear(asked(reason="the scheduler has asked", at_s=0.0))

    def see_hung(self) -> None:
        """The agent sees who hangs, and says so."""
        for rank, process in self.processes.items():
            if process.is_hung and process.is_alive and not self.unheard[rank]:
                self.hear(recovery.RankHung(rank=rank, pid=process.pid, boundary=process.boundary, at_s=0.0))

    @property
    def hung(self) -> tuple[int, ...]:
        """Ranks that live and hang."""
        return tuple(rank for rank, process in self.processes.items() if process.is_alive and process.is_hung)

    def flip_bit(self, rank: int) -> None:
        """The weights of one rank are not what they should be."""
        self.processes[rank].weights += "-flipped"

    def train(self) -> None:
        """All ranks pass the commit barrier, if all are there."""
        absent = {*self.finished, *self.job.away}
        training = [process for rank, process in self.processes.items() if rank not in absent]
        is_any_still = self.job.phase not in (JobPhase.RUNNING, JobPhase.RESUMING)
        if is_any_still or not all(one.is_alive and one.is_whole and not one.is_stuck for one in training):
            return
        for process in training:
            process.boundary += 1

    def say(self, rank: int, event: Event) -> None:
        """A rank says something, if it can."""
        if self.processes[rank].is_alive and not self.processes[rank].is_stuck:
            self.unheard[rank].append(event)

    # What the machine hears

    def hear_from(self, rank: int) -> None:
        """The machine hears the oldest thing that a rank has said."""
        if self.unheard[rank]:
            self.hear(self.unheard[rank].popleft())

    def hear_agent(self) -> None:
        """The machine hears the oldest thing that the agent has to say."""
        if not self.agent_unheard:
            return
        event = self.agent_unheard.popleft()
        if isinstance(event, recovery.GroupRestarted):
            self.start_all()
        self.hear(event)

    def hear(self, event: Event) -> None:
        """The machine answers one event; its orders are carried out."""
        self.at_s += 1.0
        event = replace(event, at_s=self.at_s)
        before = self.job
        if isinstance(event, RankFaulted) and self.processes[event.rank].pid == event.pid:
            self.processes[event.rank].begin_anew(self.weights_of(event.rank))
        self.job, actions = advance(before, event)
        if isinstance(event, recovery.CheckpointAsked) and before.phase is JobPhase.RUNNING:
            self.awaits_checkpoint = True
        if isinstance(event, recovery.StatePersisted) and self.job is not before:
            self.awaits_checkpoint = False
        self.echoes.append(event)
        for action in actions:
            self.obey(action)

    def hear_echo(self, choice: int) -> None:
        """The machine hears again something of an older generation or of a process that has ended: nothing happens."""
        stale = [event for event in self.echoes if self.is_stale(event)]
        if not stale:
            return
        after, actions = advance(self.job, stale[choice % len(stale)])
        assert after is self.job
        assert actions == ()

    def is_stale(self, event: Event) -> bool:
        """The event can only be an echo."""
        if isinstance(event, RepairEvent | recovery.DeadlinePassed | recovery.ConnectionBroken):
            return event.generation < self.job.generation
        is_of_process = isinstance(event, RankExited | recovery.RankHung | RankFaulted)
        return is_of_process and event.pid != self.job.members[event.rank].pid

    @property
    def is_reported_to_end(self) -> bool:
        """Somebody has asked that the job end."""
        return any(isinstance(event, StopAsked) for event in self.echoes)

    # What the machine orders

    def obey(self, action: Action) -> None:
        """Carry out an order."""
        match action:
            case recovery.SetDeadline(name=name, after_s=after_s):
                self.limits[name] = after_s
            case to_rank.Freeze(ranks, generation, lost):
                assert ranks
                assert not {*ranks} & {*lost}
                assert not self.job.finished
                assert generation > self.newest_generation
                self.newest_generation = generation
                for rank in ranks:
                    self.say(rank, self.frozen(rank, generation))
            case SpawnRank(rank, generation):
                assert not self.is_reported_to_end
                assert generation == self.job.generation
                assert not self.processes[rank].is_alive
                if self.has_room:
                    self.start(rank)
                else:
                    self.agent_unheard.append(SpawnFailed(rank=rank, reason="no memory", at_s=0.0))
            case ParkRank(rank):
                self.parked[rank] = self.processes[rank]
                self.processes[rank] = Process(0, is_alive=False)
            case TakeBack(rank, pid):
                assert pid == self.parked[rank].pid
                self.kill(rank)
                self.processes[rank] = self.parked.pop(rank)
            case recovery.LetNodeGo(ranks):
                for rank in ranks:
                    self.kill(rank)
            case KillRank(rank, reason):
                assert reason
                assert self.job.members[rank].pid is None
                self.kill(rank)
            case Replay(rank, generation, boundary, source):
                if source is None:
                    assert boundary == self.stored_boundary
                else:
                    self.check_source(source, boundary)
                    assert self.weights_of(source) == self.weights_of(rank)
                assert not self.processes[rank].has_orders
                self.processes[rank].has_orders = True
                self.processes[rank].boundary = boundary
                self.say(rank, RankReplayed(rank=rank, generation=generation, boundary=boundary, at_s=0.0))
            case to_rank.SendState(source, to, generation, boundary):
                self.check_source(source, boundary)
                self.send_state(source, to, generation, boundary)
            case Rewind(ranks, boundary, place):
                assert place == f"step-{boundary}" if place else boundary == self.snapshot_boundary
                assert place not in self.unusable
                self.stored_boundary = boundary
                alive = [self.processes[rank] for rank in ranks if self.processes[rank].is_alive]
                assert not any(process.is_whole or process.has_orders for process in alive)
            case to_rank.LoadState(ranks, generation, boundary):
                self.load_state(ranks, generation, boundary)
            case recovery.Persist(ranks, generation, boundary):
                assert boundary > 0
                assert ranks == self.job.survivors
                boundaries = {self.processes[rank].boundary for rank in ranks} or {self.snapshot_boundary}
                assert boundaries == {boundary}
                persisted = recovery.StatePersisted(
                    generation=generation, place=f"step-{boundary}", is_handled=self.handles_stop, at_s=0.0
                )
                self.agent_unheard.append(persisted)
            case recovery.NoteUnusable(place, reason, is_refused):
                assert reason
                if is_refused:
                    self.unusable.add(place)
            case recovery.GiveUpCheckpoint(_, reason):
                assert reason
                self.awaits_checkpoint = False
            case to_rank.Resume(ranks, generation, boundary):
                self.resume(ranks, generation, boundary)
            case recovery.RestartGroup(reason):
                assert not self.is_reported_to_end
                assert reason
                self.restart_group()
            case recovery.FailJob(reason):
                assert reason
            case recovery.RecordIncident(incident):
                assert incident.reason
                self.check_number(incident)
                assert incident.attempt <= self.job.settings.max_attempts
                self.closed += [] if incident.outcome == "open" else [incident]
                self.parked = {} if incident.outcome == "recovered" else self.parked

    def check_number(self, incident: Incident) -> None:
        """One incident follows the other."""
        assert incident.id == len(self.closed) + 1

    def frozen(self, rank: int, generation: int) -> Event:
        """A survivor's answer."""
        process = self.processes[rank]
        process.agreed_digest = process.digest
        return RankFrozen(
            rank=rank,
            generation=generation,
            boundary=process.boundary,
            digest=process.digest,
            has_group=True,
            at_s=0.0,
        )

    def check_source(self, source: int, boundary: int) -> None:
        """State comes only from a rank that is whole and stands at the boundary."""
        assert self.job.members[source].life is not recovery.RankState.LOST
        assert self.processes[source].is_whole
        assert self.processes[source].boundary == boundary

    def send_state(self, source: int, to: tuple[int, ...], generation: int, boundary: int) -> None:
        """The source sends, and each replacement loads, if both live."""
        assert to
        assert all(self.job.members[rank].life is recovery.RankState.LOST for rank in to)
        assert {self.weights_of(rank) for rank in to} == {self.weights_of(source)}
        assert all(self.processes[rank].boundary == boundary for rank in to)
        if not self.processes[source].is_alive or self.processes[source].is_stuck:
            return
        sent = self.processes[source]
        self.say(source, StateSent(rank=source, generation=generation, digest=sent.digest, at_s=0.0))
        for rank in to:
            loaded = self.processes[rank]
            if loaded.is_hung:
                continue
            loaded.weights = sent.weights
            loaded.agreed_digest = loaded.digest
            self.say(rank, RankRepaired(rank=rank, generation=generation, digest=loaded.digest, at_s=0.0))

    def load_state(self, ranks: tuple[int, ...], generation: int, boundary: int) -> None:
        """Each rank loads what the snapshot holds."""
        assert ranks == self.job.lost
        assert boundary == self.stored_boundary
        for rank in ranks:
            process = self.processes[rank]
            assert process.boundary == boundary
            process.weights = self.weights_of(rank)
            process.agreed_digest = process.digest
            self.say(rank, RankRepaired(rank=rank, generation=generation, digest=process.digest, at_s=0.0))

    def take_snapshot(self) -> None:
        """All that train stand at one boundary, and write what they hold."""
        boundaries = {process.boundary for process in self.processes.values()}
        is_known = all(member.pid is not None for member in self.job.members)
        if self.job.phase is JobPhase.RUNNING and is_known and len(boundaries) == 1 and boundaries != {0}:
            (self.snapshot_boundary,) = boundaries
            self.hear(recovery.SnapshotTaken(boundary=self.snapshot_boundary, at_s=0.0))

    def resume(self, ranks: tuple[int, ...], generation: int, boundary: int) -> None:
        """All go on, and from the same boundary."""
        assert {*ranks} == {*self.job.survivors, *self.job.lost}
        assert all(self.job.members[rank].pid is not None for rank in ranks)
        alike = ranks if boundary > 0 else self.job.survivors
        if self.job.incident is not None:  # else it was for a checkpoint, which leaves all as they were
            for group in range(self.replica_groups):
                of_group = [rank for rank in alike if rank % self.replica_groups == group]
                assert len({self.processes[rank].agreed_digest for rank in of_group}) <= 1
        for rank in ranks if self.job.away else ():
            assert self.replicas_of(rank).whole_copy(ranks) is not None
            assert len({*self.replicas_of(rank).ranks} & {*ranks}) == len(ranks) // self.tensor_parallel
        is_complete = not any(self.processes[rank].is_stuck for rank in ranks)
        for rank in ranks:
            assert self.processes[rank].boundary == boundary
            self.processes[rank].is_whole = True
            self.say(rank, RankRebuilt(rank=rank, generation=generation, at_s=0.0))
            if is_complete:  # else they wait for each other in a collective
                self.say(rank, RankReissued(rank=rank, generation=generation, at_s=0.0))

    def kill(self, rank: int) -> None:
        """End a process: nothing that it has said is heard any more, but for its exit."""
        self.end(rank, None, 9, is_script_error=False, is_mute=True)
        self.unheard[rank] = deque(event for event in self.unheard[rank] if isinstance(event, RankExited))

    def restart_group(self) -> None:
        """End all processes; they are started anew if a restart is left. A second order meanwhile changes nothing."""
        if any(isinstance(event, recovery.GroupRestarted | StopAsked) for event in self.agent_unheard):
            return
        for rank in self.unheard:
            self.kill(rank)
        self.restarts -= 1
        is_left = self.restarts >= 0
        no_restart = StopAsked(reason="no restart is left", at_s=0.0)
        self.agent_unheard.append(recovery.GroupRestarted(at_s=0.0) if is_left else no_restart)

    # How it ends

    def settle(self) -> None:
        """Let everything be heard that has been said; what then still waits meets its deadline."""
        for _ in range(1000):
            if self.hear_next():
                continue
            if self.job.phase is JobPhase.RUNNING and self.hung:
                self.see_hung()
            elif self.job.phase in SETTLED:
                return
            else:
                is_halting = self.job.phase is JobPhase.PERSISTING and self.job.persists_at is None
                self.waited_s += self.limits[HALT if is_halting else DEADLINE_NAMES[self.job.phase]]
                self.pass_deadline()
        raise AssertionError(f"the job does not settle: {self.job}")

    def hear_next(self) -> bool:
        """The oldest thing of each rank and of the agent; False if there was none."""
        is_any = any([*self.unheard.values(), self.agent_unheard])
        for rank in self.unheard:
            self.hear_from(rank)
        self.hear_agent()
        return is_any

    def pass_deadline(self, is_agent_blind: bool = False) -> None:
        """The deadline of the present phase is over, whatever it is.

        is_agent_blind   the agent does not see who hangs
        """
        generation = self.job.generation
        silent = () if is_agent_blind else self.hung
        for name in ("freeze", "replay", "transfer", "resume", "halt", "persist", "drain"):
            self.hear(recovery.DeadlinePassed(generation=generation, name=name, silent=silent, at_s=0.0))

    def break_connections(self, is_echo: bool, rank: int | None) -> None:
        """A rank says that its connections are broken, or that its device says so."""
        generation = max(0, self.job.generation - is_echo)
        boundary = max(process.boundary for process in self.processes.values())
        fields: dict[str, Any] = {} if rank is None else {"rank": rank, "device_fault": "link"}
        broken = recovery.ConnectionBroken(generation=generation, boundary=boundary, reason="reset", at_s=0.0, **fields)
        self.hear(broken)
