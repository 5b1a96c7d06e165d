"""Faults that ttprun can cause on purpose, and how they are written: `kill:rank=1,step=5,phase=backward`.

The same form is used by `--fault`, by `faults:` in a configuration or a drill, and between agent and ranks. Standard
library only, since it is imported inside ranks. Read KINDS first, then `parse_fault`; `strikes` expands schedules. A
new kind: a row of KINDS here, its moments and keys in the tables below it, what it does in `damage.py` or `broken.py`
(what the agent does itself: `injections.py`), what it comes to in `trial/kills.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ttprun.errors import suggestion

KINDS: dict[str, str] = {
    # The process.
    "kill": "SIGKILL: the process is gone at once, as by the out-of-memory killer",
    "exit": "the process ends itself with an exit code (code=N, default 1), without any clean-up",
    "exception": "a RuntimeError is raised in the script's main thread",
    "term": "SIGTERM from outside, as from an operator or a scheduler that picks the wrong process",
    "segv": "a real access to memory that is not there: SIGSEGV",
    "abort": "SIGABRT, as a failed check in C++ code ends a process",
    "stop": "SIGSTOP: the process stops and answers nothing (for seconds=S, default: without end)",
    "leave": "the rank leaves the script early with exit code 0, as if it were done",
    "worker-kill": "SIGKILL of one of the rank's DataLoader workers, as by the out-of-memory killer",
    # Hangs.
    "sleep": "the main thread sleeps and lets other threads run (for seconds=S, default: without end)",
    "deadlock": "the main thread blocks in C code and holds the GIL: no Python code runs (for seconds=S)",
    "busy": "the main thread runs an endless loop of Python code (for seconds=S)",
    "skip-collective": "the rank does not take part in one collective and continues",
    # Communication.
    "reset": "its connections to the other ranks are reset (TCP RST); peer=R: only the one to rank R",
    "silent": "one link goes silent: whatever a peer (peer=R, default the next rank) sends is dropped on arrival",
    "cut-off": "all its links go silent; the connection to the agent works",
    "slow": "its links send no more than rate=BYTES a second (default 262144; peer=R: one link), for seconds=S",
    # Data.
    "nan": "one element of a gradient becomes NaN in this rank, before the all-reduce",
    "flip-bit": "one bit of a replicated parameter is flipped in this rank (which one: seed=S)",
    "flip-state": "one bit of what an optimizer keeps of a parameter is flipped in this rank (seed=S)",
    "flip-gradient": "one bit of a gradient is flipped in this rank, before the all-reduce (seed=S)",
    "flip-batch": "one bit of what a module is called with is flipped in this rank (seed=S)",
    # Device: the simulated NPU alone, whose memory then fails where the script's own tensors are.
    "uce-low": "simulated device: uncorrectable memory error where no state is kept",
    "uce-high": "simulated device: the same in the weights and the optimizer's state, all of which are ruined",
    "uce-fatal": "simulated device: the same in memory that belongs to no tensor",
    "ecc": "simulated device: a multi-bit ECC error, with its time, in the weights and the optimizer's state",
    "link": "simulated device: the next collective meets a broken link between devices",
    "device-lost": "simulated device: it no longer answers",
    # Control plane.
    "agent-kill": "SIGKILL of the agent itself: the job ends, and no process may remain",
    "standby-kill": "SIGKILL of a standby",
    "stall": "the agent stands still, as under memory pressure (for seconds=S, default 2)",
    "preempt": "SIGTERM to the launcher, as from a scheduler that takes the job's machines",
}

PHASES: dict[str, str] = {
    "start": "the interpreter has started, the script's first line has not run",
    "init": "inside init_process_group",
    "setup": "after init_process_group, before the first step (DDP's parameter broadcast)",
    "forward": "in the forward pass",
    "backward": "in the backward pass, between two bucket all-reduces",
    "collective": "inside a collective",
    "before_step": "after the step's last collective, before optimizer.step",
    "in_step": "inside optimizer.step",
    "after_step": "between optimizer.step and the next forward (scheduler, EMA, logging)",
    "validation": "in validation with collectives of its own",
    "checkpoint": "while rank 0 writes the script's own checkpoint and the others wait in a barrier",
    "exit": "after the last step, before the process ends",
    "fork": "in a replacement, between its start and its first word to the agent",
    "replay": "in a replacement, while it runs the script up to its boundary",
    "transfer": "in a recovery, while state goes from one rank to another (in the one that sends, or in the other)",
    "gradients": "after a recovery that was equal to rounding alone, while gradients go from one rank to another",
    "freeze": "in a recovery, when a survivor is asked to quiesce",
    "abort": "in a recovery, when a survivor has aborted the communicator of a group on a device",
    "rebuild": "in a recovery, when a rank is asked to connect again",
    "connect": "in a recovery, when all members of a group are about to make its communicator on a device",
    "reissue": "in a recovery, when a survivor has issued the first collective again",
    "thaw": "in a recovery, when a survivor's main thread continues",
    "persist": "when a rank is asked to write its share of a checkpoint",
}

_STEP = ("forward", "backward", "collective", "before_step", "in_step", "after_step")
_SCRIPT = ("init", "setup", *_STEP, "validation", "checkpoint")
_RESUMES = ("rebuild", "connect", "reissue", "thaw", "persist")
RECOVERY_PHASES = ("fork", "replay", "transfer", "gradients", "freeze", "abort", *_RESUMES)
_TRAINS = ("setup", *_STEP, "validation", "checkpoint")
_CONNECTED = (*_TRAINS, "exit", "reissue", "thaw")
FLIP_KINDS = ("flip-bit", "flip-state", "flip-gradient", "flip-batch")
# These raise, in the script or in its next collective, what a device would.
DEVICE_KINDS = ("uce-low", "uce-high", "uce-fatal", "ecc", "link", "device-lost")
# Kind -> the phases in which it makes sense, and why not in the others; kinds that are not here strike in any.
_PHASES_OF: dict[str, tuple[tuple[str, ...], str]] = {
    "exception": ((*_SCRIPT, "exit", "replay"), "the script's code does not run there"),
    "leave": ((*_SCRIPT, "replay"), "the script's code does not run there"),
    **dict.fromkeys(DEVICE_KINDS, (_TRAINS, "the script does not work on its device there")),
    "worker-kill": (_TRAINS, "the script loads no data there"),
    "skip-collective": (("setup", "backward", "collective", "checkpoint"), "no collective is issued there"),
    "reset": (_CONNECTED, "the rank is not connected there"),
    "silent": (_CONNECTED, "the rank is not connected there"),
    "cut-off": (_CONNECTED, "the rank is not connected there"),
    "slow": (_CONNECTED, "the rank is not connected there"),
    "nan": (("backward", "collective"), "no gradient is reduced there"),
    **dict.fromkeys(
        ("flip-bit", "flip-state"),
        (
            ("forward", "backward", "collective", "before_step", "after_step", "validation", "checkpoint"),
            "no parameter that an optimizer holds can be changed there",
        ),
    ),
    "flip-gradient": (("backward", "collective"), "no gradient is reduced there"),
    "flip-batch": (("forward",), "no module is called there"),
}
# Nothing of a rank breaks: the agent does it, and a rank is named only for the moment.
AGENT_KINDS = ("agent-kill", "standby-kill", "stall", "preempt")
# With no step and no phase these strike at once, from outside, whatever the rank does.
SIGNAL_KINDS = ("kill", "term", "segv", "abort", "stop")
# What `random` stands for: each ends one rank's process, and that is repaired.
ENDING_KINDS = ("kill", "exit", "exception", "term", "segv", "abort")
# Phases that are drawn if none is given: every training script reaches them.
DRAWN_PHASES = ("backward", "collective", "before_step", "in_step", "after_step")
# Kinds without an incident: the run continues, or ends at once.
WITHOUT_INCIDENT = ("slow", "standby-kill", "stall", "agent-kill", "preempt", "leave")
RANDOM = "random"
_LONGEST = 300  # characters
USAGE = "write KIND:rank=R[,step=N][,phase=P]"


@dataclass(frozen=True)
class Fault:
    """A fault to cause, or a schedule of them; `str` gives the form that `parse_fault` reads.

    kind     a key of KINDS; several separated by commas, or RANDOM: one of them is drawn by the seed each time
    rank     global rank, from 0; None: drawn by the seed
    step     optimizer step, from 0, in or after which it strikes at the first such moment; None: the current one, or
             drawn if there is a seed and no time is given
    phase    a key of PHASES; None: wherever the rank is, or drawn if there is a seed
    after    seconds to wait first
    every    repeats: "5steps" or "10s"
    count    number of strikes; None: one, or without end if there is `every`
    seed     for everything that is drawn
    code     exit code of `exit`
    peer     the other end of the link for `silent`, `slow` and `reset`
    rate     bytes per second for `slow`
    seconds  duration, for hangs and links
    sticky   1: in each later step, too, as long as this process lives, as by a defective device
    """

    kind: str
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    after: float | None = None
    every: str | None = None
    count: int | None = None
    seed: int | None = None
    code: int | None = None
    peer: int | None = None
    rate: int | None = None
    seconds: float | None = None
    sticky: int | None = None

    def __str__(self) -> str:
        given = [(field.name, getattr(self, field.name)) for field in fields(self)[1:]]
        keys = ",".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in given
            if value is not None
        )
        return f"{self.kind}:{keys}" if keys else self.kind

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of which one is drawn; mostly it is one."""
        return ENDING_KINDS if self.kind == RANDOM else tuple(self.kind.split(","))

    @property
    def is_immediate(self) -> bool:
        """Whether the agent causes it at once, from outside the rank."""
        return self.step is None and self.phase is None and self.kind in (*SIGNAL_KINDS, *AGENT_KINDS)

    def plain(self, kind: str, rank: int | None, step: int | None, phase: str | None, seed: int | None) -> Fault:
        """One strike of this schedule, with those keys that fit its kind.

        kind         one of `kinds`
        rank, step   None: as for Fault
        phase        a key of PHASES, or None
        seed         of what is drawn when it strikes; only FLIP_KINDS draw then
        """
        alien: dict[str, Any] = {key: None for key, (kinds, _) in _KEYS_OF.items() if kind not in kinds}
        alien |= {"after": None, "every": None, "count": None, "seed": seed if kind in FLIP_KINDS else None}
        if self.peer == rank:
            alien["peer"] = None
        return replace(self, kind=kind, rank=rank, step=step, phase=phase, **alien)


