"""What an incident costs the machine that decides: processor time by the number of ranks, with nothing but the machine.

    python scripts/bench/scale_machine.py                  # 1k to 64k ranks, one killed
    python scripts/bench/scale_machine.py --lost 8         # a node of 8 ranks is lost

Each event is one that an agent would bring in: the starts of all ranks, the fault, the survivors' answers in random
order, and what the replacements report. Begin with Story.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runs import headline, machine, positive, print_table

from ttprun.protocol.from_rank import (
    RankFrozen,
    RankJoined,
    RankProtected,
    RankRebuilt,
    RankReissued,
    RankRepaired,
    RankReplayed,
    StateSent,
)
from ttprun.protocol.process_orders import Action, SpawnRank
from ttprun.protocol.rank_events import Event, RankExited, RankStarted
from ttprun.protocol.to_rank import Freeze, Replay, Resume, SendState
from ttprun.recovery import Job, JobPhase, RanksCompared, Settings, advance, new_job
from ttprun.recovery.replicas import Replicas

WIDTH = 50


class Story:
    """A job, and what its ranks answer to the machine's orders.

    events    heard so far
    spent_s   processor time of the machine for them
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.job: Job = new_job(Settings(world_size=ranks))
        self.chance = random.Random(ranks)
        self.events = 0
        self.spent_s = 0.0

    def start(self) -> None:
        """All ranks start, make a group, and have been compared."""
        for rank in range(self.ranks):
            self.hear(RankStarted(rank=rank, pid=rank + 1, at_s=0.0))
            self.hear(RankProtected(rank=rank, at_s=0.0))
            self.hear(RankJoined(rank=rank, at_s=0.0))
        self.hear(RanksCompared(replicas=Replicas(compared_at=1), at_s=0.0))

    def lose(self, lost: int) -> None:
        """The last ranks are killed, and replaced. RuntimeError if the job does not run again."""
        waiting: list[Event] = []
        for rank in range(self.ranks - lost, self.ranks):
            killed = RankExited(rank=rank, pid=rank + 1, code=None, signal=9, boundary=5, at_s=1.0)
            waiting += self.answers(self.hear(killed))
        while waiting:
            self.chance.shuffle(waiting)
            heard, waiting = waiting, []
            for event in heard:
                waiting += self.answers(self.hear(event))
        if self.job.phase is not JobPhase.RUNNING or self.job.lost:
            raise RuntimeError(f"the job is {self.job.phase}, with ranks {self.job.lost} lost")

    def hear(self, event: Event) -> tuple[Action, ...]:
        """The machine's answer."""
        self.events += 1
        began_s = time.process_time()
        self.job, actions = advance(self.job, event)
        self.spent_s += time.process_time() - began_s
        return actions

    def answers(self, actions: tuple[Action, ...]) -> Iterator[Event]:
        """What ranks and agent say to orders."""
        for action in actions:
            match action:
                case Freeze(ranks, generation, _):
                    for rank in ranks:
                        frozen: dict[str, Any] = {"boundary": 5, "digest": "w", "has_group": True}
                        yield RankFrozen(rank=rank, generation=generation, at_s=2.0, **frozen)
                case SpawnRank(rank, _):
                    yield RankStarted(rank=rank, pid=self.ranks + rank + 1, at_s=2.0)
                case Replay(rank, generation, boundary, _):
                    yield RankReplayed(rank=rank, generation=generation, boundary=boundary, at_s=3.0)
                case SendState(source, to, generation, _):
                    yield StateSent(rank=source, generation=generation, digest="w", at_s=4.0)
                    for rank in to:
                        yield RankRepaired(rank=rank, generation=generation, digest="w", at_s=4.0)
                case Resume(ranks, generation, _):
                    for rank in ranks:
                        yield RankRebuilt(rank=rank, generation=generation, at_s=5.0)
                        yield RankReissued(rank=rank, generation=generation, at_s=5.0)


def measure(ranks: int, lost: int) -> dict[str, float]:
    """Processor seconds of the start and of one incident, and events of the incident."""
    story = Story(ranks)
    story.start()
    started_s, events = story.spent_s, story.events
    story.lose(lost)
    return {
        "ranks": ranks,
        "start_s": started_s,
        "incident_s": story.spent_s - started_s,
        "events": story.events - events,
    }


def main() -> int:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [1 << power for power in range(10, 17)]
    parser.add_argument("--ranks", type=positive, nargs="+", default=sizes, help="default: 1,024 to 65,536")
    parser.add_argument("--lost", type=positive, default=1, help="ranks that are killed at once (default 1)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    print(headline(machine()), flush=True)
    runs = [measure(ranks, options.lost) for ranks in options.ranks]
    most_s = max(run["incident_s"] for run in runs)
    rows = [["ranks", "start, s", "incident, s", "events", "us an event", "", ""]]
    for run in runs:
        bar = "#" * max(1, round(WIDTH * run["incident_s"] / most_s))
        each_us = 1e6 * run["incident_s"] / run["events"]
        times = [f"{run['start_s']:.2f}", f"{run['incident_s']:.2f}"]
        rows.append([f"{run['ranks']:,}", *times, f"{run['events']:,}", f"{each_us:.0f}", "", bar.ljust(WIDTH)])
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "found": runs}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
