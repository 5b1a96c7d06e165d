"""Incidents as text: events above a line of dashes, what the machine answers below it.

    # Rank 2 is killed.
    exited rank=2 signal=9 boundary=41 at=10
    ----
    Freeze ranks=0,1,3 generation=1 lost=2
    -> FREEZING generation=1

The first line makes the job (`job ranks=4`), `all_started` starts and protects all its ranks, with pids 100, 101 and
so on, and finds them to be replicas (`alike=no`: they are not compared). After `all_elastic tensor_parallel=2` they can
train on in a smaller group. `all_compared up.weight=0,1` says by rank the lowest one that holds the same, and
`mirrored=0,1` which ranks' state is mirrored. After `resized ranks=3` the job has so many. Left out,
`at` is that of the event before, `generation` and `pid` are the present ones; `ranks=0,1` is one event for each. Of an
incident only a few fields are written while it is open, and all that are known when it has ended.

`python -m tests.recovery.scenario_text` writes all files anew with what the machine answers now: read the difference.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from msgspec import structs

from tests.recovery.validity import advance
from ttprun import recovery
from ttprun.protocol import to_rank
from ttprun.protocol.from_rank import (
    RankFaulted,
    RankFrozen,
    RankHindered,
    RankJoined,
    RankProtected,
    RankRebuilt,
    RankReissued,
    RankRepaired,
    RankReplayed,
    RankTrainsAlone,
    RankUnprotected,
    StateSent,
)
from ttprun.protocol.process_orders import Action, Rewind
from ttprun.protocol.rank_events import Event, MismatchFound, RankExited, RankStarted, SpawnFailed, StopAsked
from ttprun.protocol.reason import Reason
from ttprun.recovery import Job, RecordIncident, Settings, new_job, with_size
from ttprun.recovery.replicas import Replicas
from ttprun.recovery.shards import ReplicaGroup

FOLDER = Path(__file__).with_name("scenarios")
RULE = "----"

EVENT_WORDS: dict[str, type[Event]] = {
    "started": RankStarted,
    "spawn_failed": SpawnFailed,
    "protected": RankProtected,
    "unprotected": RankUnprotected,
    "hindered": RankHindered,
    "trains_alone": RankTrainsAlone,
    "joined": RankJoined,
    "exited": RankExited,
    "faulted": RankFaulted,
    "hung": recovery.RankHung,
    "node_lost": recovery.NodeLost,
    "step_differs": recovery.StepDiffers,
    "connection_broken": recovery.ConnectionBroken,
    "replacement_asked": recovery.ReplacementAsked,
    "downgrade_asked": recovery.DowngradeAsked,
    "upgrade_asked": recovery.UpgradeAsked,
    "frozen": RankFrozen,
    "replayed": RankReplayed,
    "state_sent": StateSent,
    "repaired": RankRepaired,
    "rebuilt": RankRebuilt,
    "reissued": RankReissued,
    "mismatch_found": MismatchFound,
    "snapshot_taken": recovery.SnapshotTaken,
    "resume_asked": recovery.ResumeAsked,
    "resize_asked": recovery.ResizeAsked,
    "resized": recovery.GroupResized,
    "checkpoint_asked": recovery.CheckpointAsked,
    "persisted": recovery.StatePersisted,
    "deadline_passed": recovery.DeadlinePassed,
    "group_restarted": recovery.GroupRestarted,
    "stop_asked": StopAsked,
    "renewed": recovery.SupervisorRenewed,
}
DEFAULTS: dict[type[Event], dict[str, Any]] = {
    RankExited: {"code": None, "signal": None, "boundary": 0},
    RankFaulted: {"boundary": 0},
    recovery.RankHung: {"boundary": 0},
    recovery.NodeLost: {"boundary": 0, "name": "node 1"},
    recovery.StepDiffers: {"boundary": 0},
    recovery.ConnectionBroken: {"boundary": 0},
    recovery.GroupResized: {"replicas": Replicas()},
    RankFrozen: {"digest": "same", "has_group": True},
    StateSent: {"digest": "same"},
    RankRepaired: {"digest": "same"},
}
TEXTS = {"reason", "name", "node", "digest", "place", "saved", "why_not", "why_unusable", "device_fault", "crashed_at"}
OF_REASONS = (RankUnprotected, RankHindered, MismatchFound)
NUMBERS = {"silent"}
FILLED_IN = {"is_adapted", "is_late", "trusted"}  # by the agent
RECORDED_FIRST = ("id", "phase", "rung", "outcome", "ranks", "attempt")
RECORDED_NEVER = {"generation", "opened_at_s"}


class Scenario:
    """One incident as it is run."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.at_s = 0.0

    def answer(self, lines: list[str]) -> list[str]:
        """Run the events of one block; returns what the machine answers."""
        answers: list[str] = []
        for line in lines:
            for event in self.events_of(line):
                assert self.job is not None, "the first line must be `job ranks=...`"
                self.job, actions = advance(self.job, event)
                answers += [write_action(action) for action in actions]
        if self.job is None:
            return answers
        return [*answers, f"-> {self.job.phase} generation={self.job.generation}"]

    def events_of(self, line: str) -> Iterator[Event]:
        """Events that one line stands for."""
        word, *pairs = shlex.split(line)
        given = dict(pair.split("=", 1) for pair in pairs)
        if word == "resized":
            assert self.job is not None, "the first line must be `job ranks=...`"
            self.job = with_size(self.job, int(given.pop("ranks")))
        if word == "job":
            settings = {name: read_value(name, text) for name, text in given.items() if name != "ranks"}
            self.job = new_job(Settings(world_size=int(given["ranks"]), **settings))
            return
        assert self.job is not None, "the first line must be `job ranks=...`"
        self.at_s = float(given.pop("at", self.at_s))
        if word == "all_started":
            for member in self.job.members:
                yield RankStarted(rank=member.rank, pid=100 + member.rank, at_s=self.at_s)
                yield RankProtected(rank=member.rank, at_s=self.at_s)
            if "alike" not in given:
                yield recovery.RanksCompared(replicas=Replicas(compared_at=1), at_s=self.at_s)
            return
        if word == "all_compared":
            yield recovery.RanksCompared(replicas=read_replicas(given), at_s=self.at_s)
            return
        if word == "all_elastic":
            world, replica_groups = len(self.job.members), int(given["tensor_parallel"])
            for rank in range(world):
                alike = tuple(range(rank % replica_groups, world, replica_groups))
                yield recovery.ElasticDeclared(rank=rank, replicas=(ReplicaGroup(alike, 2),), at_s=self.at_s)
            return
        ranks = given.pop("ranks", given.pop("rank", ""))
        one_for_all = EVENT_WORDS[word]
        values = {name: read_value(name, text) for name, text in given.items()}
        if one_for_all in OF_REASONS:
            values["reason"] = Reason("", values["reason"])
        if one_for_all in (recovery.ReplacementAsked, recovery.NodeLost):
            values = {**DEFAULTS.get(one_for_all, {}), **values, "ranks": tuple(map(int, ranks.split(",")))}
            yield one_for_all(**values, at_s=self.at_s)
            return
        for rank in ranks.split(","):
            yield self.make_event(EVENT_WORDS[word], rank, values)

    def make_event(self, event_type: type[Event], rank: str, values: dict[str, Any]) -> Event:
        """One event, with what the line leaves out."""
        assert self.job is not None
        names = {field.name for field in structs.fields(event_type)}
        values = {**DEFAULTS.get(event_type, {}), **values, "at_s": self.at_s}
        if "rank" in names and rank:
            values["rank"] = int(rank)
        if "saved" in names:
            values["saved"] = read_saved(values["saved"])
        if "generation" in names:
            own = self.job.alone.get(int(rank)) if event_type is recovery.DeadlinePassed and rank else None
            values.setdefault("generation", (own or self.job).generation)
        if "pid" in names:
            values.setdefault("pid", self.job.members[int(rank)].pid)
        return event_type(**values)


