"""Parts B and J: what torch and NCCL really do, without ttprun. Begin with QUESTIONS and GATES.

Each question is asked in two fresh processes with a limit of its own, so one that hangs costs its limit alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from parts import Place, Row, Task

from ttprun.device.device_errors import NCCL_VARIABLES

RANKS = Path(__file__).with_name("fact_ranks.py")
GATE_RANKS = Path(__file__).with_name("gate_ranks.py")
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_INTERESTING = re.compile(r"ncclRemoteError|ncclInternalError|ncclSystemError|NCCL error|DistBackendError|terminate")
# Without these the watchdog ends the process with the first error: nothing could be asked of it.
ALIVE = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
NONBLOCKING = {"TORCH_NCCL_USE_COMM_NONBLOCKING": "1"}
_NCCL = ("nccl",)


@dataclass(frozen=True)
class Question:
    """One question, as it is asked once.

    ask          a key of QUESTIONS of its program
    environment  further variables of both ranks
    backends     that it makes sense for
    named        what is special about it this time
    program      whose processes ask it
    """

    number: str
    ask: str
    limit_s: float = 40.0
    variant: str = ""
    named: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    backends: tuple[str, ...] = ("nccl", "hccl", "gloo")
    program: Path = RANKS

    @property
    def name(self) -> str:
        """What the report calls it."""
        return " ".join(filter(None, (self.number, self.ask, self.variant, self.named)))


QUESTIONS = [
    Question("B1", "returns"),
    Question("B2", "abort", backends=_NCCL),
    Question("B2b", "first launch", backends=_NCCL),
    Question(
        "B2b", "first launch", 60, named="CUDA_MODULE_LOADING=EAGER", environment={"CUDA_MODULE_LOADING": "EAGER"},
        backends=_NCCL,
    ),
    *(
        Question("B3", "dead peer", named=f"{which} ttprun's variables, {count}",
                 environment=variables, backends=backends)
        for count in (1, 2, 3)
        for which, variables, backends in (
            ("with", NCCL_VARIABLES, _NCCL if count > 1 else ("nccl", "hccl", "gloo")),
            ("without", {}, _NCCL),
        )
    ),
    Question("B4", "threads", backends=_NCCL),
    Question("B5", "two aborts", 50, "one after the other", backends=_NCCL),
    Question("B5", "two aborts", 50, "together", backends=_NCCL),
    Question("B6", "never came", 50, "abort", backends=_NCCL),
    Question("B6", "never came", 50, "abort", "not blocking", NONBLOCKING, _NCCL),
    Question("B6", "never came", 50, "sockets", backends=_NCCL),
    Question("B6", "never came", 50, "shutdown", backends=_NCCL),
]  # fmt: skip

_ON_CARDS = ("nccl", "gloo")
GATES = [
    Question("Q1", "abort under a gate", 60, "alone", backends=_ON_CARDS, program=GATE_RANKS),
    Question("Q1", "abort under a gate", 60, "a second one behind the gate", backends=_ON_CARDS, program=GATE_RANKS),
    Question("Q3", "first launch behind a gate", 30, backends=_ON_CARDS, program=GATE_RANKS),
    Question("Q4", "memory given back", 20, backends=_ON_CARDS, program=GATE_RANKS),
    Question("Q5", "opened on the device", 30, backends=_ON_CARDS, program=GATE_RANKS),
    Question("Q6", "price of waits", 150, backends=_ON_CARDS, program=GATE_RANKS),
    Question("Q7", "small collective", 20, backends=_ON_CARDS, program=GATE_RANKS),
    Question("Q8", "mirror in shared memory", 60, backends=_ON_CARDS, program=GATE_RANKS),
    *(
        Question("Q9", "damage by an abort", 30, named=f"{count} of 3", backends=_ON_CARDS, program=GATE_RANKS)
        for count in (1, 2, 3)
    ),
]


def ask_all(place: Place) -> list[Task]:
    """Part B."""
    return _tasks(QUESTIONS, place)


def ask_gates(place: Place) -> list[Task] | str:
    """Part J: would a gate on the stream do in place of a blocked host, and what do the host's waits cost?"""
    return _tasks(GATES, place) or "no abort ends an operation there"


def _tasks(questions: list[Question], place: Place) -> list[Task]:
    return [
        Task(question.name, question.limit_s, partial(ask, question, place))
        for question in questions
        if place.backend in question.backends
    ]


def ask(question: Question, place: Place, limit_s: float) -> Iterator[Row]:
    """Ask one question. It fails if rank 0 does not come to its end; what it has said until then is reported."""
    with tempfile.TemporaryDirectory(prefix="ttprun-fact-", ignore_cleanup_errors=True) as folder:
        code, took_s, facts, errors = _ask(question, place, Path(folder), limit_s)
    for fact in facts:
        yield Row(f"{question.name}: {fact['what']}", "seen", fact["found"], values=fact["values"])
    texts = tuple(line[:300] for line in errors if _INTERESTING.search(line))[:6]
    if code == 0 and facts:
        if texts:
            yield Row(f"{question.name}: torch wrote", "seen", f"{len(texts)} lines", texts)
        return
    how = f"no end within {limit_s:.0f} s" if code is None else f"rank 0 ended with {_exit(code)} after {took_s:.1f} s"
    yield Row(question.name, "FAILED", how, texts or tuple(line[:300] for line in errors[-12:]))


def _ask(
    question: Question, place: Place, folder: Path, limit_s: float
) -> tuple[int | None, float, list[dict[str, str]], list[str]]:
    """Run both ranks; returns rank 0's exit code (None: it had to be ended), seconds, facts, and lines of stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        sys.executable,
        str(question.program),
        f"--ask={question.ask}",
        f"--variant={question.variant}",
        f"--port={port}",
    ]
    words += [f"--device={place.kind}", f"--backend={place.backend}", f"--folder={folder}"]
    words += ["--share"] if place.shares else []
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_NCCL_")}
    environment = inherited | ALIVE | dict(question.environment)
    began_s = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in (0, 1):
            with open(folder / f"out{rank}", "wb") as out, open(folder / f"err{rank}", "wb") as err:
                ranks.append(
                    subprocess.Popen(
                        [*words, f"--rank={rank}"], env=environment, cwd=folder, stdin=subprocess.DEVNULL,
                        stdout=out, stderr=err, preexec_fn=_die_with_parent,
                    )
                )  # fmt: skip
        try:
            code = ranks[0].wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs keeps a killed process
                process.wait(10)
    lines = (folder / "out0").read_text(errors="replace").splitlines()
    facts = [json.loads(line.removeprefix("FACT ")) for line in lines if line.startswith("FACT ")]
    return code, time.monotonic() - began_s, facts, (folder / "err0").read_text(errors="replace").splitlines()


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
