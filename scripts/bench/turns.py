"""A script with a framework's loop under torchrun and under ttprun at once, in turns of some steps each.

A machine's load changes from minute to minute, and a framework takes long to start. So both jobs live all the time, and
each waits while the other one trains a block of steps: a pair of blocks lies seconds apart. Begin with measure_pairs().
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from runs import LAUNCHERS, TTPRUN, BenchmarkError, Run

FOLDER = Path(__file__).resolve().parent
FRAMEWORKS = {
    "transformers": FOLDER / "transformers_trainer.py",
    "accelerate": FOLDER / "accelerate_loop.py",
    "lightning": FOLDER / "lightning_trainer.py",
}
HELD_SCRIPT = FOLDER / "held_data.py"
HELD = ("samples", "texts", "rows", "table", "paths", "memmap", "arrow")
LAYOUTS = {
    "fsdp": (FOLDER / "layouts.py", ("--layout=fsdp",)),
    "hsdp": (FOLDER / "layouts.py", ("--layout=hsdp",)),
    "tp": (FOLDER / "layouts.py", ("--layout=tp",)),
    "pp": (FOLDER / "pipelined.py", ()),
}
FIGURES = ("median_step_s", "cpu_step_s", "peak_bytes", "memory_file_bytes")
BLOCK_LIMIT_S = 300.0
STANDBY_LIMIT_S = 300.0
LOOK_AGAIN_S = 0.01


@dataclass(frozen=True)
class Block:
    """Some steps of one job, means over its ranks: a step's median time, its processor time, and peak memory.

    memory_file_bytes   shared memory that a rank has touched; it is in the peak, too
    """

    step_s: float
    cpu_step_s: float
    peak_bytes: float
    memory_file_bytes: float


def measure_pairs(
    script: Path,
    ranks: int,
    blocks: int,
    block: int,
    folder: Path,
    arguments: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
) -> Iterator[dict[str, Block]]:
    """By launcher, one block of each; after a first pair that is left out. Raises BenchmarkError.

    blocks, block   pairs to measure, and steps of a block
    options         of ttprun
    """
    with ExitStack() as stack:
        runs = {}
        for launcher in LAUNCHERS:
            (folder / launcher).mkdir(parents=True)
            of_script = [f"--turns={folder / launcher}", f"--block={block}", f"--steps={(blocks + 1) * block}"]
            of_launcher = options if launcher == TTPRUN else ()
            where = folder / f"run-{launcher}"
            run = Run(launcher, ranks, where, of_launcher, [*of_script, *arguments], script)
            runs[launcher] = stack.enter_context(run)
            read_block(run, folder / launcher, 0)
        wait_for_standby(runs[TTPRUN])
        for number in range(1, blocks + 1):
            found = {}
            for launcher in LAUNCHERS if number % 2 else LAUNCHERS[::-1]:
                (folder / launcher / str(number)).touch()
                found[launcher] = read_block(runs[launcher], folder / launcher, number)
            yield found
        for launcher in LAUNCHERS:
            (folder / launcher / str(blocks + 1)).touch()
            runs[launcher].finish(BLOCK_LIMIT_S)


def read_block(run: Run, turns: Path, number: int) -> Block:
    """Wait until all ranks have done a block. Raises BenchmarkError if they do not, or one was replaced."""
    give_up_at_s = time.monotonic() + BLOCK_LIMIT_S
    while True:
        lines = [lines_of(turns / f"rank{rank}.jsonl") for rank in range(run.ranks)]
        if all(len(of_rank) > number for of_rank in lines):
            found = [json.loads(of_rank[number]) for of_rank in lines]
            return Block(*(mean(one[name] for one in found) for name in FIGURES))
        if run.process.poll() is not None:
            raise BenchmarkError(f"{run.launcher} ended in block {number}; {run.last_words()}")
        if time.monotonic() > give_up_at_s:
            raise BenchmarkError(f"{run.launcher} did not do block {number} within {BLOCK_LIMIT_S:.0f} s")
        time.sleep(LOOK_AGAIN_S)


def lines_of(path: Path) -> list[str]:
    """Complete lines; [] if there is no file."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


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
