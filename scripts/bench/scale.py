"""What a large job costs the agent that leads: messages, bytes and time of each event by the number of nodes.

    python scripts/bench/scale.py                        # 16 to 1,024 nodes of 8 ranks
    python scripts/bench/scale.py --nodes 16 64 --again  # other sizes; nothing is written
    python scripts/bench/scale.py --draw                 # the picture once more, from the results

It writes tests/results/scale.json and docs/scale-*.svg. Each size is a job of its own, whose leader is the real one and
all else stand-ins (`scale_leader.py`, `scale_nodes.py`); the machine that decides is measured alone as well
(`scale_machine.py`). An exponent of 1 means: twice as many nodes, twice as much. Begin with `exponents`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from runs import REPOSITORY, BenchmarkError, headline, machine, positive, print_table

RESULTS = REPOSITORY / "tests" / "results" / "scale.json"
PICTURE = REPOSITORY / "docs" / "scale"
NODES = [16, 64, 256, 1024]
RANKS, TRIES = [1024, 4096, 16384], 3  # of the machine alone
EVENTS = ("start", "lost rank", "lost node", "lost tenth")
FIGURES = {
    "messages_in": "messages to the leader",
    "messages_out": "messages from the leader",
    "bytes_in": "bytes to the leader",
    "bytes_out": "bytes from the leader",
    "cpu_s": "processor time of the leader, s",
    "took_s": "time, s",
}
DRAWN = ("messages_out", "bytes_out", "cpu_s")
WIDTH, HEIGHT, GAP, TOP, LEFT = 260, 190, 40, 46, 16
COLOURS = {
    "light": {
        "text": "#1f2328",
        "dim": "#656d76",
        "line": "#d0d7de",
        "start": "#0969da",
        "lost rank": "#2da44e",
        "lost node": "#bf8700",
        "lost tenth": "#cf222e",
    },
    "dark": {
        "text": "#e6edf3",
        "dim": "#8d96a0",
        "line": "#3d444d",
        "start": "#4493f8",
        "lost rank": "#3fb950",
        "lost node": "#d29922",
        "lost tenth": "#f85149",
    },
}

Sizes = list[dict[str, Any]]


def measure(nodes: int, limit_s: float) -> dict[str, Any]:
    """One job. Raises BenchmarkError if it does not come to its end."""
    script = Path(__file__).with_name("scale_leader.py")
    done = subprocess.run(
        [sys.executable, str(script), "--nodes", str(nodes), "--limit-s", str(limit_s)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        results: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise BenchmarkError(f"{nodes} nodes: exit code {done.returncode}") from None
    if results["problem"]:
        raise BenchmarkError(f"{nodes} nodes: {results['problem']}")
    return {"nodes": nodes} | {event: results["found"][event] for event in (*EVENTS, "quiet", "status file")}


def exponents(sizes: Sequence[Mapping[str, Any]], event: str) -> dict[str, float]:
    """By figure, the slope of its logarithm over that of the number of nodes (least squares)."""
    slopes = {}
    for figure in FIGURES:
        points = [(size["nodes"], size[event].get(figure, 0)) for size in sizes]
        logs = [(math.log(nodes), math.log(value)) for nodes, value in points if value > 0]
        if len(logs) < 2:
            continue
        middle, level = (sum(axis) / len(logs) for axis in zip(*logs, strict=True))
        spread = sum((x - middle) ** 2 for x, _ in logs)
        slopes[figure] = round(sum((x - middle) * (y - level) for x, y in logs) / spread, 2)
    return slopes


def machine_alone() -> list[dict[str, float]]:
    """An incident of one rank, in the machine alone: by size, the shortest of some, as other work lengthens it."""
    tries = [_machine_once() for _ in range(TRIES)]
    return [min(same, key=lambda run: run["incident_s"]) for same in zip(*tries, strict=True)]


def _machine_once() -> list[dict[str, float]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        script = Path(__file__).with_name("scale_machine.py")
        words = [sys.executable, str(script), "--json", file.name, "--ranks", *map(str, RANKS)]
        subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
        runs: list[dict[str, float]] = json.loads(Path(file.name).read_text())["found"]
        return runs


def commit() -> str:
    """The commit that is measured; with "+" if the tree differs from it."""
    words = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def in_short(value: float) -> str:
    """A number with its unit's prefix: 1.5M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def drawn(results: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """The picture: a panel a figure, a curve an event, both axes logarithmic."""
    sizes, parts = results["sizes"], []

    def text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colours[colour]}" {more}>{escape(words)}</text>'

    nodes = [size["nodes"] for size in sizes]
    for panel, figure in enumerate(DRAWN):
        left = LEFT + panel * (WIDTH + GAP) + 36
        values = [size[event][figure] for size in sizes for event in EVENTS]
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        across, up = WIDTH - 36, HEIGHT / (high - low)

        def x(number: float, left: float = left, across: float = across) -> float:
            return left + across * math.log(number / nodes[0]) / math.log(nodes[-1] / nodes[0])

        def y(value: float, low: int = low, up: float = up) -> float:
            return TOP + HEIGHT - (math.log10(value) - low) * up

        parts.append(text(left, TOP - 14, FIGURES[figure], "text", 'font-weight="600"'))
        for power in range(low, high + 1):
            at = y(10.0**power)
            parts.append(f'<path d="M{left} {at:.1f}h{across}" stroke="{colours["line"]}"/>')
            parts.append(text(left - 6, at + 4, in_short(10.0**power), "dim", 'text-anchor="end" font-size="10"'))
        for number in nodes:
            parts.append(
                text(x(number), TOP + HEIGHT + 16, f"{number:,}", "dim", 'text-anchor="middle" font-size="10"')
            )
        for event in EVENTS:
            points = [f"{x(size['nodes']):.1f} {y(size[event][figure]):.1f}" for size in sizes]
            parts.append(f'<path d="M{"L".join(points)}" fill="none" stroke="{colours[event]}" stroke-width="2"/>')
    at, below = LEFT + 36, TOP + HEIGHT + 44
    for event in EVENTS:
        words = {"start": "start", "lost tenth": "a tenth of all nodes lost at once"}.get(event, f"a {event}")
        parts.append(f'<rect x="{at}" y="{below - 9}" width="10" height="10" fill="{colours[event]}"/>')
        parts.append(text(at + 16, below, words, "dim"))
        at += 40 + 7 * len(words)
    about = f"nodes of 8 ranks; scripts/bench/scale.py, {results['commit']}; {headline(results['machine'])}"
    parts.append(text(LEFT + 36, below + 20, about, "dim", 'font-size="10"'))
    width = LEFT + len(DRAWN) * (WIDTH + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {below + 30}" role="img"'
    style = 'font-family="ui-sans-serif,system-ui,sans-serif" font-size="12"'
    title = f"What each event costs the agent that leads, from {nodes[0]} to {nodes[-1]:,} nodes"
    return f"{head} {style}><title>{escape(title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"


def tell(results: Mapping[str, Any]) -> None:
    """Print all figures, and how they grow."""
    for event in (*EVENTS, "quiet"):
        exponents_of = results["exponents"].get(event, {})
        print(f"\n{event}")
        rows = [["", *(f"{size['nodes']:,} nodes" for size in results["sizes"]), "exponent"]]
        for figure, name in FIGURES.items():
            values = [in_short(size[event].get(figure, 0)) for size in results["sizes"]]
            rows.append([name, *values, f"{exponents_of[figure]:.2f}" if figure in exponents_of else "-"])
        print_table(rows)
    print("\nthe machine alone, one rank lost")
    alone = [[f"{run['ranks']:,}", f"{run['incident_s']:.2f} s"] for run in results["machine_alone"]]
    print_table([["ranks", "processor time"], *alone])


def main() -> int:
    """Measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=positive, nargs="+", default=NODES, help="default: 16 to 1,024")
    parser.add_argument("--limit-s", type=positive, default=600, help="for each event of a job")
    parser.add_argument("--again", action="store_true", help="measure and print, but write nothing")
    parser.add_argument("--draw", action="store_true", help="only draw and print what was measured before")
    options = parser.parse_args()
    try:
        if options.draw:
            results = json.loads(RESULTS.read_text())
        else:
            results = {"commit": commit(), "machine": machine(), "machine_alone": machine_alone()}
            results["sizes"] = [measure(nodes, options.limit_s) for nodes in options.nodes]
            results["exponents"] = {event: exponents(results["sizes"], event) for event in (*EVENTS, "quiet")}
    except BenchmarkError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    tell(results)
    if not options.again:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        for name, colours in COLOURS.items():
            PICTURE.with_name(f"{PICTURE.name}-{name}.svg").write_text(drawn(results, colours))
    return 0


if __name__ == "__main__":
    sys.exit(main())
