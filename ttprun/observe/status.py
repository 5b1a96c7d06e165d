"""How a run stands: the form of `status.json`, which `agent/launcher/status_publisher.py` writes and anybody may read.

The JSON is the dataclasses below, field for field. It is stable: fields are added, never renamed or removed. Times in
`*_s` are seconds; `*_at` are ISO 8601 in UTC; null means "not known" or "did not happen". Begin with `RunStatus`.

`topology.json` says who holds what, for `ttprun topology`. The names follow ColossalAI's process group mesh: the group
tp0 is the first one along the dimension tp.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ttprun.observe.run_directory import replace_file

RunState = Literal["starting", "healthy", "recovering", "restarting", "done", "stopped", "failed"]
logger = logging.getLogger(__name__)
_MORE_BUSY = 0.2  # than the others: chance alone does not make it in so many looks
_LONGEST_S = 1e10  # of any time in a status; some 300 years

BEING_PREPARED, IMPORTS_FOLLOW = "being prepared", "the ranks' other imports follow"  # a standby
ENDED: frozenset[str] = frozenset({"done", "stopped", "failed"})


@dataclass(frozen=True)
class RankStatus:
    """One rank.

    pid          of the process that is this rank now; null between a loss and its replacement
    state        a word for people: starting, running, replaying, repairing, lost, finished, away
    step         optimizer steps done (the boundary it has passed)
    phase        what its main thread does, null if not known
    last_seen_s  seconds from its last sign of life to `updated_at`
    protection   on: a fault of it can be repaired, since its hooks have been heard in this process, it has passed an
                 optimizer step under them, and what it has recorded could be read back; not yet: not so far; off: it
                 cannot be
    node         number of its node, as in the run's `nodes`; there alone its pid can be looked up
    busy         of late, the share of looks at which it did not wait for other ranks, nor was in a collective: the rank
                 that holds the others up has the highest; null if too little was seen
    """

    rank: int
    local_rank: int
    pid: int | None
    state: str
    step: int | None = None
    phase: str | None = None
    last_seen_s: float | None = None
    protection: str = "not yet"
    node: int = 0
    busy: float | None = None


@dataclass(frozen=True)
class IncidentStatus:
    """One fault and all that followed from it.

    id          from 1, in the order in which they began
    kind        what happened first: "signal 9", "exit 1", "exception", "hang", "connection", ...
    ranks       the ranks that were lost; none if only connections broke
    rung        the rung of the ladder that was tried last: reconnect, replace, restart, ...
    outcome     open, recovered (a step has been completed since), restarted or failed
    reason      why this rung, or why not a better one; a sentence
    *_s         what each phase took; null for one that was not reached. spawn_s begins with freeze_s, the others follow
                one another: replay_s begins when both are over
    steps_lost  optimizer steps that have to be run again; null if nobody has counted them
    boundary    the boundary from which everyone went on
    equal       what of the replacements was compared with the lost ranks, and found equal
    not_proved  what of the replaced ranks can change and is in no record: they have it as the script's set-up makes it;
                and what could not be compared, or need not be equal and was not
    had_standby  a standby was ready for each lost rank; null if none was needed
    setup_s      what the script's own set-up took of the replay: imports, device, model, data, the first forward pass
    first_step_s  from the end of the incident until all ranks had completed a step, and this was seen
    reason_kind  the kind of that reason, for `ttprun explain`; "" if it has none
    why         the reason alone, as it was first given
    """

    id: int
    kind: str
    ranks: tuple[int, ...]
    rung: str | None = None
    outcome: str = "open"
    reason: str = ""
    detect_s: float | None = None
    freeze_s: float | None = None
    spawn_s: float | None = None
    replay_s: float | None = None
    transfer_s: float | None = None
    rebuild_s: float | None = None
    reissue_s: float | None = None
    total_s: float | None = None
    steps_lost: int | None = None
    boundary: int | None = None
    equal: tuple[str, ...] = ()
    not_proved: tuple[str, ...] = ()
    reason_kind: str = ""
    why: str = ""
    had_standby: bool | None = None
    setup_s: float | None = None
    first_step_s: float | None = None


@dataclass(frozen=True)
class CostStatus:
    """What protection takes of a step without a fault: averages of this node's ranks.

    step_s   from one optimizer step to the next
    parts    seconds of the thread that trains, for each part: record, commit, collectives, data, copies, checks
    """

    step_s: float
    parts: dict[str, float]

    @property
    def taken_s(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class CheckpointStatus:
    """The newest checkpoint of a run, or the newest attempt at one.

    number      1 for the run's first
    boundary    optimizer steps that it holds; 0 if unknown, since it was not written
    cause       periodic, asked, ended (the user has ended the job) or dying gasp (it could not continue)
    path        its directory; "" if none was written
    bytes       size of all its files
    took_s      from the order to its being valid
    reason      why nothing can go on from it; "" if it is valid
    """

    number: int
    boundary: int
    cause: str
    written_at: str
    path: str = ""
    bytes: int = 0
    took_s: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class ResumeStatus:
    """How a run has gone on from what an earlier one had saved.

    boundary  optimizer steps that were done; 0: no checkpoint could be used, and it has begun anew
    outcome   open, recovered or failed
    reason    which checkpoint was found, and why others were not used
    total_s   from the launch of the ranks until all trained; null until then
    """

    boundary: int | None
    outcome: str
    reason: str
    total_s: float | None = None


@dataclass(frozen=True)
class RunStatus:
    """One run, as its agent sees it.

    state          starting, healthy, recovering, restarting, done, stopped (Ctrl-C, or another signal to a launcher) or
                   failed
    generation     number of the communicator set; +1 whenever connections are rebuilt
    restarts_left  whole-group restarts that may still happen
    standbys       processes that stand ready now
    standby_state  how they stand, in words; "" if none are wanted
    protection     "on"; "not yet: ..." until all ranks have passed a step under their hooks; "being checked: ..." until
                   what they have recorded was read back; or why a lost rank cannot be replaced, or when not
    exit_code      of the launcher; null while the run lives
    checkpoint     the newest one, null if there was none
    resume         how it has gone on from a checkpoint, null if it has begun at the top of the script
    snapshot_step  boundary of the snapshot in shared memory to which all ranks can go back, null if there is none
    cost           what protection takes of a step, null while nothing was measured
    save_dir       directory of the run's checkpoints
    not_proved     what of the ranks' variables can change and is in no record, by name, type and reason
    away           ranks without which the others train on
    reason         why the run is in this state, "" if that needs no words
    host           where the agent runs; only there can its pid be looked up
    nodes          addresses of the job's nodes, by number; none if there is one node
    node           number of the agent's own node
    is_leading     the agent decides for all nodes; on the others the status is as it published it last
    leader         number of the node whose agent decides
    pages          where each node's launcher shows the job to other machines (--http), by number, "" for one that does
                   not; none if no launcher does
    lost_nodes     numbers of nodes that are lost, and whose slots nobody has taken yet
    spares         addresses of launchers that wait for slots, the one that has waited longest first
    quarantine     addresses whose nodes were lost, and which must wait before they may train again
    reason_kind    the kind of `reason`, or else of what `protection` says, for `ttprun explain`; "" if it has none
    protection_kind   of what `protection` says alone
    version        of this form; it stays 1 as long as fields are only added
    """

    run_id: str
    state: RunState
    generation: int
    world_size: int
    agent_pid: int
    started_at: str
    updated_at: str
    restarts_left: int = 0
    standbys: int = 0
    standby_state: str = ""
    protection: str = "on"
    exit_code: int | None = None
    ranks: tuple[RankStatus, ...] = ()
    incidents: tuple[IncidentStatus, ...] = ()
    checkpoint: CheckpointStatus | None = None
    resume: ResumeStatus | None = None
    snapshot_step: int | None = None
    cost: CostStatus | None = None
    save_dir: str | None = None
    away: tuple[int, ...] = ()
    not_proved: tuple[str, ...] = ()
    reason: str = ""
    host: str = field(default_factory=lambda: os.uname().nodename)
    nodes: tuple[str, ...] = ()
    node: int = 0
    is_leading: bool = True
    leader: int = 0
    pages: tuple[str, ...] = ()
    lost_nodes: tuple[int, ...] = ()
    spares: tuple[str, ...] = ()
    quarantine: tuple[str, ...] = ()
    reason_kind: str = ""
    protection_kind: str = ""
    version: int = 1

    @property
    def leaders_page(self) -> str:
        """Where the page of the node whose agent leads is, for who asks another one; "" if there is none."""
        return "" if self.is_leading or self.has_ended else dict(enumerate(self.pages)).get(self.leader, "")

    @property
    def step(self) -> int:
        """Optimizer steps that the job has done: those of the rank that is furthest; 0 at first."""
        return max((rank.step or 0 for rank in self.ranks), default=0)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will happen in this run."""
        return self.state in ENDED

    def to_json(self) -> str:
        """The documented JSON, on one line."""
        return json.dumps(self, default=vars)  # asdict() takes six times as long: 8 ms for 1,024 ranks


