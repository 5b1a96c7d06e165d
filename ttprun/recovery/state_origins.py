"""Where ranks get their state from. Pure. Begin with `from_others` and `plan`.

Of a lost rank's replacement `from_others` says it, which `repair.py` and `ladder.py` ask; of all ranks that go back, or
of one that is alone, `plan`. A new place is a `Place` here, a `StateSource` in `observe/status.py`, and is opened by
`agent/lead/repairs.py`.

A rank gets it from another rank that holds the same, from the mirror that it keeps of what it alone holds, from memory
that outlives the processes (a snapshot; of a rank that is alone, its own newest state), from a checkpoint, or it begins
the script anew. To replace, rerun, rewind, restart or resume is what a plan comes to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Literal, NamedTuple

from ttprun.protocol.reason import Reason
from ttprun.recovery.job import Job
from ttprun.recovery.job_events import Saved, name_ranks
from ttprun.recovery.members import RankState

NO_REPLACEMENT = Reason("switched-off", "replacement is switched off (rungs)")
NOTHING_LEFT = Reason("no-survivor", "nothing of its state is left")
_RESTARTS = "use --max-restarts N to start again from the top"


ANEW = Saved(0)


# What gives the state, in the order of what it costs: another rank, or the lost one's mirror, at the boundary at which
# all quiesce; memory, or a checkpoint, at an older boundary; nothing, so that the script begins anew.
Place = Literal["peer", "buddy", "snapshot", "checkpoint", "restart"]


class Origin(NamedTuple):
    """Where one rank's state comes from.

    stored   what ranks go back to; of a peer or a mirror nothing: they give the boundary at which the others quiesce
    source   the rank that gives it; of a mirror, the rank itself; None: it is stored
    why      no better way was possible; none if this is the best
    """

    place: Place
    stored: Saved = ANEW
    source: int | None = None
    why: Reason = Reason()


FROM_TOP = Origin("restart", ANEW)


class Refusal(NamedTuple):
    """Ranks get no state in the ways that were asked for; why not names what would have been needed."""

    why: Reason


Plan = dict[int, Origin] | Refusal  # by rank


def plan(
    job: Job,
    holdings: Iterable[Origin],
    rungs: frozenset[str],
    among: Collection[int] = (),
    ranks: Collection[int] | None = None,
) -> Plan:
    """Where each rank that needs state gets it from, by the cheapest way that is possible.

    holdings   what ranks could go back to, the best first
    rungs      ways of recovery that may be used
    among      ranks that could give theirs to the lost ones; (): none is replaced
    ranks      that are lost; None: those that are

    returns    an origin for each lost rank, or one stored state for all that go back to it
    """
    why = Reason()
    if among:
        is_on = not rungs.isdisjoint(("replace", "rerun"))
        given = from_others(job, job.lost if ranks is None else ranks, among) if is_on else Refusal(NO_REPLACEMENT)
        if not isinstance(given, Refusal):
            return given
        why = given.why
    for origin in holdings:
        why_not = why_not_back_to(job, origin, rungs)
        if not why_not:
            return dict.fromkeys(who_goes_back(job), origin._replace(why=why))
        why = why or why_not
    return Refusal(why or NOTHING_LEFT)


def if_lost(job: Job, alike: Iterable[Collection[int]]) -> dict[int, Origin]:
    """What becomes of the loss of each rank, while all others live.

    alike   ranks that hold the same, together
    """
    rungs, size, losses = job.settings.rungs, len(job.members), dict[int, Origin]()
    back = plan(job, (*in_memory(job), FROM_TOP), rungs)
    for peers, rank in ((ranks, rank) for ranks in alike for rank in ranks):
        others = [other for other in (*peers, rank - 1, rank + 1) if other != rank and 0 <= other < size]
        given = plan(job, (), rungs, others[:1], (rank,))
        otherwise = FROM_TOP if isinstance(back, Refusal) else back[rank]
        losses[rank] = otherwise._replace(why=given.why) if isinstance(given, Refusal) else given[rank]
    return losses


def from_others(job: Job, ranks: Collection[int], among: Collection[int]) -> Plan:
    """Each of these ranks gets its state from another one that has always held the same, else from its own mirror.

    among   ranks that could be sources: the lowest one that holds the same is
    """
    if job.settings.are_replicas_declared:  # the framework finds the sources itself
        return {rank: Origin("peer", source=first) for first in islice(among, 1) for rank in ranks}
    replicas = job.replicas
    peers = {} if replicas.has_collective_steps else replicas.sources(ranks, among)
    alone = tuple(rank for rank in ranks if rank not in peers and rank not in replicas.mirrored)
    if alone and replicas.has_collective_steps:
        said = f"the optimizer communicates inside step(), and the state of {name_ranks(alone)} is not mirrored"
        return Refusal(Reason("state-of-one-rank", said))
    if alone:
        return Refusal(replicas.why_no_source(alone[0], among))
    mirrors = {rank: Origin("buddy", source=rank) for rank in ranks if rank not in peers}
    return mirrors | {rank: Origin("peer", source=source) for rank, source in peers.items()}


def why_no_source(job: Job, ranks: Collection[int], among: Collection[int]) -> Reason:
    """Why some of these ranks could not be repaired from others, or from their own mirrors; "" if all can."""
    given = from_others(job, ranks, among)
    return given.why if isinstance(given, Refusal) else Reason()


def in_memory(job: Job) -> list[Origin]:
    """What outlives the ranks' processes, except their mirrors."""
    return [Origin("snapshot", saved) for saved in job.in_memory]


