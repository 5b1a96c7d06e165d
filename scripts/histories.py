"""Histories on a bad network, many of them: a seed draws them, and each must end as the guide's table says.

    python scripts/histories.py --seed 1 --histories 200 --json tests/results/histories.json
    python scripts/histories.py --seed 1 --first 17 --histories 1 --keep /tmp/history     one of them again, and keep it

Needs root (network namespaces) and /dev/net/tun. `draw` says what can happen; tests/histories.py makes it happen, and
holds it against the table. Begin with main().
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from tests import histories  # noqa: E402
from tests.e2e import harness  # noqa: E402
from tests.e2e.launchers import ForkedLaunchers  # noqa: E402
from tests.network import cut_between  # noqa: E402
from tests.nodes import why_none  # noqa: E402


def main() -> int:
    """Returns the exit code: 1 if a history ended as none may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--histories", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--keep", type=Path, help="folder; whatever a history has left stays there")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="show what is drawn")
    asked = parser.parse_args()
    numbers = range(asked.first, asked.first + asked.histories)
    if asked.list:
        for number in numbers:
            print(draw(asked.seed, number))
        return 0
    if why_none():
        print(why_none(), file=sys.stderr)
        return 2
    if asked.worker:
        return work(asked.seed, json.loads(asked.worker), asked.keep)
    return run(asked, list(numbers))


def run(asked: argparse.Namespace, numbers: list[int]) -> int:
    """Have the histories happen, several at a time, and write what came of them."""
    keep = asked.keep or Path(tempfile.mkdtemp(prefix="histories-"))
    began_s, told = time.monotonic(), []
    with ThreadPoolExecutor(asked.jobs) as pool:
        parts = [numbers[part :: asked.jobs] for part in range(asked.jobs)]

        def follow(part: list[int]) -> None:
            words = ["--seed", str(asked.seed), "--worker", json.dumps(part), "--keep", str(keep)]
            with subprocess.Popen(
                [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
            ) as worker:
                assert worker.stdout is not None
                for line in worker.stdout:
                    history = json.loads(line)
                    told.append(history)
                    _show(history, len(told), len(numbers))

        list(pool.map(follow, [part for part in parts if part]))
    bad = [history for history in told if history["problems"]]
    ends = Counter(history["end"] or "none" for history in told)
    took_s = round(time.monotonic() - began_s)
    print(f"{len(told)} histories in {took_s} s: {dict(ends)}; {len(bad)} wrong (left in {keep})")
    if asked.json:
        result = {"machine": _machine(), "seed": asked.seed, "histories": len(told), "took_s": took_s}
        head = json.dumps(result | {"wrong": len(bad), "ends": dict(ends)}, indent=1).removesuffix("\n}")
        lines = [
            json.dumps(_kept(history)) for history in sorted(told, key=lambda history: history["history"]["number"])
        ]
        asked.json.write_text(f'{head},\n "told": [\n' + ",\n".join(lines) + "\n]}\n")
    return 1 if bad or len(told) < len(numbers) else 0


def _kept(history: dict[str, Any]) -> dict[str, Any]:
    """Of a history, what is written: the seed draws the rest again."""
    drawn = draw(history["history"]["seed"], history["history"]["number"])
    names = ["end", "problems", "exit_codes", "lost", "dropped", "took_s"]
    return {"what": str(drawn)} | {name: history[name] for name in names}


def _show(history: dict[str, Any], count: int, of: int) -> None:
    text = draw(history["history"]["seed"], history["history"]["number"])
    print(
        f"[{count}/{of}] {history['end'] or 'NONE'} {history['exit_codes']} {history['took_s']} s | {text}", flush=True
    )
    for problem in history["problems"]:
        print(f"    WRONG: {problem}", flush=True)


def draw(seed: int, number: int) -> histories.History:
    """The history of that number: always the same."""
    chance = random.Random(f"{seed}/{number}")
    size = chance.choice(["3", "3", "2:3", "2:3", "2"])
    moment = chance.choice([-1, *range(2, 26, 3)])
    spells, at_s = [], 0.0
    for _ in range(chance.choice([1, 1, 2])):
        kind, for_s = chance.choice(
            [("delay", 8.0), ("loss", 8.0), ("both", 8.0), ("cut", 3.0), ("cut", 3.0), *[("cut", 20.0)] * 4]
        )
        shape, links = _shape(chance, histories.SIZES[size]) if kind == "cut" else ("all", _all(histories.SIZES[size]))
        spells.append(histories.Spell(kind, shape, links, round(at_s, 1), for_s))
        at_s += for_s + chance.choice([0.0, 0.5, 4.0])
    killed = chance.choice(["", "", "", "", "rank", "launcher"]) if moment >= 0 else ""
    return histories.History(
        *(
            seed,
            number,
            size,
            chance.random() < 0.7,
            moment,
            tuple(spells),
            killed,
            chance.randrange(histories.SIZES[size]),
        ),
        kill_at_s=round(chance.uniform(0.0, spells[0].for_s), 1),
        is_requeued=chance.random() < 0.4,
    )


def _all(nodes: int) -> tuple[tuple[int, int], ...]:
    return tuple(permutations(range(nodes), 2))


def _shape(chance: random.Random, nodes: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    one, other, *_ = chance.sample(range(nodes), nodes)
    rest = tuple(number for number in range(nodes) if number != one)
    shapes: list[tuple[str, Any]] = [
        (f"{one} | {' '.join(map(str, rest))}", cut_between(((one,), rest))),
        (f"{one} -/-> all", [(one, number) for number in rest]),
        (f"all -/-> {one}", [(number, one) for number in rest]),
        (f"{one} -/-> {other}", [(one, other)]),
        (f"{one} | {other}, not the third", [(one, other), (other, one)]),
        ("each alone", _all(nodes)),
    ]
    name, links = chance.choice(shapes)
    return name, tuple(links)


def work(seed: int, numbers: list[int], folder: Path) -> int:
    """Have these happen one after another; each is a line of JSON on stdout."""
    folder.mkdir(parents=True, exist_ok=True)
    harness.forked = ForkedLaunchers([harness.environment()])
    try:
        references = {ranks: reference(ranks, folder / f"torchrun-{os.getpid()}-{ranks}") for ranks in (2, 3)}
        for number in numbers:
            told = histories.tell(draw(seed, number), folder / f"{seed}-{number}", references)
            print(json.dumps(told.as_json()), flush=True)
    finally:
        harness.forked.close()
    return 0


def reference(ranks: int, folder: Path) -> harness.Run:
    """The undisturbed run, under torchrun."""
    return harness.start_torchrun(histories.SCRIPT, ranks, folder, ["--pace", "0"]).finish()


def _machine() -> dict[str, Any]:
    import torch

    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short=9", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True
        ).stdout.strip(),
        "cpus": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
