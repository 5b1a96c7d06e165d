"""What mirrors on the next node (`--buddy node`) cost a step: FSDP2 on two nodes, namespaces of this machine.

    PYTHONPATH=. python scripts/bench/node_mirrors.py --blocks 5 --json node_mirrors.json

Jobs under torchrun and under ttprun with `--buddy` off, auto and node live at once, each on a pair of nodes of its own,
and train blocks of steps in turns. Needs root. Begin with `main`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from runs import TORCHRUN, TTPRUN, Run, formatted, headline, machine, positive, print_table, spread
from turns import BLOCK_LIMIT_S, FOLDER, Block, read_block, wait_for_standby

from tests.nodes import Nodes, why_none

NODES = 2
MODES = (TORCHRUN, "off", "auto", "node")
FIGURES = {"step_s": "a step", "cpu_step_s": "processor time of a step"}


class Job:
    """One job on two nodes of its own.

    mode   torchrun, or a value of --buddy
    """

    def __init__(self, mode: str, stack: ExitStack, folder: Path, words: list[str]) -> None:
        self.turns = folder / "turns"
        self.turns.mkdir(parents=True)
        nodes = stack.enter_context(Nodes(NODES))
        launcher, options = (TORCHRUN, []) if mode == TORCHRUN else (TTPRUN, ["--buddy", mode])
        script, words = FOLDER / "layouts.py", [f"--turns={self.turns}", *words]
        self.runs = []
        for number in range(NODES):
            where = [*nodes.rendezvous(number), *options]
            run = Run(launcher, 1, folder / str(number), where, words, script, within=nodes.inside(number))
            self.runs.append(stack.enter_context(run))
        self.runs[0].ranks = NODES
        read_block(self.runs[0], self.turns, 0)
        for run in self.runs if launcher == TTPRUN else ():
            wait_for_standby(run)

    def train(self, number: int) -> Block:
        """Train a block."""
        (self.turns / str(number)).touch()
        return read_block(self.runs[0], self.turns, number)

    def finish(self, number: int) -> None:
        """After the last block."""
        (self.turns / str(number)).touch()
        for run in self.runs:
            run.finish(BLOCK_LIMIT_S)

    def copied_bytes(self) -> int:
        """That a rank has kept on the next node for each step, by its event log; 0: nothing."""
        for run in self.runs:
            path = run.run_dir / "events.jsonl"
            events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
            for event in events:
                if event["event"] == "mirror_copied" and not event["why_not"]:
                    return int(event["bytes"]) // 2  # of two slots
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=positive, default=5)
    parser.add_argument("--block", type=positive, default=20, help="steps of a block")
    parser.add_argument("--width", type=positive, default=512, help="of the model; sets the time of a step")
    parser.add_argument("--batch-size", type=positive, default=256, help="of a rank; sets the time of a step, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if why_none():
        print(why_none(), file=sys.stderr)
        return 1
    steps = (options.blocks + 2) * options.block  # the first two warm up
    words = [f"--steps={steps}", f"--block={options.block}", f"--width={options.width}"]
    words.append(f"--batch-size={options.batch_size}")
    figures: dict[str, Any] = {"machine": machine(), "options": words}
    figures |= {name: {mode: [] for mode in MODES} for name in FIGURES}
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        jobs = {mode: Job(mode, stack, Path(root) / mode, words) for mode in MODES}
        for number in range(1, options.blocks + 2):
            for mode in MODES if number % 2 else MODES[::-1]:
                block = jobs[mode].train(number)
                taken = f"{block.step_s * 1e3:.1f} ms, {block.cpu_step_s * 1e3:.1f} ms of a processor"
                print(f"block {number}, {mode}: a step takes {taken}", flush=True)
                if number > 1:
                    figures["step_s"][mode].append(block.step_s)
                    figures["cpu_step_s"][mode].append(block.cpu_step_s)
        figures["copied_bytes"] = jobs["node"].copied_bytes()
        for job in jobs.values():
            job.finish(options.blocks + 2)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    show(figures)
    return 0


def show(figures: dict[str, Any]) -> None:
    """Print what was measured."""
    print(headline(figures["machine"]), f"{NODES} nodes of 1 rank, FSDP2", sep=", ")
    print(f"{figures['copied_bytes'] / 1e6:.1f} MB of a rank cross to the next node at each step")
    rows = [["median (least-greatest)", *(TORCHRUN if mode == TORCHRUN else f"--buddy {mode}" for mode in MODES)]]
    for name, text in FIGURES.items():
        steps = figures[name]
        rows.append([f"{text}, ms", *(formatted(spread(s * 1e3 for s in steps[mode]), 1) for mode in MODES)])
        ratios = [[ours / theirs for theirs, ours in zip(steps[TORCHRUN], steps[mode], strict=True)] for mode in MODES]
        rows.append(["  to torchrun, pairs", *(formatted(spread(of_mode), 3) for of_mode in ratios)])
    print_table(rows)


if __name__ == "__main__":
    sys.exit(main())