def on_disk(job: Job) -> list[Origin]:
    """The checkpoints from which all can resume, in the order of preference."""
    return [Origin("checkpoint", saved) for saved in job.saved]


def may_rewind(job: Job) -> bool:
    """Whether ranks can go back to a snapshot."""
    snapshots = (origin for origin in in_memory(job) if not origin.stored.is_own)
    return isinstance(plan(job, snapshots, job.settings.rungs), dict)


def why_not_back_to(job: Job, origin: Origin, rungs: frozenset[str]) -> Reason:
    """Why all ranks, or one that is alone, cannot go back to what is stored; "" if they can."""
    is_alone, steps = job.settings.is_alone, steps_reached(job)
    has_others = job.settings.world_size > 1
    if origin.place == "snapshot":
        if job.unprotected_reason or job.finished:
            return job.unprotected_reason or Reason("ranks-have-finished", f"{name_ranks(job.finished)} has finished")
        boundary = origin.stored.boundary
        is_free = is_alone and boundary >= steps
        if ("replace" if is_free else "rewind") in rungs:
            return Reason()
        return Reason("switched-off", f"going back to its step {boundary} is switched off (rungs)")
    if origin.place == "checkpoint":
        if job.count("without node") and not job.settings.is_elastic:
            return Reason("no-survivor", "some rank has no node on which it could resume")
        said = "resuming from what is saved is switched off (rungs)"
        return Reason() if rungs >= {"restart", "persist"} else Reason("switched-off", said)
    if job.is_resumed:
        said = "--resume auto takes another, --resume off starts anew"
        return Reason() if job.settings.begins_anew else Reason("stored-state-unusable", said)
    if is_alone and job.lost and (has_others or not steps):
        if has_others and any(member.has_joined for member in job.replacements):  # it would wait for them for ever
            said = f"{NOTHING_LEFT}, and it cannot start anew: the others made a process group with it before"
            return NOTHING_LEFT.within(said)
        return Reason() if ("rewind" if steps else "replace") in rungs else NOTHING_LEFT
    return why_no_restart(job) if "restart" in rungs else NOTHING_LEFT


def why_no_restart(job: Job) -> Reason:
    """Why the script cannot be started from its top again; "" if it can."""
    if "restart" not in job.settings.rungs:
        return Reason("switched-off", "restarting the group is switched off (rungs)")
    if job.settings.max_restarts is not None and job.restarts >= job.settings.max_restarts:
        limit = job.settings.max_restarts
        said = f"--max-restarts {limit} is used up" if limit else f"--max-restarts is 0; {_RESTARTS}"
        return Reason("no-restart-left", said)
    return Reason()


def who_goes_back(job: Job) -> list[int]:
    """All ranks, or the one that is alone."""
    return [member.rank for member in job.members if not job.settings.is_alone or member.life is not RankState.AWAY]


def steps_reached(job: Job) -> int:
    """Optimizer steps that lost ranks had completed when the fault came, as far as it is known."""
    reached = [fault.boundary for fault in job.faults] if job.stood_at is None else [job.stood_at]
    return max(reached, default=0)