def parse_fault(text: str) -> Fault:
    """Read `KIND[,KIND...]:key=value,...`; the keys are the fields of Fault.

    Raises ValueError with one line that says what is wrong and what would be right.
    """
    text = text.strip()
    if len(text) > _LONGEST or not text.isprintable():
        raise ValueError(f"{text[:80]!r} is no fault; {USAGE}")
    kind, _, rest = text.partition(":")
    values: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in _READERS:
            raise ValueError(f"fault '{text}' has no '{key:.40}'; {suggestion(key, _READERS, USAGE)}")
        if key in values:
            raise ValueError(f"fault '{text}' names its {key} twice; {USAGE}")
        try:
            values[key] = _READERS[key](value)
        except ValueError as error:
            raise ValueError(f"fault '{text}': {key} is '{value:.40}'; {error}") from None
    fault = Fault(kind, **values)
    check_fault(fault)
    return fault


def check_fault(fault: Fault) -> None:
    """Raise ValueError, one line, if the fault cannot be caused: an unknown word, a phase or key that does not fit."""
    if fault.kind != RANDOM:
        for kind in fault.kinds:
            check_word("fault", kind, KINDS)
    if fault.phase is not None:
        check_word("phase", fault.phase, PHASES)
        for kind in fault.kinds:
            check_phase(kind, fault.phase)
    for key, (kinds, use) in _KEYS_OF.items():
        if getattr(fault, key) is not None and not set(fault.kinds) & set(kinds):
            raise ValueError(f"fault '{fault}': {key} does not fit {fault.kind}; it is {use}")
    if fault.seed is None and (fault.kind == RANDOM or len(fault.kinds) > 1):
        raise ValueError(f"fault '{fault}' leaves its kind open; add a seed, as in {replace(fault, seed=1)}")
    is_of_agent_now = fault.kind in AGENT_KINDS and fault.step is None and fault.phase is None
    if fault.rank is None and fault.seed is None and not is_of_agent_now:
        raise ValueError(f"fault '{fault}' names no rank; {USAGE}, or a seed to draw one")
    if fault.count is not None and fault.every is None and fault.seed is None:
        raise ValueError(f"fault '{fault}' has a count and no interval; give every=5steps or every=10s, or a seed")
    if fault.peer is not None and fault.peer == fault.rank:
        raise ValueError(f"fault '{fault}': peer is the rank itself; name another rank")