def read_replicas(given: dict[str, str]) -> Replicas:
    """What the ranks hold: by parameter and rank, the lowest rank that has always held the same."""
    mirrored = frozenset(map(int, given.pop("mirrored", "").split(","))) if "mirrored" in given else frozenset()
    differing = {name: tuple(map(int, owners.split(","))) for name, owners in given.items()}
    return Replicas(compared_at=1, differing=differing, mirrored=mirrored)


def read_value(name: str, text: str) -> Any:
    """The value of a field: text, yes or no, or a number."""
    if name in TEXTS:
        return text
    if name == "rungs":
        return frozenset(text.split(","))
    if name in NUMBERS:
        return tuple(int(number) for number in text.split(","))
    if text in ("yes", "no"):
        return text == "yes"
    return float(text) if "." in text else int(text)


def read_saved(text: str) -> tuple[recovery.Saved, ...]:
    """Checkpoints by their boundaries: "8,4"."""
    return tuple(recovery.Saved(int(boundary), f"step-{int(boundary):08d}") for boundary in text.split(","))


def write_value(value: Any) -> str:
    """The value of a field as it stands in a scenario."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text) if " " in text else text


def given_fields(action: Action) -> list[str]:
    """Names of what the machine gives with an action; an agent fills in the others."""
    if type(action).__module__ == to_rank.__name__:
        return [field.name for field in structs.fields(action) if field.required]
    others = FILLED_IN | {"generation"} if isinstance(action, Rewind) else FILLED_IN
    return [name for name in action.__struct_fields__ if name not in others]


def write_action(action: Action) -> str:
    """One line; of an incident, little while it is open, and all that is known when it has ended."""
    name = type(action).__name__
    if not isinstance(action, RecordIncident):
        pairs = [(name, getattr(action, name)) for name in given_fields(action)]
        pairs = [(key, value) for key, value in pairs if (key, value) not in (("rank", None), ("is_own", False))]
    else:
        incident = action.incident
        others = [field.name for field in fields(incident) if field.name not in {*RECORDED_FIRST, *RECORDED_NEVER}]
        others = [] if incident.outcome == "open" else sorted(others, key=lambda other: other == "reason")
        known = [(other, getattr(incident, other)) for other in (*RECORDED_FIRST, *others)]
        pairs = [(other, value) for other, value in known if value is not None]
    return " ".join([name, *(f"{key}={write_value(value)}" for key, value in pairs)])


def run_scenario(text: str) -> str:
    """The same text with the machine's own answers below each line of dashes.

    text   blocks with an empty line between them
    """
    scenario = Scenario()
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        asked = lines[: lines.index(RULE)] if RULE in lines else lines
        answers = scenario.answer([line for line in asked if not line.startswith("#")])
        blocks.append("\n".join([*asked, RULE, *answers] if RULE in lines else asked))
    return "\n\n".join(blocks) + "\n"


def main() -> None:
    """Write all scenarios anew."""
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(run_scenario(path.read_text()))


if __name__ == "__main__":
    main()
