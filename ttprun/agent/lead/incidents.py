"""The incidents of a run, and what keeps lost ranks from being repaired: kept, and said once.

An incident is shown as recovered once a step has been completed after it: until then the same fault may come back. What
the ranks hold that can change and is in no record is named after the first step, and with each incident (`NotProved`);
whatever keeps ranks from being repaired, when they report it (`Protection`).
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace

from msgspec import structs

from ttprun import recovery
from ttprun.agent.lead.rows import Lead, Row
from ttprun.observe.status import IncidentStatus, ResumeStatus
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field
from ttprun.protocol.reason import Reason
from ttprun.recovery import Incident, is_of_script
from ttprun.tensors.own_state import CHEAP_S, SHARE

logger = logging.getLogger("ttprun")
COST_OF_UNRECORDED = "If a rank is lost before the first loss of its step, it is not replaced"
_REPLAYED_BY_ALL = frozenset({"rewind", "restart", "resize"})
_VARIABLE = re.compile(r"(?:rank \d+: )?(?:a key of )*((?:[\w.<>]+: )*\w+)(?=[.\[]| \()")


def grouped(sentences: Iterable[str]) -> list[str]:
    """Sentences that begin with a variable's path, for the console: of several about one variable, only the first."""
    groups: dict[str, list[str]] = {}
    for sentence in sentences:
        groups.setdefault(path[1] if (path := _VARIABLE.match(sentence)) else sentence, []).append(sentence)
    return [
        group[0] if len(group) == 1 else f"{variable}: {len(group)} things in it (ttprun status), such as {group[0]}"
        for variable, group in groups.items()
    ]


