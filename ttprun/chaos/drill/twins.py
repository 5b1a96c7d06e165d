"""Run a scenario's two twins, each in a folder of its own. Begin with `run_twin`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ttprun import text_hashes
from ttprun.chaos.drill.scenario import Scenario, command_of
from ttprun.config import LaunchValue
from ttprun.errors import ConfigError
from ttprun.observe.events import read_events
from ttprun.observe.status import RunStatus, read_status

GRACE_S = 45.0
_LOOK_EVERY_S = 0.5
_ANNOUNCED = "[Gloo] Rank "  # some releases of torch say on stdout that a group has connected; after a repair again
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(
    None
)  # loaded here, not between fork and exec, where another thread's lock would never be given back
# torchrun's options that say where ranks meet.
PLACES = {"standalone", "nnodes", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint"}
# Left by an outer launcher: each would change what a twin does.
FOREIGN = re.compile(r"(PET|TTPRUN|TORCHELASTIC|TORCH_ELASTIC|GROUP|ROLE|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$")


@dataclass(frozen=True)
class Twin:
    """A run that has ended.

    folder     its own: launcher.log, logs/, run/ (ttprun's run directory), and what the script wrote there
    exit_code  of the launcher; -N if signal N ended it
    took_s     seconds, start of Python included
    output     rank -> lines that it wrote to stdout, of all its processes in their order; without those of gloo
    problem    why it did not end by itself, "" if it did
    """

    folder: Path
    exit_code: int
    took_s: float
    output: dict[int, list[str]]
    problem: str = ""
    status: RunStatus | None = None
    events: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def place_for_runs(folder: str | None, prefix: str) -> Iterator[Path]:
    """A folder for all that runs leave: the named one, which is kept, or a new one, which is removed afterwards.

    Raises ConfigError if the named one is not empty.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as place:
            yield Path(place)
        return
    named = Path(folder).absolute()
    if named.exists() and (not named.is_dir() or any(named.iterdir())):
        raise ConfigError(f"--folder: '{folder}' is not empty", "name a new one")
    yield named


def run_twin(
    scenario: Scenario,
    folder: Path,
    kind: Literal["disturbed", "torchrun", "ttprun"],
    is_hopeless: Callable[[], str] = lambda: "",
) -> Twin:
    """Run the scenario's script to its end, at most `limit_s` seconds, and gather what it has left.

    kind         "disturbed": under ttprun with the faults; else without, under the launcher of that name
    is_hopeless  as for `run_launcher`
    """
    folder.mkdir(parents=True)
    run_dir = None if kind == "torchrun" else folder / "run"
    words = launcher_words(scenario, folder, kind)
    where, environment = scenario.directory or folder, _environment(scenario, kind)
    return run_launcher(words, folder, where, environment, scenario.limit_s, run_dir, is_hopeless)


def run_launcher(
    words: list[str],
    folder: Path,
    directory: str | Path,
    environment: Mapping[str, str],
    limit_s: float,
    run_dir: Path | None,
    is_hopeless: Callable[[], str] = lambda: "",
) -> Twin:
    """Run a launcher to its end, at most `limit_s` seconds, and gather what it has left.

    words        its command; its ranks' logs go to logs/ in `folder`
    directory    where it runs
    run_dir      of ttprun, None under torchrun
    is_hopeless  asked every half second: why it need not be waited for any longer, "" to go on
    """
    started = time.monotonic()
    with open(folder / "launcher.log", "wb") as log:
        process = subprocess.Popen(
            words,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    problem = _wait(process, limit_s, is_hopeless)
    status = None
    events: list[dict[str, Any]] = []
    if run_dir is not None and (run_dir / "status.json").exists():
        status = read_status(run_dir / "status.json")
        events = list(read_events(run_dir / "events.jsonl"))
    return Twin(folder, process.returncode, time.monotonic() - started, _output(folder), problem, status, events)


def launcher_words(scenario: Scenario, folder: Path, kind: str) -> list[str]:
    """The command that runs a twin, as a list of words; under ttprun it also writes settings.yaml into `folder`.

    folder   the twin's own, which exists
    kind     as for `run_twin`
    """
    words = [sys.executable, "-m", "torch.distributed.run" if kind == "torchrun" else "ttprun"]
    words += words_of(scenario.launch)
    if kind == "torchrun" and not PLACES & scenario.launch.keys():
        words.append("--standalone")  # else it takes a fixed port, which another job may have
    words += ["--log-dir", str(folder / "logs"), "--redirects", "3"]
    if kind != "torchrun":
        settings = dict(scenario.ttprun) | {"run_dir": str(folder / "run")}
        if kind == "disturbed":
            settings |= {"allow_faults": True, "faults": scenario.faults}
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        words += ["--config", str(folder / "settings.yaml")]
    return [*words, *command_of(scenario, folder)]


def words_of(launch: Mapping[str, LaunchValue]) -> list[str]:
    """torchrun's options as words of its command line."""
    words = []
    for name, value in launch.items():
        option = "--" + name.replace("_", "-")
        values = value if isinstance(value, list) else [value]
        words += [option] if value is True else [word for item in values for word in (option, str(item)) if item]
    return words


def _environment(scenario: Scenario, kind: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    environment = clean | scenario.environment
    if kind == "torchrun":  # else sets of texts come in another order than under ttprun
        environment[text_hashes.VARIABLE] = text_hashes.seed_for(environment)
    return environment


def _end_with_parent() -> None:
    """Have the kernel end the launcher, as an operator would, when the drill dies however it dies (Linux)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen[bytes], limit_s: float, is_hopeless: Callable[[], str]) -> str:
    """Wait for the end; one that takes too long is ended. An interruption of ours ends it too."""
    ends_s = time.monotonic() + limit_s
    try:
        while time.monotonic() < ends_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(_LOOK_EVERY_S, max(0.0, ends_s - time.monotonic())))
                return ""
            if why := is_hopeless():
                return why
        return f"it did not end within {limit_s:.0f} s"
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _output(folder: Path) -> dict[int, list[str]]:
    """Local rank -> lines of <log dir>/<run>/attempt_<n>/<local rank>/stdout.log, attempts in their order."""
    output: dict[int, list[str]] = {}
    for path in sorted(folder.glob("logs/*/attempt_*/*/stdout.log"), key=_attempt):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        output.setdefault(int(path.parent.name), []).extend(line for line in lines if not line.startswith(_ANNOUNCED))
    return output


def _attempt(path: Path) -> tuple[int, int]:
    return int(path.parents[1].name.removeprefix("attempt_")), int(path.parent.name)
