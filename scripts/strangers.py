#!/usr/bin/env python3
"""Programs that nobody here wrote, unchanged: under torchrun, under ttprun, and under ttprun with two ranks killed.

    .venv/bin/python scripts/strangers.py                  all programs; renews strangers/results.json
    .venv/bin/python scripts/strangers.py --only 'trl sft' this one; the others' results stay as they are
    .venv/bin/python scripts/strangers.py --list           what there is

Which ones: strangers/programs.yaml. They come from the package registry, into environments of their own under the
user's cache folder (some GB); data and models are made (strangers/data.py), and no hub is asked. After each optimizer
step each rank adds the digest of its parameters and of the optimizer's state to its trace (strangers/recorder). The
traces of the three runs are compared, whole. The table of `ttprun guide frameworks` is made from the results.
Begin with `try_program`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import yaml

from ttprun.chaos.trial.compare import WITHOUT_LOSS
from ttprun.chaos.trial.twins import Launch, Twin, clean_environment

HERE = Path(__file__).resolve().parent / "strangers"
REPOSITORY = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ttprun-strangers"
RESULTS = HERE / "results.json"
PAGE = REPOSITORY / "ttprun" / "guide" / "frameworks.md"
HEADER = "| program | steps | without a fault | two ranks killed | recovery |\n|---|---|---|---|---|\n"
BELOW = "\n\nThe seconds are those of a busy machine"  # begins what follows the table and its reasons
MOST_OF_REASON = 300  # characters; the whole is in the results
LIMIT_S = 400.0  # of one launch
# Without a device, a hub, a tracker or a screen.
QUIET = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled", "MPLBACKEND": "agg", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
# When ranks are killed: the share of the program's steps, the rank, and the moment in the step.
KILLS = ((0.4, 1, "backward"), (0.7, 0, "forward"))
Trace = list[tuple[str, str]]  # process and digest, a step each


@dataclass(frozen=True)
class Launched:
    """What one launch came to.

    traces      by rank
    last_words  why it has failed, "" if it has not
    """

    twin: Twin
    traces: dict[int, Trace]
    last_words: str

    @property
    def digests(self) -> dict[int, list[str]]:
        """What each rank's steps came to."""
        return {rank: [digest for _, digest in trace] for rank, trace in self.traces.items()}


def try_program(name: str, program: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """The three runs of a program, compared; returns its row of the results."""
    environment = program.get("environment", "common")
    python = prepare_environment(environment)
    data = place / "data"
    data.mkdir(parents=True)
    for part in program.get("copy", ()):
        of = CACHE / "by-hand" / program["of"] / part
        (data / part).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if of.is_dir() else shutil.copy)(of, data / part)
    if "data" in program:
        env = {**os.environ, **QUIET, "PYTHONPATH": str(HERE / "recorder"), "STRANGERS_TRACE": str(place)}
        call([str(python), str(HERE / "data.py"), program["data"]], cwd=data, env=env)
    words = words_of(program, python)
    row: dict[str, Any] = {**circumstances(python), "of": named(program["of"])}
    plain = launch(program, words, python, place, "torchrun")
    steps = max(map(len, plain.traces.values()), default=0)
    row |= {"steps": steps, "seconds": round(plain.twin.took_s, 1)}
    if plain.twin.exit_code or not steps:
        return row | {"result": "does not run", "reason": f"under torchrun: {plain.last_words or plain.twin.exit_code}"}
    calm = launch(program, words, python, place, "ttprun")
    row["equal without a fault"] = not calm.twin.exit_code and calm.digests == plain.digests
    if not row["equal without a fault"]:
        again = launch(program, words, python, place, "torchrun")
        if again.digests != plain.digests:
            return row | {"result": "cannot be compared", "reason": "two runs under torchrun differ, too"}
        return row | {"result": "differs without a fault", "reason": calm.last_words}
    faults = [
        f"kill:rank={rank},step={max(1, round(share * steps))},phase={program.get('phases', {}).get(phase, phase)}"
        for share, rank, phase in KILLS
    ]
    killed = launch(program, words, python, place, "ttprun", faults)
    return row | judged(plain, killed, len(faults))


