"""Draw what one SIGKILL does to a job: the same script, rank and moment under torchrun and under ttprun, as two SVGs.

    python scripts/bench/timeline.py --out docs/timeline        # writes docs/timeline-light.svg and -dark.svg

Each block is a step of a rank, from the script's own log. Both runs are real, and so are the gaps. Begin with main().
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from xml.sax.saxutils import escape

import recovery
from runs import LAUNCHERS, BenchmarkError, headline, machine, positive
from steplog import read_logs

RANKS = 2
BEFORE_S, AFTER_S = 1.0, 0.7  # what is shown before the kill, and after the slower launcher's recovery
WIDTH, LEFT, RIGHT, ROW, BAR = 860, 128, 16, 26, 14
LEGEND = (
    ("step", "a step", 70),
    ("wait", "the step of the kill goes on: one rank is replaced, one waits", 410),
    ("again", "a step taken again", 0),
)
COLOURS = {
    "light": {
        "text": "#1f2328",
        "dim": "#656d76",
        "step": "#2da44e",
        "again": "#bf8700",
        "wait": "#b6c2cf",
        "kill": "#cf222e",
    },
    "dark": {
        "text": "#e6edf3",
        "dim": "#8d96a0",
        "step": "#3fb950",
        "again": "#d29922",
        "wait": "#4d5863",
        "kill": "#f85149",
    },
}


class Step(NamedTuple):
    """A step of a rank, in seconds since the kill; `is_again`: the rank had taken it before."""

    from_s: float
    to_s: float
    is_again: bool


class Shown(NamedTuple):
    """A launcher's run: what its ranks did, and how long after the kill all had a new step."""

    launcher: str
    ranks: list[list[Step]]
    next_s: float


def take(launcher: str, options: argparse.Namespace, folder: Path) -> Shown:
    """Run the benchmark's script under a launcher, and kill a rank. Raises BenchmarkError if it does not recover."""
    outcome = recovery.Outcome(launcher, RANKS, 0, 1, 0.5, 0.0, 0.0, 0.0)
    asked = Namespace(checkpoint_every=options.checkpoint_every, framework=None, script_arguments=[], standbys=1)
    asked.limit = 180.0
    recovery.measure(outcome, asked, folder)
    if outcome.problem or outcome.progress_s is None or outcome.killed_at_s is None:
        raise BenchmarkError(f"{launcher}: {outcome.problem}")
    logs = read_logs(SimpleNamespace(logs=folder / "logs", ranks=RANKS))  # type: ignore[arg-type]
    ranks = []
    for log in logs:
        steps, done, before_s = [], -1, None
        for line in log:
            at_s = line.at_s - outcome.killed_at_s
            if line.step is not None and before_s is not None:
                steps.append(Step(before_s, at_s, line.step <= done))
            done = max(done, -1 if line.step is None else line.step)
            before_s = at_s if line.step is not None else None
        ranks.append(steps)
    return Shown(launcher, ranks, outcome.progress_s)


def drawn(shown: list[Shown], colours: dict[str, str], about: str) -> str:
    """The picture of all runs, one above the other, on one scale of time."""
    end_s = max(run.next_s for run in shown) + AFTER_S
    scale = (WIDTH - LEFT - RIGHT) / (BEFORE_S + end_s)

    def x(at_s: float) -> float:
        return LEFT + (at_s + BEFORE_S) * scale

    def text(at: float, y: float, words: str, colour: str, more: str = "") -> str:
        return f'<text x="{at:.1f}" y="{y:.1f}" fill="{colours[colour]}" {more}>{escape(words)}</text>'

    def block(from_s: float, to_s: float, y: float, colour: str) -> str:
        width = max((to_s - from_s) * scale - 0.6, 0.6)
        return f'<rect x="{x(from_s):.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{colours[colour]}"/>'

    parts, y = [], 34.0
    parts.append(text(x(0), 16, "rank 1 gets SIGKILL", "kill", 'text-anchor="middle"'))
    for run in shown:
        parts.append(text(8, y + ROW, run.launcher, "text", 'font-weight="600"'))
        for rank, steps in enumerate(run.ranks):
            parts.append(text(76, y + 11 + rank * ROW, f"rank {rank}", "dim"))
            for step in steps:
                from_s, to_s = max(step.from_s, -BEFORE_S), min(step.to_s, end_s)
                if from_s < 0 < to_s:  # the step in which the rank was lost: it waits, or is replaced
                    parts.append(block(0, to_s, y + rank * ROW, "wait"))
                    to_s = 0
                if to_s > from_s:
                    parts.append(block(from_s, to_s, y + rank * ROW, "again" if step.is_again else "step"))
        words = f"{run.next_s:.1f} s until the first new step"
        parts.append(text(x(0) + 8, y + RANKS * ROW + 8, words, "text"))
        y += RANKS * ROW + 26
    parts.append(f'<path d="M{x(0):.1f} 22V{y - 14:.1f}" stroke="{colours["kill"]}" stroke-width="1.5"/>')
    at = LEFT
    for colour, words, room in LEGEND:
        parts.append(f'<rect x="{at}" y="{y - 4:.1f}" width="10" height="10" fill="{colours[colour]}"/>')
        parts.append(text(at + 16, y + 5, words, "dim"))
        at += room
    parts.append(text(8, y + 26, about, "dim", 'font-size="10"'))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 34:.0f}" role="img"'
    style = 'font-family="ui-sans-serif,system-ui,sans-serif" font-size="12"'
    title = "; ".join(f"{run.launcher}: {run.next_s:.1f} s from a SIGKILL to the first new step" for run in shown)
    return f"{head} {style}><title>{escape(title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"


def main() -> int:
    """Run both, draw, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/timeline"), help="without -light.svg and -dark.svg")
    parser.add_argument("--checkpoint-every", type=positive, default=200, help="steps, of the script (default 200)")
    options = parser.parse_args()
    about = f"{RANKS} ranks, a small model, scripts/bench/timeline.py; {headline(machine())}"
    try:
        with tempfile.TemporaryDirectory(prefix="ttprun-timeline-") as scratch:
            shown = [take(launcher, options, Path(scratch) / launcher) for launcher in LAUNCHERS]
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    for name, colours in COLOURS.items():
        options.out.with_name(f"{options.out.name}-{name}.svg").write_text(drawn(shown, colours, about))
    for run in shown:
        print(f"{run.launcher}: {run.next_s:.2f} s from the kill to the first new step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