def check_ranks(fault: Fault, world_size: int) -> None:
    """Raise ValueError, one line, unless a run of so many ranks has those that the fault names."""
    for rank in (fault.rank, fault.peer):
        if rank is not None and rank >= world_size:
            raise ValueError(f"there is no rank {rank}; this run has {world_size} ranks")


def check_phase(kind: str, phase: str) -> None:
    """Raise ValueError if a kind makes no sense in a phase."""
    allowed, why_not = phases_of(kind), _PHASES_OF.get(kind, ((), "only a signal from outside reaches it there"))[1]
    if phase not in allowed:
        raise ValueError(f"{kind} cannot strike in phase {phase} ({why_not}); use one of {', '.join(allowed)}")


def phases_of(kind: str) -> tuple[str, ...]:
    """The phases in which a kind can strike."""
    if kind in _PHASES_OF:
        return _PHASES_OF[kind][0]
    return tuple(phase for phase in PHASES if phase != "fork" or kind in SIGNAL_KINDS)


def check_word(what: str, word: str, table: Iterable[str]) -> None:
    """Raise ValueError, with a suggestion, unless `word` is in `table`.

    what    "fault" or "phase", for the message
    table   KINDS or PHASES
    """
    if word not in table:
        raise ValueError(f"there is no {what} '{word}'; {suggestion(word, table, 'use one of ' + ', '.join(table))}")


