"""Part F: what a step costs under ttprun beside torchrun: waits for the device, copies to the host, memory, seconds.

Begin with `costs`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jobs import last_words
from parts import Place, Row, Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))
from runs import LAUNCHERS, TORCHRUN, TTPRUN, BenchmarkError, Run

SCRIPT = Path(__file__).with_name("profiled.py")
RUN_LIMIT_S = 60.0
LAYOUTS = ("ddp", "fsdp2")


def costs(place: Place) -> list[Task] | str:
    """Part F."""
    layouts = LAYOUTS if place.kind == "cuda" else LAYOUTS[:1]
    return [Task(f"a step, {layout}", 2 * RUN_LIMIT_S, partial(compare, layout, place)) for layout in layouts]


def compare(layout: str, place: Place, limit_s: float) -> Iterator[Row]:
    """Both launchers, one after the other; a row for each figure that the script has given."""
    figures = {}
    for launcher in LAUNCHERS:
        folder = place.folder / f"cost-{layout}-{launcher}"
        arguments = [f"--layout={layout}", "--out={folder}/out", *(["--share"] if place.shares else [])]
        arguments += ["--width=64", "--depth=2"] if place.kind != "cuda" else []
        with Run(launcher, place.ranks, folder, ("--standalone",), arguments, SCRIPT) as run:
            try:
                run.finish(limit_s / 2)
            except BenchmarkError as error:
                yield Row(f"{layout}, {launcher}", "FAILED", str(error), last_words(folder))
                return
        reports = [json.loads((folder / "out" / f"rank{rank}.json").read_text()) for rank in range(place.ranks)]
        figures[launcher] = {name: statistics.mean(report.get(name, 0) for report in reports) for name in reports[0]}
    ours, theirs = figures[TTPRUN], figures[TORCHRUN]
    yield _protection(layout, place)
    ratio = ours["median_step_s"] / theirs["median_step_s"]
    text = f"{ours['median_step_s'] * 1e3:.2f} ms, torchrun {theirs['median_step_s'] * 1e3:.2f} ms: {ratio:.3f}"
    yield Row(f"a step, {layout}", "seen", text, values={"ratio": ratio} | figures)
    for name in sorted((ours.keys() | theirs.keys()) - {"median_step_s", "loss"}):
        text = f"{ours.get(name, 0):.1f} a step, torchrun {theirs.get(name, 0):.1f}"
        if name.endswith("MiB"):
            text = text.replace(" a step", " MiB")
        yield Row(f"{layout}: {name}", "seen", text)
    same = ours["loss"] == theirs["loss"]
    yield Row(
        f"{layout}: the last loss", "ok" if same else "seen", f"{ours['loss']:.9g}, torchrun {theirs['loss']:.9g}"
    )


def _protection(layout: str, place: Place) -> Row:
    """Whether what was measured was protected."""
    status = json.loads((place.folder / f"cost-{layout}-{TTPRUN}" / "run" / "status.json").read_text())
    protection = status["protection"]
    return Row(f"{layout}: protection", "ok" if protection.startswith("on") else "FAILED", protection)
