"""A script under torchrun and under ttprun at once, in turns of some steps each.

A machine's load changes from minute to minute, and a framework takes long to start. So both jobs live all the time,
and each waits while the other one trains a block of steps: a pair of blocks lies seconds apart. What is done so many
times a second, rather than a step, looks cheaper so, as half of the time is spent waiting. LOOPS are the scripts. Begin
with measure_pairs().
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean

import psutil
from runs import LAUNCHERS, REPOSITORY, TTPRUN, BenchmarkError, Run

FOLDER = Path(__file__).resolve().parent
TRANSFORMER = FOLDER / "transformer.py"
FRAMEWORKS = {
    "transformers": FOLDER / "transformers_trainer.py",
    "lightning": FOLDER / "lightning_trainer.py",
    "accelerate": FOLDER / "accelerate_loop.py",
}
SIMULATED_NPU = REPOSITORY / "tests" / "simulated_npu"
OF_SIMULATED_NPU = {"PYTHONPATH": f"{SIMULATED_NPU}{os.pathsep}{REPOSITORY}", "SIMULATED_NPU_MEMORY": "npu-memory"}
BLOCK_LIMIT_S = 300.0
STANDBY_LIMIT_S = 300.0
LOOK_AGAIN_S = 0.01


@dataclass(frozen=True)
class Loop:
    """A script to measure.

    block      steps of a block, about a second
    arguments  of the script
    options    of ttprun
    extra      environment of both launchers, beside what they all have
    ranks      0: as many as are asked for
    """

    what: str
    block: int
    script: Path = TRANSFORMER
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 0


def held(kind: str, samples: int, what: str, block: int = 100) -> Loop:
    """The small transformer over a dataset that keeps much in memory."""
    return Loop(what, block, arguments=(f"--held={kind}", f"--samples={samples}"))


def layout(name: str, *options: str, ranks: int = 0, block: int = 30) -> Loop:
    """Sharded parameters."""
    return Loop(name, block, FOLDER / "layouts.py", (f"--layout={name}",), options, ranks=ranks)


LOOPS = {
    "small": Loop("small transformer, loader, sampler, scheduler, clipping, list of losses", 100),
    "large": Loop("larger transformer, the same", 12, arguments=("--size=large",)),
    "large+lists": Loop(
        "the same, dataset of 4,000 lists of 64 numbers", 12, arguments=("--size=large", "--held=lists")
    ),
    "5ms": Loop("perceptron, no loader", 100, FOLDER / "train.py", ("--width=256",)),
    "50ms": Loop("larger perceptron, 12 MiB of gradients", 20, FOLDER / "train.py"),
    "38MB": Loop("38 MiB of gradients, small batches", 20, FOLDER / "train.py", ("--depth=9", "--batch-size=16")),
    "transformers": Loop("transformers.Trainer, tiny GPT-2", 25, FRAMEWORKS["transformers"]),
    "lightning": Loop("Lightning's Trainer", 25, FRAMEWORKS["lightning"]),
    "accelerate": Loop("accelerate", 25, FRAMEWORKS["accelerate"]),
    "fsdp": layout("fsdp"),
    "fsdp+unmirrored": layout("fsdp", "--buddy", "off"),
    "hsdp": layout("hsdp", ranks=4, block=15),
    "tp": layout("tp"),
    "pp": Loop("pipeline of two stages, 1F1B", 30, FOLDER / "pipelined.py"),
    "npu": Loop("small transformer on the simulated NPU", 10, arguments=("--device=npu",), extra=OF_SIMULATED_NPU),
    "lists": held("lists", 4000, "4,000 lists of 64 numbers"),
    "numbers": held("numbers", 1_280_000, "dictionary of 1.28 million numbers"),
    "paths": held("paths", 200_000, "list of 200,000 paths"),
    "samples": held("samples", 1_280_000, "list of 1.28 million (path, class)"),
    "texts": held("texts", 1_280_000, "list of 1.28 million str"),
    "table": held("table", 1_280_000, "dictionary of 1.28 million str -> int"),
    "rows": held("rows", 50_000, "list of 50,000 dictionaries"),
    "many-rows": held("rows", 1_280_000, "list of 1.28 million dictionaries", 20),
    "tokens": held("tokens", 90_000, "90,000 lists of 128 tokens", 20),
    "queue": held("queue", 1_000_000, "deque of a million str", 50),
    "objects": held("objects", 50_000, "list of 50,000 objects", 10),
    "arrays": held("arrays", 50_000, "list of 50,000 small arrays", 10),
    "names": held("names", 1_000_000, "set of a million str", 5),
    "memmap": held("memmap", 10_000_000, "numpy.memmap of 10 million numbers"),
}


@dataclass(frozen=True)
class Block:
    """Some steps of one job, means over its ranks.

    step_s, mean_step_s   a step's wall time, the median and the mean of the block
    main_step_s           processor time of the main thread in a step, the mean of the block
    median_main_step_s    the same, the median: without what is done in few of the steps
    cpu_step_s            processor time of all threads in a step
    memory_file_bytes     shared memory that a rank has touched; it is in the peak, too
    """

    step_s: float
    mean_step_s: float
    main_step_s: float
    median_main_step_s: float
    cpu_step_s: float
    peak_bytes: float
    memory_file_bytes: float


FIGURES = tuple(entry.name for entry in fields(Block))


@dataclass
class Others:
    """Peak memory of what is no rank, by launcher: of the launcher itself, and of its standbys together."""

    launcher_bytes: dict[str, int] = field(default_factory=dict)
    standbys_bytes: dict[str, int] = field(default_factory=dict)


def measure_pairs(
    loop: Loop, ranks: int, blocks: int, folder: Path, others: Others, with_standby: bool = True
) -> Iterator[dict[str, Block]]:
    """By launcher, one block of each; after a first pair that is left out. Raises BenchmarkError.

    blocks        pairs to measure
    others        is filled at the end
    with_standby  False: ttprun starts none, which saves waiting for it
    """
    ranks = loop.ranks or ranks
    with ExitStack() as stack:
        runs = {}
        for launcher in LAUNCHERS:
            turns = folder / launcher
            turns.mkdir(parents=True)
            of_script = [f"--turns={turns}", f"--block={loop.block}", f"--steps={(blocks + 1) * loop.block}"]
            options = loop.options if launcher == TTPRUN else ()
            if launcher == TTPRUN and not with_standby:
                options = (*options, "--standbys", "0")
            arguments = [*of_script, *loop.arguments]
            where = folder / f"run-{launcher}"
            run = Run(launcher, ranks, where, options, arguments, loop.script, extra=loop.extra)
            runs[launcher] = stack.enter_context(run)
            read_block(run, turns, 0)
        if with_standby:
            wait_for_standby(runs[TTPRUN])
        for number in range(1, blocks + 1):
            pair = {}
            for launcher in LAUNCHERS if number % 2 else LAUNCHERS[::-1]:
                (folder / launcher / str(number)).touch()
                pair[launcher] = read_block(runs[launcher], folder / launcher, number)
            yield pair
        for launcher in LAUNCHERS:
            look_at_others(runs[launcher], folder / launcher, others)
            (folder / launcher / str(blocks + 1)).touch()
            runs[launcher].finish(BLOCK_LIMIT_S)


def read_block(run: Run, turns: Path, number: int) -> Block:
    """Wait until all ranks have done a block. Raises BenchmarkError if they do not, or one was replaced."""
    give_up_at_s = time.monotonic() + BLOCK_LIMIT_S
    while True:
        lines = [lines_of(turns / f"rank{rank}.jsonl") for rank in range(run.ranks)]
        if all(len(of_rank) > number for of_rank in lines):
            figures = [json.loads(of_rank[number]) for of_rank in lines]
            return Block(*(mean(of_rank[name] for of_rank in figures) for name in FIGURES))
        if run.process.poll() is not None:
            raise BenchmarkError(f"{run.launcher} ended in block {number}; {run.last_words()}")
        if time.monotonic() > give_up_at_s:
            raise BenchmarkError(f"{run.launcher} did not do block {number} within {BLOCK_LIMIT_S:.0f} s")
        time.sleep(LOOK_AGAIN_S)


def lines_of(path: Path) -> list[str]:
    """Complete lines; [] if there is no file."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def look_at_others(run: Run, turns: Path, others: Others) -> None:
    """Note the peak memory of a launcher and of its processes that are no ranks."""
    ranks = {json.loads(lines_of(turns / f"rank{rank}.jsonl")[0])["pid"] for rank in range(run.ranks)}
    family = psutil.Process(run.process.pid).children(recursive=True)
    others.launcher_bytes[run.launcher] = peak_of(run.process.pid)
    others.standbys_bytes[run.launcher] = sum(peak_of(process.pid) for process in family if process.pid not in ranks)


def peak_of(pid: int) -> int:
    """A process' peak resident memory in bytes; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def wait_for_standby(run: Run) -> None:
    """Wait until the standby of ttprun works no more: it imports what the ranks have, beside their steps."""
    path = run.run_dir / "status.json"
    give_up_at_s = time.monotonic() + STANDBY_LIMIT_S
    while time.monotonic() < give_up_at_s:
        state = json.loads(path.read_text()).get("standby_state", "") if path.exists() else ""
        if "with torch alone" in state or "that the ranks have imported" in state:
            return
        time.sleep(0.2)
    raise BenchmarkError(f"no standby was ready within {STANDBY_LIMIT_S:.0f} s")


def build_simulated_npu() -> None:
    """Compile the tests' simulated device, if it was not. Raises BenchmarkError."""
    command = [sys.executable, str(SIMULATED_NPU / "torch_npu" / "build.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(done.stderr.strip())
