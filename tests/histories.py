"""Histories on a bad network: something befalls a job on two or three nodes, and it must end as the guide says.

The table of allowed ends is in ttprun/guide/limits.md, under "A bad network"; `ENDS` and `judge` are the same in code.
Everything is real but the network (`network.py`): launchers, ranks, gloo, SIGKILL. Begin with `tell`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.e2e import harness
from tests.network import CUT, Link, Network

SCRIPT = "paced_steps.py"
STEPS = 60
NODE_WAIT_S = 15
LIMIT_S = 240.0
AGAIN_S = 1.5  # a scheduler starts a launcher again
MOST_STARTS = 8
RETRIED = (143, 137, -signal.SIGKILL)
SLOW = Link(delay_s=0.1)  # each way: 200 ms there and back
LOSSY = Link(loss=0.05)
BOTH = Link(delay_s=0.1, loss=0.05)
SIZES = {"2": 2, "3": 3, "2:3": 3}
LINE = re.compile(r"\[rank (\d+)\] step (\d+) loss (\S+) at (\S+)")
ENDS = {
    "undisturbed": "every launcher ends with 0, no rank was replaced",
    "repaired": "0 at each launcher that is left, 143 at a node that was cut off; exact weights",
    "ended": "143 at each launcher that lives, and why; no weights are written",
    "done later": "launchers that ended with 143 were started again, and all end with 0; exact weights",
}


@dataclass(frozen=True)
class Spell:
    """Bad weather.

    kind     delay, loss, both, cut
    shape    who is concerned, for people
    links    (from, to)
    at_s     after the moment of the history
    for_s    it lasts
    """

    kind: str
    shape: str
    links: tuple[tuple[int, int], ...]
    at_s: float
    for_s: float

    @property
    def link(self) -> Link:
        """What its links are like."""
        return {"delay": SLOW, "loss": LOSSY, "both": BOTH, "cut": CUT}[self.kind]


@dataclass(frozen=True)
class History:
    """What befalls one job.

    size         --nnodes
    is_routed    as in `Network`
    moment       the step of the first node's rank at which it begins; -1: the launchers' start
    killed       "", "rank" or "launcher", of the node `on`, `kill_at_s` after the moment
    is_requeued  a launcher that ends with 143 or is killed is started again
    is_last_spare  the last node comes when the others train; else whoever comes last is the spare
    """

    seed: int
    number: int
    size: str
    is_routed: bool
    moment: int
    spells: tuple[Spell, ...]
    killed: str = ""
    on: int = 0
    kill_at_s: float = 0.0
    is_requeued: bool = False
    is_last_spare: bool = False

    @property
    def nodes(self) -> int:
        """Launchers."""
        return SIZES[self.size]

    def __str__(self) -> str:
        spells = ", ".join(f"{s.kind} ({s.shape}) at {s.at_s:.1f} for {s.for_s:.0f} s" for s in self.spells)
        killed = f", a {self.killed} of node {self.on} killed at {self.kill_at_s:.1f} s" if self.killed else ""
        moment = "from the start" if self.moment < 0 else f"from step {self.moment}"
        how = ("routed" if self.is_routed else "one wire") + (
            ", launchers are started again" if self.is_requeued else ""
        )
        return f"{self.number}: --nnodes {self.size} ({how}) {moment}: {spells}{killed}"


@dataclass
class Told:
    """What became of a history.

    end        of ENDS; "" if it is none of them
    problems   sentences; empty if all is as the table says
    exit_codes of each node's launchers, in order
    reasons    that launchers gave, each once
    lost       nodes that were taken for lost
    took_s     in all
    """

    history: History
    end: str = ""
    problems: list[str] = field(default_factory=list)
    exit_codes: list[list[int | None]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    lost: int = 0
    dropped: int = 0
    took_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For a file of results."""
        spells = [{key: value for key, value in asdict(one).items() if key != "links"} for one in self.history.spells]
        return asdict(self) | {"history": asdict(self.history) | {"spells": spells}}