def renewed(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """The guide's page with a table of these results, and below it why a program was not exact."""
    before, _, rest = page.partition(HEADER)
    _, _, after = rest.partition(BELOW)
    lines = [line_of(name, row) for name, row in results.items()]
    reasons = [reason_of(name, row) for name, row in results.items() if row.get("reason")]
    return before + HEADER + "\n".join([*lines, "", *reasons]) + BELOW + after


def line_of(name: str, row: Mapping[str, Any]) -> str:
    """A program's line of the table."""
    equal = {True: "equal", False: "not equal"}.get(row.get("equal without a fault"), "")
    origin = row["of"].split()[0].rstrip(",")
    recovery = ", ".join(f"{seconds} s" for seconds in row.get("recovery_s", ()))
    return f"| {name} (`{origin}`) | {row['steps']} | {equal} | {row['result']} | {recovery} |"


def reason_of(name: str, row: Mapping[str, Any]) -> str:
    """An item of the list below the table, in short lines."""
    shown = textwrap.shorten(row["reason"], MOST_OF_REASON, placeholder=" ...")
    return textwrap.fill(f"* {name}: {shown}", 118, subsequent_indent="  ", break_on_hyphens=False)


def judged(plain: Launched, killed: Launched, kills: int) -> dict[str, Any]:
    """How the run with kills compares: exact, or why not."""
    incidents = [asdict(incident) for incident in killed.twin.status.incidents] if killed.twin.status else []
    recovery_s = [incident["total_s"] for incident in incidents if incident["total_s"] is not None]
    row: dict[str, Any] = {
        "incidents": [incident["rung"] for incident in incidents],
        "recovery_s": [round(seconds, 1) for seconds in recovery_s],
        "steps_lost": sum(incident["steps_lost"] or 0 for incident in incidents),
    }
    not_proved = sorted({name for incident in incidents for name in incident["not_proved"]})
    if not_proved:
        row["not proved"] = not_proved
    lossy = [incident for incident in incidents if incident["rung"] not in WITHOUT_LOSS or incident["steps_lost"]]
    reason = next((incident["reason"] for incident in lossy), "")
    if killed.twin.exit_code:
        return row | {
            "result": "refused",
            "reason": reason or killed.last_words or f"exit code {killed.twin.exit_code}",
        }
    if len(incidents) < kills:
        return row | {"result": "not tried", "reason": f"only {len(incidents)} of {kills} kills struck"}
    if lossy:
        ends = {rank: (trace[-1:], killed.digests.get(rank, [])[-1:]) for rank, trace in plain.digests.items()}
        same = all(end == other for end, other in ends.values())
        cost = "steps lost" if row["steps_lost"] else "all restarted"
        return row | {"result": f"{cost}, same end" if same else "differs", "reason": reason}
    off = [rank for rank, trace in plain.digests.items() if not is_covered(trace, killed.traces.get(rank, []))]
    return row | ({"result": "differs", "reason": f"the steps of rank {off[0]}"} if off else {"result": "exact"})


def is_covered(wanted: Sequence[str], trace: Trace) -> bool:
    """Whether the processes that were a rank, one after the other, have taken all of its steps and no other.

    A replacement's first lines may be those of its replay, which is not training: what counts begins where it goes on
    with a step that its predecessor has come to, at the latest with the next one.
    """
    done = 0
    for _, lines in groupby(trace, key=lambda line: line[0]):
        digests = [digest for _, digest in lines]
        starts = [(skip, wanted.index(digest)) for skip, digest in enumerate(digests) if digest in wanted]
        fits = (
            begin
            for skip, begin in starts
            if begin <= done and digests[skip:] == list(wanted[begin:][: len(digests) - skip])
        )
        begin = next(fits, None)
        if begin is None:
            return False
        done = begin + len(digests) - next(skip for skip, at in starts if at == begin)
    return done == len(wanted)


def launch(
    program: Mapping[str, Any], words: Sequence[str], python: Path, place: Path,
    launcher: Literal["torchrun", "ttprun"], faults: Sequence[str] = (),
) -> Launched:  # fmt: skip
    """One run, in a folder that holds the program's data and nothing else."""
    folder = place / f"{launcher}{len(list(place.iterdir()))}"
    shutil.copytree(place / "data", folder / "work")
    (folder / "trace").mkdir()
    options = ["--standalone", "--nproc-per-node", str(program.get("ranks", 2))]
    if launcher == "ttprun":
        options += ["--save-dir", str(folder / "saved"), "--resume", "off", *program.get("options", ())]
        options += ["--allow-faults", *(f"--fault={fault}" for fault in faults)]
    env = clean_environment() | QUIET | {name: str(value) for name, value in program.get("env", {}).items()}
    home = str(place / "home")
    env |= {"HOME": home, "XDG_CACHE_HOME": home, "STRANGERS_TRACE": str(folder / "trace")}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "recorder"), *program.get("path", [])])
    twin = Launch(launcher, options, words, env, LIMIT_S, folder / "work", str(python)).run(folder)
    traces = {int(path.name.removeprefix("rank")): trace_of(path) for path in sorted((folder / "trace").iterdir())}
    return Launched(twin, traces, (twin.problem or last_words(folder)) if twin.exit_code else "")