def state_at_end(exit_code: int, is_stopped: bool) -> RunState:
    """The last state of a run.

    exit_code    of the launcher
    is_stopped   it is that of a signal to a launcher
    """
    return "done" if exit_code == 0 else "stopped" if is_stopped else "failed"


def write_status(path: str | Path, status: RunStatus) -> bool:
    """Replace the file at once: a reader sees the old status or the new one, never a part of it.

    Never raises, since a full disk must not stop the job: it warns once, and returns whether the status was written.
    """
    try:
        replace_file(Path(path), status.to_json())
    except OSError as error:
        _warn_once(Path(path), error.strerror)
        return False
    return True


def read_status(path: str | Path) -> RunStatus:
    """Read what the agent wrote last. If that looks alive but the agent is dead, the state is "failed", with a reason.

    Raises OSError if there is no such file, ValueError if it is no status.
    """
    status = parse_status(Path(path).read_text(encoding="utf-8"))
    if status.has_ended or _is_agent_alive(status):
        return status
    # Ranks die with their agent (PR_SET_PDEATHSIG), so none of those on its node is what the file says.
    lost = tuple(
        rank if rank.state == "finished" or rank.node != status.node else replace(rank, state="lost")
        for rank in status.ranks
    )
    return replace(status, state="failed", reason="the agent was killed", ranks=lost, standbys=0, standby_state="")