@dataclass
class _Start:
    """One start of a launcher."""

    launch: harness.Launch
    at_s: float
    run: harness.Run | None = None
    is_killed: bool = False


def tell(history: History, folder: Path, references: Mapping[int, harness.Run], keep: bool = False) -> Told:
    """Have a history happen in a folder, which is removed if all went as it must.

    references   undisturbed runs under torchrun, by number of ranks
    """
    began_s = time.monotonic()
    told = Told(history)
    with Network(history.nodes, f"{history.seed}/{history.number}", history.is_routed) as network:
        starts = _happen(history, folder, network, told)
        told.dropped = network.dropped
    for start in (one for some in starts for one in some):
        start.launch.stop()
        harness.end_processes_of(start.launch.folder / "run")
        start.run = start.run or start.launch.finish(20.0)
    told.exit_codes = [[one.run.exit_code if one.run else None for one in some] for some in starts]
    judge(told, starts, folder, references[int(history.size[0])])
    told.took_s = round(time.monotonic() - began_s, 1)
    if not told.problems and not keep:
        shutil.rmtree(folder)
    return told


def _happen(history: History, folder: Path, network: Network, told: Told) -> list[list[_Start]]:
    starts: list[list[_Start]] = [[] for _ in range(history.nodes)]

    def start(number: int) -> None:
        starts[number].append(_Start(_launch(history, folder, network, number, len(starts[number])), time.monotonic()))

    if history.moment < 0:
        moment_s = time.monotonic()
        _weather(history, network, 0.0)
    for number in range(history.nodes - history.is_last_spare):
        start(number)
    if history.is_last_spare:
        _await_step(starts[:-1], 1)
        start(history.nodes - 1)
        starts[-1][0].launch.wait_for_output("this one waits to take the place of one that is lost")
    if history.moment >= 0:
        _await_step(starts, history.moment)
        moment_s = time.monotonic()
    ends_s, is_killed = time.monotonic() + LIMIT_S, not history.killed
    while time.monotonic() < ends_s:
        now_s = time.monotonic() - moment_s
        _weather(history, network, now_s)
        if not is_killed and now_s >= history.kill_at_s:
            is_killed = True
            _kill(history, network, starts)
        _end_and_start_again(history, starts, start)
        if not any(_goes_on(history, some) for some in starts):
            return starts
        time.sleep(0.05)
    told.problems.append(f"it has not ended within {LIMIT_S:.0f} s")
    return starts


def _launch(history: History, folder: Path, network: Network, number: int, again: int) -> harness.Launch:
    known = ["--run-id", "job", "--save-dir", str(folder / "save"), "--node-wait-s", str(NODE_WAIT_S)]
    return harness.start_ttprun(
        SCRIPT,
        1,
        folder / f"{number}-{again}",
        options=[*network.rendezvous(number, history.size), *known],
        out=folder / "out",
        within=network.inside(number),
    )


def _await_step(starts: Sequence[Sequence[_Start]], step: int) -> None:
    """Until some rank has done a step."""
    ends_s = time.monotonic() + 60.0
    while time.monotonic() < ends_s:
        for some in starts:
            if any(f"step {step} " in line for line in _lines(some[-1].launch.folder)):
                return
        time.sleep(0.05)


def _weather(history: History, network: Network, now_s: float) -> None:
    links: dict[tuple[int, int], Link] = {}
    for spell in history.spells:
        if spell.at_s <= now_s < spell.at_s + spell.for_s:
            links |= dict.fromkeys(spell.links, spell.link)
    network.set_links(links)


def _kill(history: History, network: Network, starts: Sequence[Sequence[_Start]]) -> None:
    start = starts[history.on][-1]
    if history.killed == "launcher":
        start.is_killed = True
        network.end_processes(history.on)
        return
    status = start.launch.folder / "run" / "status.json"
    try:
        found = json.loads(status.read_text())
        pids = [rank["pid"] for rank in found["ranks"] if rank["node"] == found.get("node", 0) and rank["pid"]]
    except (OSError, ValueError, KeyError):
        return  # it waits for slots
    for pid in set(pids) & set(network.pids(history.on)):
        harness.os.kill(pid, signal.SIGKILL)