def seconds_of(every: str | None) -> float | None:
    """The period in seconds; None if it is one of steps, or if there is none."""
    return None if every is None or every.endswith("steps") else float(every.removesuffix("s"))


def _natural(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError("write a whole number from 0")
    return int(value)


def _positive(value: str) -> int:
    if not _natural(value):
        raise ValueError("write a whole number from 1")
    return int(value)


def _exit_code(value: str) -> int:
    if not 1 <= _natural(value) <= 255:
        raise ValueError("write a number from 1 to 255 (to end with 0: leave)")
    return int(value)


def _seconds(value: str) -> float:
    try:
        seconds = float(value.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError("write a number of seconds")
    return seconds


def _period(value: str) -> str:
    """ "5steps" or "10s"; a bare number is seconds."""
    steps = value.removesuffix("s").removesuffix("step")
    if steps != value and value.rstrip("s").endswith("step"):
        return f"{_positive(steps)}steps"
    try:
        seconds = _seconds(value)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise ValueError("write a number of seconds, as 10s, or of steps, as 5steps")
    return f"{seconds:g}s"


_READERS: dict[str, Callable[[str], Any]] = {
    "rank": _natural,
    "step": _natural,
    "phase": str,
    "after": _seconds,
    "every": _period,
    "count": _positive,
    "seed": _natural,
    "code": _exit_code,
    "peer": _natural,
    "rate": _positive,
    "seconds": _seconds,
    "sticky": _positive,
}
# Key -> the kinds that it fits, and what it is.
_KEYS_OF: dict[str, tuple[tuple[str, ...], str]] = {
    "code": (("exit",), "the exit code of exit"),
    "peer": (("reset", "silent", "slow"), "the other end of one link: for reset, silent and slow"),
    "rate": (("slow",), "the bytes a second of slow"),
    "seconds": (
        ("stop", "sleep", "deadlock", "busy", "silent", "cut-off", "slow", "stall"),
        "how long a hang or a broken link lasts",
    ),
    "sticky": (FLIP_KINDS, "whether a bit is flipped in each later step, too"),
}


# The strikes of a fault's schedule. Pure: the same order, world and step give the same strikes.


DRAWN_STEPS = 20  # a drawn step is at most so many steps after the one before


@dataclass(frozen=True)
class PlannedStrike:
    """One fault of a schedule.

    number   from 0
    fault    with nothing left to draw and no waiting time
    after_s  seconds from the order; None: at once, or after the previous strike
    """

    number: int
    fault: Fault
    after_s: float | None


def strikes(order: Fault, world_size: int, running_step: int) -> Iterator[PlannedStrike]:
    """All strikes of an order, without end if it has a period and no count.

    order         accepted by `check_fault`
    world_size    ranks to draw from
    running_step  the optimizer step at the time of the order, from which periods and drawn steps count
    """
    drawn = random.Random(order.seed)
    every_s, every = seconds_of(order.every), order.every or ""
    every_steps = int(every.removesuffix("steps")) if every.endswith("steps") else None
    is_timed = order.after is not None or every_s is not None
    is_step_drawn = order.seed is not None and order.step is None and not is_timed and every_steps is None
    count = order.count if order.count is not None or order.every is not None else 1
    step = order.step
    number = 0
    while count is None or number < count:
        if every_steps is not None:
            first = order.step if order.step is not None else running_step + every_steps
            step = first + number * every_steps
        elif is_step_drawn:
            step = (running_step if step is None else step) + drawn.randint(1, DRAWN_STEPS)
        kind = drawn.choice(order.kinds) if len(order.kinds) > 1 else order.kinds[0]
        rank = order.rank
        if rank is None and order.seed is not None:
            rank = drawn.randrange(world_size)
        phase = order.phase
        if phase is None and order.seed is not None and kind not in AGENT_KINDS:
            fitting = [candidate for candidate in DRAWN_PHASES if _fits(kind, candidate)]
            phase = drawn.choice(fitting or phases_of(kind))
        seed = None if order.seed is None else order.seed + number
        yield PlannedStrike(number, order.plain(kind, rank, step, phase, seed), _after_s(order, every_s, number))
        number += 1


def _after_s(order: Fault, every_s: float | None, number: int) -> float | None:
    if every_s is None:
        return order.after if number == 0 else None
    return (order.after if order.after is not None else every_s) + number * every_s


def _fits(kind: str, phase: str) -> bool:
    try:
        check_phase(kind, phase)
    except ValueError:
        return False
    return True