def stragglers_of(status: RunStatus) -> tuple[tuple[int, ...], float | None]:
    """Ranks for which the others wait, the slowest first: their `busy` is much higher than the median, which follows.

    The median is None if too little was seen.
    """
    busy = {rank.rank: rank.busy for rank in status.ranks if rank.busy is not None}
    if len(busy) < 2:
        return (), None
    usual = median(busy.values())
    slow = sorted(busy.items(), key=lambda item: -item[1])
    return tuple(rank for rank, share in slow if share > usual + _MORE_BUSY), usual


def parse_status(text: str) -> RunStatus:
    """The status of which `to_json` gave this; fields that this version does not know are left out.

    Raises ValueError if it is something else.
    """
    try:
        status = _adapter().validate_json(text)
        for moment in (status.started_at, status.updated_at):
            datetime.fromisoformat(moment).timestamp()
        costs = () if status.cost is None else (status.cost,)
        for part in (status, *status.ranks, *status.incidents, *costs):
            for name, value in vars(part).items():
                if isinstance(value, float) and not abs(value) < _LONGEST_S:
                    raise ValueError(f"{name} is {value}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"it is not the status of a run: {where[:80]}: {first['msg'][:80]}") from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"it is not the status of a run: {str(error)[:160]}") from None
    return status


def describe_cost(cost: CostStatus) -> str:
    """A line: what protection takes of a step, the largest part first."""
    parts = sorted(cost.parts.items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {spent_s * 1e3:.2f}" for name, spent_s in parts if spent_s >= 5e-6)
    share = cost.taken_s / cost.step_s if cost.step_s else 0.0
    return f"protection takes {cost.taken_s * 1e3:.2f} ms of a step of {cost.step_s * 1e3:.1f} ms ({share:.1%})" + (
        f": {named}" if named else ""
    )


def describe_protection(protection: str) -> str:
    """What `RunStatus.protection` says, as a sentence for people."""
    word, _, why = protection.partition(": ")
    words = {"on": "protected", "on, but": "protected, but", "off": "not protected", "not yet": "not protected yet"}
    if protection.startswith("on, but "):
        return f"protected, but {protection.removeprefix('on, but ')}"
    return f"{words.get(word, f'protection: {word}')}{': ' if why else ''}{why}"


@cache
def _adapter() -> TypeAdapter[RunStatus]:
    return TypeAdapter(RunStatus)


@cache
def _warn_once(target: Path, reason: str | None) -> None:
    logger.warning("the status is not written to %s (%s); the job continues", target, reason)


def _is_agent_alive(status: RunStatus) -> bool:
    """Whether the process that wrote `status` still runs; on another host this is unknown, and assumed."""
    if status.host != os.uname().nodename:
        return True
    try:
        stat = Path(f"/proc/{status.agent_pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    # The name, in parentheses, may hold spaces; after it: state, then start time as the 20th field.
    after_name = stat.rpartition(")")[2].split()
    if after_name[0] in "ZX":
        return False
    uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    age_s = uptime_s - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    silent_s = datetime.now().timestamp() - datetime.fromisoformat(status.updated_at).timestamp()
    # A process that is younger than the file has only got the agent's number. A second of grace for the clocks.
    return age_s + 1 > silent_s


StateSource = Literal["peer", "buddy", "snapshot", "checkpoint", "restart"]


@dataclass(frozen=True)
class RankTopology:
    """One rank.

    coordinates   dimension -> its place in its group there
    replicas      index of its group in the topology's `replicas`
    loss          where a replacement would get what it held: peer: from one of that group; buddy: from the mirror
                  that it keeps in shared memory; snapshot: all ranks go back to the newest one; restart: all ranks
                  start again, from a checkpoint or from what the script has saved
    mirror_bytes  memory of the node that its mirror takes; 0: it keeps none
    source        the rank from which a replacement would get it; the rank itself: from its mirror; None: from none
    why           it is not replaced without a lost step, a sentence; "": it is
    """

    rank: int
    coordinates: dict[str, int]
    replicas: int
    loss: StateSource
    mirror_bytes: int = 0
    source: int | None = None
    why: str = ""


@dataclass(frozen=True)
class ShardedParameters:
    """Parameters that are held in the same way, and not alike by all ranks.

    holders   of each part, the ranks that hold it
    """

    names: tuple[str, ...]
    holders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """Who holds what in a run.

    boundary   step before which the ranks were compared
    groups     name -> ranks of each process group of some of the ranks: dp0, dp1, tp0, ...
    replicas   ranks that hold the same, group by group
    unequal    names of the parameters that not all ranks hold alike
    parts      who holds which part of these
    """

    boundary: int
    groups: dict[str, tuple[int, ...]]
    replicas: tuple[tuple[int, ...], ...]
    unequal: tuple[str, ...]
    ranks: tuple[RankTopology, ...]
    parts: tuple[ShardedParameters, ...] = ()

    def peers(self, rank: int) -> tuple[int, ...]:
        """The other ranks that hold all that this one holds."""
        return tuple(other for other in self.replicas[self.ranks[rank].replicas] if other != rank)

    def one_of_each_coordinate(self) -> list[int]:
        """Rank 0, the last one, and as few others as it takes to have each place of each dimension and each part."""
        places = [{*rank.coordinates.items(), ("", rank.replicas)} for rank in self.ranks]
        chosen = [*{0: None, len(places) - 1: None}]
        missing = set().union(*places).difference(*(places[rank] for rank in chosen))
        while missing:
            chosen.append(max(range(len(places)), key=lambda rank: len(places[rank] & missing)))
            missing -= places[chosen[-1]]
        return chosen

    def to_json(self) -> str:
        """One JSON document on one line."""
        return json.dumps(asdict(self))


def read_topology(path: Path) -> Topology:
    """What was written last. Raises OSError if there is no such file, ValueError if it is something else."""
    try:
        return TypeAdapter(Topology).validate_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not the topology of a run: {' '.join(str(error).split())[:200]}") from error