class NotProved:
    """What each rank has said, in its own words: "cache (sqlite3.Connection): it is in a file"."""

    def __init__(self) -> None:
        self._of_ranks: dict[int, tuple[Reason, ...]] = {}
        self._unrecorded: dict[int, tuple[Reason, ...]] = {}
        self.of_incidents: dict[int, tuple[str, ...]] = {}
        self._said: set[Reason] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all ranks, each name once."""
        return self._names_of(self._ranks)

    @property
    def unrecorded(self) -> tuple[Reason, ...]:
        """What of all ranks no replay could restore."""
        return tuple(
            dict.fromkeys(sentence for rank in sorted(self._unrecorded) for sentence in self._unrecorded[rank])
        )

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._of_ranks.keys() | self._unrecorded.keys()))

    def take(self, rank: int, sentences: tuple[Reason, ...], is_unrecorded: bool = False) -> None:
        """A rank has met such objects; the console gets each once.

        is_unrecorded   it could not restore them
        """
        (self._unrecorded if is_unrecorded else self._of_ranks)[rank] = sentences
        new = [sentence for sentence in sentences if sentence not in self._said]
        self._said.update(new)
        for name in [name for name in new if name.kind == "written-again"]:
            new.remove(name)
            logger.warning("if a rank is replaced: %s%s", name, name.pointer)
        if new:
            said = f"not proved: {'; '.join(grouped(map(str, new)))}"
            if is_unrecorded:
                logger.warning("%s%s. %s", said, new[0].pointer, COST_OF_UNRECORDED)
            else:
                logger.warning("%s; a replacement has these as the script's set-up makes them%s", said, new[0].pointer)

    def note_incident(self, incident: Incident) -> None:
        """An incident has gone on: what of its replays is not proved stays with it, whatever comes later."""
        ranks = self._ranks if incident.rung in _REPLAYED_BY_ALL else incident.ranks
        if incident.rung != "reconnect" and incident.outcome in ("open", "recovered"):
            self.of_incidents[incident.id] = self._names_of(ranks)

    def _names_of(self, ranks: tuple[int, ...]) -> tuple[str, ...]:
        listed = (names for rank in ranks for names in (self._of_ranks.get(rank, ()), self._unrecorded.get(rank, ())))
        return tuple(dict.fromkeys(str(name) for names in listed for name in names))


class Incidents:
    """All incidents of a run, and how it was resumed.

    resume      None if the run has begun from its top
    not_proved  what the ranks hold that is in no record
    changes     grows with each of the rarer changes, which are to be published at once
    """

    def __init__(self, node: Lead) -> None:
        self._node = node
        self._incidents: dict[int, Incident] = {}
        self._compared: dict[int, tuple[list[str], list[str]]] = {}  # incident -> what was equal, what is not proved
        self._parts: defaultdict[int, dict[str, float]] = defaultdict(dict)  # of what took how many seconds
        self.resume: ResumeStatus | None = None
        self.not_proved = NotProved()
        self.changes = 0
        self._said: set[tuple[int, Reason, str]] = set()
        self._unconfirmed: list[Incident] = []  # repaired, and no step has been completed since

    def note(self, incident: Incident) -> None:
        """An incident was opened, has gone on, or has ended; without a number it is the resume from a checkpoint."""
        has_steps = incident.boundary is not None and not self._node.config.mindio
        if incident.id and incident.outcome == "recovered" and incident.phase == "RUNNING" and has_steps:
            self._unconfirmed.append(incident)
            incident = replace(incident, outcome="open", total_s=None)
        if incident.outcome == "restarted":
            self.conclude(is_done=False)
        self._note(incident)

    def look(self) -> None:
        """Confirm what was repaired, if all ranks here have completed a step since, or have finished."""
        helped = [incident for incident in self._unconfirmed if self._has_helped(incident)]
        for incident in helped:
            ended_s = incident.opened_at_s - (incident.detect_s or 0.0) + (incident.total_s or 0.0)
            self._parts[incident.id]["first_step_s"] = time.monotonic() - ended_s
        self._confirm(helped)

    def _has_helped(self, incident: Incident) -> bool:
        node = self._node
        slots = [
            slot for slot in node.slots if slot.is_here and (slot.rank in incident.ranks or not node.job.are_alone)
        ]
        going = (slot.rank for slot in slots if not slot.is_finished and slot.rank not in node.job.away)
        return all(node.board.get(rank, Field.APPLIED) > (incident.boundary or 0) for rank in going)

    def conclude(self, is_done: bool) -> None:
        """The job is done, or has ended, or begins anew, before another step was completed."""
        self._confirm(self._unconfirmed, has_helped=is_done)

    def _confirm(self, incidents: list[Incident], has_helped: bool = True) -> None:
        self._unconfirmed = [incident for incident in self._unconfirmed if incident not in incidents]
        for incident in incidents:
            self._note(incident if has_helped else replace(incident, outcome="failed"))
            self.changes += 1

    def _note(self, incident: Incident) -> None:
        if not incident.id or (self.resume is not None and self.resume.outcome == "open"):
            self.resume = ResumeStatus(incident.boundary, incident.outcome, str(incident.reason), incident.total_s)
        if incident.id and incident.id not in self._incidents:
            self.changes += 1
        if incident.id:
            self._incidents[incident.id] = incident
        self.not_proved.note_incident(incident)
        not_proved = self._not_proved_of(incident.id)
        event = asdict(incident) | ({"not_proved": not_proved} if not_proved else {})
        if incident.total_s is not None:
            event["at_s"] = incident.opened_at_s - (incident.detect_s or 0.0) + incident.total_s
        self._node.log("incident" if incident.id else "resume", **event)
        self._say(incident, self._compared.get(incident.id, ([], []))[1])

    def _say(self, incident: Incident, uncompared: Sequence[str]) -> None:
        """Say on the console how an incident stands, and what of the replacements could not be compared."""
        name = f"incident {incident.id}, generation {incident.generation}" if incident.id else "resume"
        if incident.outcome == "open":
            what = _GIVEN_UP.get(incident.phase) or self._try_again(incident)
            is_new = what is not None and (incident.id, incident.reason, incident.phase) not in self._said
            self._said.add((incident.id, incident.reason, incident.phase))
            level = logging.WARNING if is_new else logging.INFO
            logger.log(level, "%s: %s: %s%s", name, incident.reason, what or incident.phase, incident.reason.pointer)
            return
        outcome = f"{incident.outcome} in {incident.total_s or 0.0:.2f} s"
        if incident.outcome != "recovered":
            # The reason is said where the ranks, or the job, are given up.
            who = ", ".join([incident.kind, *(f"rank {rank}" for rank in incident.ranks)])
            name = f"incident {incident.id} ({who})" if incident.id else name
            what = "gave up" if incident.outcome == "failed" else "all ranks start again"
            logger.warning("%s: %s after %.1f s, attempt %d", name, what, incident.total_s or 0.0, incident.attempt)
        elif incident.id:
            outcome += {True: " from a standby", False: " (no standby was ready)", None: ""}[incident.had_standby]
            outcome += f", {incident.steps_lost or 0} steps lost"
            outcome += f"; not proved: {'; '.join(grouped(uncompared))}" if uncompared else ""
            logger.warning("%s: %s: %s%s", name, incident.reason, outcome, incident.reason.pointer)
        elif incident.boundary:
            logger.warning("%s: resumed from step %d in %.2f s", name, incident.boundary, incident.total_s or 0.0)
        else:
            logger.warning("%s: no checkpoint can be used: the script starts anew", name)

    def _try_again(self, incident: Incident) -> str | None:
        """That a script's own error is answered by a new process, and which attempt this is; None otherwise."""
        job = self._node.job
        if incident.phase != "FREEZING" or not is_of_script(incident.kind) or not incident.ranks:
            return None
        rank, kind = incident.ranks[-1], incident.kind
        times = sum((fault.rank, fault.kind) == (rank, kind) for fault in job.faults)
        return f"trying again, {times + 1} of {job.settings.exception_retries + 1}"

    def note_setup(self, took_s: float | None) -> None:
        """A replacement has replayed; of that its script's own set-up took so long (None: it had none)."""
        parts = self._parts[max(self._incidents, default=0)]
        parts["setup_s"] = max(parts.get("setup_s", 0.0), took_s or 0.0)

    def note_compared(self, rank: int, equal: Sequence[str], not_proved: Sequence[str]) -> None:
        """A rank was compared with the one whose place it takes; its newest incident gets the result.

        equal        what was found equal, a noun each
        not_proved   what is not proved, a sentence each
        """
        newest = next((incident for incident in reversed(self._incidents.values()) if rank in incident.ranks), None)
        number = None if newest is None else newest.id
        self._node.log("compared", incident=number, rank=rank, equal=equal, not_proved=not_proved)
        if number is None:
            return
        compared = self._compared.setdefault(number, ([], []))
        for noted, new in zip(compared, (equal, not_proved), strict=True):
            noted += [sentence for sentence in (f"rank {rank}: {what}" for what in new) if sentence not in noted]
        self.changes += 1

    def published(self) -> tuple[IncidentStatus, ...]:
        """All of them, the oldest first."""
        return tuple(map(self._published, self._incidents.values()))

    def _published(self, incident: Incident) -> IncidentStatus:
        values = {name: getattr(incident, name) for name in _PUBLISHED}
        equal, _ = self._compared.get(incident.id, ((), ()))
        reason = incident.reason
        values |= {"reason": reason.text, "reason_kind": reason.kind, "why": reason.first or reason.text}
        values |= self._parts[incident.id]
        return IncidentStatus(**values, equal=tuple(equal), not_proved=self._not_proved_of(incident.id))

    def _not_proved_of(self, number: int) -> tuple[str, ...]:
        """What of an incident is not proved: objects that are in no record, and what could not be compared."""
        _, uncompared = self._compared.get(number, ((), ()))
        return (*self.not_proved.of_incidents.get(number, ()), *uncompared)