def trace_of(path: Path) -> Trace:
    """The lines of a rank's trace."""
    rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    return [(process, digest) for process, digest in rows]


def last_words(folder: Path) -> str:
    """The last line that tells of an error, of what ranks and launcher have written."""
    logs = [folder / "launcher.log", *sorted(folder.glob("logs/*/attempt_*/*/stderr.log"))]
    lines = [line for path in logs for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    errors = [line for line in lines if re.search(r"Error\b|error:", line) and "ChildFailedError" not in line]
    return (errors or lines or [""])[-1].strip()[:400]


def words_of(program: Mapping[str, Any], python: Path) -> list[str]:
    """What follows the launcher's options: the program and its arguments."""
    start, of = f"{program['start']} {program.get('and', '')}", program["of"]
    if "{sdist}" in start:
        start = start.replace("{sdist}", str(unpacked(of, python)))
    start = start.replace("{bin}", str(python.parent)).replace("{written}", str(HERE / "written"))
    return shlex.split(start.replace("{by-hand}", str(CACHE / "by-hand" / of)))


def named(of: str) -> str:
    """Where a program comes from, with the commit of a repository."""
    copied = CACHE / "by-hand" / of
    if not copied.exists():
        return of
    asked = ["git", "-C", str(copied), "log", "-1", "--format=%h, %cs"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    return f"{of} {done.stdout.strip()}"


def unpacked(requirement: str, python: Path) -> Path:
    """The folder of a package's sdist."""
    folder = CACHE / "sdists" / requirement
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as made:
            name = requirement.partition("==")[0]
            pip = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "--dest", made]
            call([*pip, requirement])
            shutil.unpack_archive(next(Path(made).glob("*.tar.gz")), folder, filter="data")
    return next(folder.iterdir())


def prepare_environment(name: str) -> Path:
    """The Python of a virtual environment of the table, made or brought up to date; ttprun in it is this checkout."""
    wanted = table()["environments"][name]
    folder = CACHE / "venvs" / name
    stamp, stated = folder / "installed.json", json.dumps([wanted, str(REPOSITORY), sys.version])
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != stated:
        print(f"  making the environment '{name}' (some minutes)", flush=True)
        call([sys.executable, "-m", "venv", str(folder)])
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        call([*pip, "--editable", str(REPOSITORY), *wanted["packages"]])
        if "alone" in wanted:
            call([*pip, "--no-deps", *wanted["alone"]])
        for pattern in wanted.get("remove", ()):
            for path in folder.glob(f"lib/*/site-packages/{pattern}"):
                path.unlink()
        stamp.write_text(stated, encoding="utf-8")
    return python


def call(words: Sequence[str], **how: Any) -> None:
    """Run a command, and end with its output if it fails."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **how)
    if done.returncode:
        raise SystemExit(f"error: this failed: {shlex.join(words)}\n{done.stdout[-3000:]}")


def circumstances(python: Path) -> dict[str, str]:
    """Commit, date and versions."""
    describe = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
    asked = "import platform, importlib.metadata as m; print(platform.python_version(), m.version('torch'))"
    versions = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    return {"date": today, "commit": commit, "python": versions[0], "torch": versions[1]}


def table() -> dict[str, Any]:
    """strangers/programs.yaml."""
    loaded: dict[str, Any] = yaml.safe_load((HERE / "programs.yaml").read_text(encoding="utf-8"))
    return loaded


def main() -> int:
    """Try what is asked for, and renew its results; returns 1 if a program was not recovered exactly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this program; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the programs' names")
    parser.add_argument("--keep", type=Path, help="a folder for all that the launches leave")
    asked = parser.parse_args()
    programs = table()["programs"]
    unknown = [name for name in asked.only or () if name not in programs]
    if unknown:
        print(f"error: there is no program '{unknown[0]}'; --list names all", file=sys.stderr)
        return 2
    if asked.list:
        print(*programs, sep="\n")
        return 0
    exact = True
    for name in asked.only or programs:
        print(f"{name} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix="ttprun-strangers-") as place:
            kept = Path(place)
            if asked.keep is not None:
                kept = asked.keep / name.replace(" ", "-")
                shutil.rmtree(kept, ignore_errors=True)
            row = try_program(name, programs[name], kept)
        results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        results[name] = row
        ordered = {program: results[program] for program in programs if program in results}
        RESULTS.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8"), ordered), encoding="utf-8")
        exact &= row["result"] == "exact"
        print(f"  {row['result']}; {row.get('recovery_s', '')} s; {row.get('reason', '')}", flush=True)
    return int(not exact)


if __name__ == "__main__":
    raise SystemExit(main())