def _end_and_start_again(history: History, starts: Sequence[list[_Start]], start: Any) -> None:
    for number, some in enumerate(starts):
        last = some[-1]
        if last.run is None and last.launch.process.poll() is not None:
            last.run = last.launch.finish(20.0)
            last.at_s = time.monotonic()
        if last.run is not None and time.monotonic() > last.at_s + AGAIN_S and _goes_on(history, some):
            start(number)


def _goes_on(history: History, some: Sequence[_Start]) -> bool:
    """The newest launcher of a node lives, or another one comes after it."""
    run = some[-1].run
    return run is None or (history.is_requeued and run.exit_code in RETRIED and len(some) < MOST_STARTS)


def _lines(folder: Path) -> list[str]:
    found = sorted(folder.glob("logs/*/attempt_*/*/stdout.log"))
    return [line for path in found for line in path.read_text(errors="replace").splitlines()]


# What must hold.


def judge(told: Told, starts: Sequence[Sequence[_Start]], folder: Path, reference: harness.Run) -> None:
    """Compare what came of a history with the table."""
    history, problems = told.history, told.problems
    runs = [one for some in starts for one in some]
    codes = {one.run.exit_code for one in runs if one.run is not None}
    strange = codes - {0, 143, 137} - ({-signal.SIGKILL} if history.killed == "launcher" else set())
    if strange:
        problems.append(f"exit codes {sorted(map(str, strange))} are in no row of the table")
    told.reasons = sorted({reason for one in runs for reason in _reasons(one)})
    told.lost = sum(event["event"] == "node_lost" for one in runs if one.run for event in one.run.events)
    problems += _wrong_steps(starts, reference)
    problems += _second_leaders(runs)
    problems += [why for some in starts for one in some if (why := _silence(one, runs))]
    final = harness.gather(SCRIPT, folder, folder / "out", None).final
    is_done = any(some[-1].run and some[-1].run.exit_code == 0 for some in starts)
    if final is not None and final != reference.final:
        problems.append("final.pt has other weights than under torchrun")
    if is_done and final is None:
        problems.append("a launcher ended with 0, and there are no weights")
    told.end = _end_of(history, starts, runs, is_done)
    allowed = allowed_ends(history)
    if told.end not in allowed:
        problems.append(f"it ended as '{told.end}', not as {' or '.join(allowed)}")


def allowed_ends(history: History) -> tuple[str, ...]:
    """The rows of the table that a history may end in."""
    is_long = any(for_s > 5.0 for for_s in _cuts(history.spells))
    if not is_long and history.killed != "launcher":
        return ("repaired", "undisturbed") if history.killed else ("undisturbed",)  # no rank is on a spare node
    if history.is_requeued:
        return "undisturbed", "repaired", "done later"
    return "undisturbed", "repaired", "ended"


def _cuts(spells: Sequence[Spell]) -> list[float]:
    """How long the network is cut: in less than two seconds between two cuts not every packet comes again."""
    found: list[tuple[float, float]] = []
    for spell in spells:
        if spell.kind == "cut" and found and spell.at_s < found[-1][1] + 2.0:
            found[-1] = found[-1][0], spell.at_s + spell.for_s
        elif spell.kind == "cut":
            found.append((spell.at_s, spell.at_s + spell.for_s))
    return [ends_s - begins_s for begins_s, ends_s in found]