# No rank is replaced any more: a phase -> what is waited for, which may take long.
_GIVEN_UP = {
    "PERSISTING": "the ranks save their state before the job ends or starts again",
    "DRAINING": "no rank is replaced; ranks that can finish by themselves may do so",
}


_PUBLISHED = {field.name for field in fields(IncidentStatus)} & {field.name for field in fields(Incident)}


_MOST_RETURNS = 3  # of protection: a script may lose it in each epoch


class Protection:
    """Whether the ranks can be repaired.

    announced   why they cannot, as far as the console was told in this run
    """

    def __init__(self, node: Lead, announced: set[Reason]) -> None:
        self._node = node
        self._has_said_kept = False
        self._announced = announced
        self._returns = 0

    def note_unprotected(self, slot: Row, message: from_rank.RankUnprotected) -> None:
        """No rank can be repaired any more."""
        node = self._node
        node.log("rank_unprotected", rank=slot.rank, reason=message.reason)
        is_first = not node.job.unprotected_reason
        node.advance(message)
        if is_first:
            self._pass_on(slot)
            self._announce(slot, message.reason)

    def note_membership(self, slot: Row, message: from_rank.RankTrainsAlone | from_rank.RankJoined) -> None:
        """A rank trains alone, or with others; one that cannot be repaired may be of a group from now on."""
        is_first = not self._node.job.unprotected_reason
        self._node.advance(message)
        if is_first:
            self._pass_on(slot)

    def _pass_on(self, slot: Row) -> None:
        """If no rank can be repaired any more because of this one, the others need not record anything for it."""
        reason = self._node.job.unprotected_reason
        for other in self._node.slots:
            if other is not slot and reason:
                other.send(from_rank.RankUnprotected(reason))

    def note_hindered(self, slot: Row, message: from_rank.RankHindered) -> None:
        """The place where a rank is now cannot be replayed, or can be again."""
        node, why, boundary = self._node, message.reason, message.boundary
        node.log("rank_hindered", rank=slot.rank, boundary=boundary, reason=why)
        was_hindered = bool(node.job.hindrance)
        node.advance(message)
        if why:
            self._announce(slot, why)
        elif was_hindered and not node.job.hindrance and self._returns < _MOST_RETURNS:
            self._returns += 1
            self._announced.clear()  # what comes back is said again
            more = "" if self._returns < _MOST_RETURNS else "; for further changes see 'ttprun status'"
            logger.warning("from step %d on a lost rank can be replaced%s", boundary, more)

    def _announce(self, slot: Row, why: Reason) -> None:
        """Say on the console why no rank can be replaced now, and what that means; once, not once a rank."""
        job = self._node.job
        if why in self._announced or job.settings.rungs.isdisjoint(("replace", "rerun", "rewind")):
            return
        self._announced.add(why)
        said = f"{why}{why.pointer}"
        if recovery.is_alone(job, slot.rank) and job.settings.world_size > 1:
            kept = self._node.eyes.newest(slot.rank)
            cost = recovery.cost_of_a_loss_alone(job, slot.rank, None, kept)
            logger.warning("rank %d is not protected: %s. If it is lost, %s", slot.rank, said, cost)
            return
        cost = recovery.cost_of_a_loss(job)
        logger.warning("not protected: rank %d reports: %s. If a rank is lost, %s", slot.rank, said, cost)

    def note_own_state(self, slot: Row, message: from_rank.OwnStateKept) -> None:
        """A rank has kept its state for the first time, or cannot: say what its loss will cost, once."""
        node, why_not = self._node, message.why_not
        node.log("own_state", rank=slot.rank, **structs.asdict(message))
        if self._has_said_kept and not why_not:
            return
        self._has_said_kept = True
        every_s = None if why_not else (0.0 if message.took_s <= CHEAP_S else message.took_s / SHARE)
        cost = recovery.cost_of_a_loss_alone(node.job, slot.rank, every_s)
        if why_not:
            logger.warning("rank %d cannot keep its own state: %s. If it is lost, %s", slot.rank, why_not, cost)
        else:
            level = logging.WARNING if every_s else logging.INFO
            kept = f"a rank that is alone keeps its state ({message.bytes / (1 << 20):.1f} MiB)"
            logger.log(level, "%s: if rank %d is lost, %s", kept, slot.rank, cost)