def _end_of(history: History, starts: Sequence[Sequence[_Start]], runs: Sequence[_Start], is_done: bool) -> str:
    last = [some[-1].run.exit_code if some[-1].run else None for some in starts]
    is_again = any(len(some) > 1 for some in starts)
    if is_again:
        return "done later" if set(last) == {0} else ""
    if not is_done:
        return "ended" if set(last) <= {143, 137, -signal.SIGKILL} else ""
    incidents = [one for start in runs if start.run for one in start.run.incidents]
    if set(last) == {0} and not incidents:
        return "undisturbed"
    return "repaired" if set(last) <= {0, 143, -signal.SIGKILL} else ""


def _reasons(start: _Start) -> list[str]:
    events = start.run.events if start.run else []
    return [event["reason"] for event in events if event["event"] == "run_ended" and event["reason"]]


def _silence(start: _Start, runs: Sequence[_Start]) -> str:
    """A launcher that has not ended with 0 says why, or another one has said so for the whole job."""
    run = start.run
    if run is None or run.exit_code == 0 or start.is_killed:
        return ""
    reasons = _reasons(start)
    said = [one.run.output.replace("\nttprun: ", " ") for one in runs if one.run]  # a long reason takes two lines
    is_said = any(reason in output for reason in reasons for output in said)
    return "" if is_said else f"{run.folder.name} ended with {run.exit_code}, and nobody says why: {reasons}"


def _wrong_steps(starts: Sequence[Sequence[_Start]], reference: harness.Run) -> list[str]:
    """Each step of each rank is that of the undisturbed run, and no two processes of a rank take steps at a time."""
    expected = {(one, two): loss for lines in reference.stdout.values() for one, two, loss, _ in _parsed(lines)}
    taken: dict[int, list[tuple[float, float, str]]] = {}
    problems = []
    for start in (one for some in starts for one in some):
        for path in sorted(start.launch.folder.glob("logs/*/attempt_*/*/stdout.log")):
            steps = list(_parsed(path.read_text(errors="replace").splitlines()))
            wrong = [f"rank {one} step {two}" for one, two, loss, _ in steps if expected.get((one, two)) != loss]
            if wrong:
                problems.append(f"{start.launch.folder.name}: {', '.join(wrong[:5])} came to another loss")
            for rank in {one for one, _, _, _ in steps}:
                at_s = [float(at) for one, _, _, at in steps if one == rank]
                taken.setdefault(rank, []).append((min(at_s), max(at_s), start.launch.folder.name))
    for rank, spans in taken.items():
        for (_, ended_s, one), (began_s, _, other) in pairwise(sorted(spans)):
            if began_s < ended_s:
                problems.append(f"rank {rank} took steps in {one} and in {other} at a time")
    return problems


def _parsed(lines: Sequence[str]) -> list[tuple[int, int, str, str]]:
    return [(int(m[1]), int(m[2]), m[3], m[4]) for line in lines if (m := LINE.match(line))]


def _second_leaders(runs: Sequence[_Start]) -> list[str]:
    """Once an agent leads, none that led before it starts a rank or sets the job going again."""
    problems = []
    leads = [
        (event["at_s"], event["generation"], one)
        for one in runs
        if one.run
        for event in one.run.events
        if event["event"] == "leads"
    ]
    for at_s, generation, leader in leads:
        for one in runs:
            if one is leader or one.run is None:
                continue
            for event in one.run.events:
                is_order = event["event"] == "phase_changed" and event["after"] == "RUNNING"
                is_order = is_order and event["generation"] <= generation + 1 and event["at_s"] > at_s
                led = [e for e in one.run.events if e["event"] == "leads" and at_s < e["at_s"] <= event["at_s"]]
                begun_s = one.run.events[0]["at_s"]
                if is_order and not led and begun_s < at_s:
                    problems.append(f"{leader.launch.folder.name} leads, and {one.launch.folder.name} orders: {event}")
    ended = [one for one in runs if one.run and any(_is_end(e) for e in one.run.events)]
    if len(ended) > 1:
        problems.append("the job came to its end under two leaders")
    return problems


def _is_end(event: Mapping[str, Any]) -> bool:
    return event["event"] == "phase_changed" and event["after"] == "DONE"
