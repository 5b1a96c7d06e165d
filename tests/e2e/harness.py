"""Run a script under ttprun or torchrun, break it on purpose, and compare what came of it with an undisturbed run.

Tests get the functions here through the fixtures of conftest.py. Begin with `Launch`.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import psutil

from tests import simulated_npu
from tests.e2e.launchers import ForkedLaunchers, ForkedProcess

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "tests" / "scripts"
EPOCHS = "epochs_dataloader.py"  # 42 steps
WHILE_TRUE = "while_true_get_batch.py"  # 40 steps
TRAINER = "trainer_class.py"
TWO_OPTIMIZERS = "iter_next_two_optimizers.py"
PLAIN = "plain_tensors.py"  # 40 steps
NOT_PROVED = ("dear_study.py",)  # of no other script is anything named as not proved
RUN_LIMIT_S = 360.0  # against hanging: most runs take 5 to 10 s, the longest 60
ORPHAN_LIMIT_S = 5.0
# Left by an outer launcher, set by a person, or by pytest and torch in the tests' process.
FOREIGN = re.compile(
    r"(PYTEST|TORCHINDUCTOR|PET|TTPRUN|TORCHELASTIC|TORCH_ELASTIC|GROUP|ROLE|MASTER)_|(LOCAL_)?(RANK|WORLD_SIZE)$|TORCH_HOME$"
)

_GLOO = "[Gloo] Rank "  # some releases say on stdout that a group has connected; after a repair they say it again


def ttprun(*words: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """One of ttprun's other commands; STDIN is no variable."""
    return subprocess.run(
        [sys.executable, "-m", "ttprun", *words],
        input=variables.pop("STDIN", ""), cwd=folder, env=environment() | variables,
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def command(folder: Path, *words: str, **variables: str) -> tuple[int, list[str]]:
    """The exit code of one of ttprun's commands, and what it has written."""
    done = ttprun(*words, folder=folder, **variables)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@dataclass
class Run:
    """A run that has ended.

    exit_code  of the launcher; -N if signal N ended it, None while it lives
    stdout     local rank -> lines, of all attempts and replacements in their order
    stderr     the same
    status     status.json at the end; {} under torchrun
    events     events.jsonl, in order; [] under torchrun
    final      SHA-256 of final.pt, None if the script has written none
    output     what the launcher itself wrote (stdout and stderr), its ranks' output not among it
    pids       rank -> the pids that it had according to status.json, in order
    faults     as they were ordered
    shared_memory  names that came into /dev/shm while it ran, of whatever process
    """

    script: str
    folder: Path
    exit_code: int | None
    stdout: dict[int, list[str]]
    stderr: dict[int, list[str]]
    status: dict[str, Any]
    events: list[dict[str, Any]]
    final: str | None
    output: str = ""
    pids: dict[int, list[int]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    shared_memory: set[str] = field(default_factory=set)

    @property
    def counts(self) -> list[int]:
        """How often each sample was trained on, as rank 0 prints it."""
        (line,) = [line for line in self.stdout[0] if line.startswith("counts ")]
        return list(ast.literal_eval(line.removeprefix("counts ")))

    @property
    def process_counts(self) -> list[int]:
        """How many processes each rank has had, by rank; exact: from the event log."""
        started = [event["rank"] for event in self.events if event["event"] == "rank_started"]
        return [started.count(rank) for rank in sorted(set(started))]

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """The incidents of the status, in the order in which they began."""
        return list(self.status.get("incidents", ()))

    @property
    def hashes(self) -> dict[int, list[str]]:
        """Rank -> the lines in which the script printed a SHA-256."""
        return {rank: [line for line in lines if " sha256 " in line] for rank, lines in self.stdout.items()}

    @property
    def last_words(self) -> str:
        """How the launcher says that the job has ended, in one line."""
        return self.output[self.output.rindex("ttprun: the job has ended") :].replace("\nttprun: ", " ")

    def story(self) -> str:
        """What a person needs to see why this run was not as expected."""
        parts = [f"{self.script} in {self.folder}: exit code {self.exit_code}, faults {list(self.faults)}"]
        parts += [f"incident {json.dumps(incident)}" for incident in self.incidents]
        parts += [f"event {json.dumps(event)}" for event in self.events[-20:]]
        for rank in sorted(self.stderr):
            parts += [f"rank {rank} stderr | {line}" for line in self.stderr[rank][-12:]]
            parts += [f"rank {rank} stdout | {line}" for line in self.stdout.get(rank, [])[-2:]]
        parts += [f"launcher | {line}" for line in self.output.splitlines()[-30:]]
        return "\n".join(parts)


class Launch:
    """A launcher that runs: `ttprun` or torchrun on one script, in a folder of its own.

    module       of the launcher
    script       a file of tests/scripts; or a module or a command, as options say
    ranks        local ranks
    folder       empty or absent; gets logs/, out/ and launcher.log
    options      further options of the launcher; they win over ours
    script_args  further arguments of the script
    run_dir      where the launcher writes its status, None under torchrun
    faults       as they were ordered
    out          where the script writes, default: out/ in the folder
    device       "npu": its processes have the simulated NPU as torch_npu
    within       a command that runs the launcher, which keeps its pid: on another node, say
    """

    def __init__(
        self,
        module: str,
        script: str,
        ranks: int,
        folder: Path,
        options: Sequence[str] = (),
        script_args: Sequence[str] = (),
        run_dir: Path | None = None,
        faults: Sequence[str] = (),
        out: Path | None = None,
        device: str = "",
        within: Sequence[str] = (),
    ) -> None:
        self.script, self.folder, self.run_dir, self.faults = script, folder, run_dir, tuple(faults)
        self._out = out or folder / "out"
        self.pids: dict[int, list[int]] = {}
        self._shared_memory = set(os.listdir("/dev/shm"))
        folder.mkdir(parents=True, exist_ok=True)
        logs = folder / "logs"
        named = str(SCRIPTS / script) if script.endswith(".py") else script
        launcher = [*within, sys.executable, "-m", module, "--nproc-per-node", str(ranks), "--log-dir", str(logs)]
        words = [*launcher, "--redirects", "3", *options, named, f"--out={self._out}", *script_args]
        self.process = _start(words, folder, environment(device), len(within))
        self._watcher = threading.Thread(target=self._watch_pids, daemon=True)
        self._watcher.start()

    def finish(self, limit_s: float = RUN_LIMIT_S) -> Run:
        """Wait for the end and gather what the run has left. AssertionError if it takes longer than `limit_s`."""
        is_late = False
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            is_late = True
        self.stop()
        run = self._gather()
        assert not is_late, f"the run did not end within {limit_s:.0f} s\n{run.story()}"
        return run

    def stop(self) -> None:
        """End the launcher if it still lives, by SIGTERM, and after 10 s by SIGKILL; blocks for so long at most."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._watcher.join(5.0)

    def kill_agent(self) -> None:
        """SIGKILL to the launcher itself."""
        self.process.send_signal(signal.SIGKILL)

    def wait_for_line(self, rank: int, text: str, limit_s: float = 180.0) -> None:
        """Block until a line of that local rank's stdout holds `text`; AssertionError after `limit_s` or at the end."""
        self._wait_until(
            lambda: any(text in line for line in _lines(self.folder, "stdout.log").get(rank, ())),
            f"rank {rank} did not print {text!r}",
            limit_s,
        )

    def wait_for_output(self, text: str, limit_s: float = 180.0) -> None:
        """Block until the launcher itself has written `text`; AssertionError after `limit_s` or at the end."""
        log = self.folder / "launcher.log"
        self._wait_until(lambda: text in log.read_text(errors="replace"), f"the launcher did not say {text!r}", limit_s)

    def wait_for_file(self, name: str, limit_s: float = 180.0) -> None:
        """Block until the run's folder has this file, or a pattern's; AssertionError after `limit_s` or at the end."""
        self._wait_until(lambda: any(self.folder.glob(name)), f"there is no file {name}", limit_s)

    def wait_for_event(self, name: str, limit_s: float = 180.0, **fields: Any) -> None:
        """Block until the run's event log has such an event; AssertionError after `limit_s` or at the end."""
        assert self.run_dir is not None
        path, wanted = self.run_dir / "events.jsonl", {"event": name, **fields}.items()
        self._wait_until(lambda: any(wanted <= e.items() for e in _read_events(path)), f"no event {name}", limit_s)

    def wait_for_standby(self, state: str, limit_s: float = 180.0) -> None:
        """Block until the status says this of the standby; AssertionError after `limit_s` or at the end."""
        assert self.run_dir is not None
        path = self.run_dir / "status.json"
        self._wait_until(lambda: state in _read_json(path).get("standby_state", ""), f"not {state}", limit_s)

    def wait_for_rank(self, rank: int, limit_s: float = 180.0, step: int = 0, **how: Any) -> dict[str, Any]:
        """Block until the status says this of a rank, in this step or later, and return it; AssertionError as above."""
        assert self.run_dir is not None
        path, found = self.run_dir / "status.json", {}

        def is_so() -> bool:
            found.update(next((one for one in _read_json(path).get("ranks", ()) if one["rank"] == rank), {}))
            return bool(found) and how.items() <= found.items() and (found["step"] or 0) >= step

        self._wait_until(is_so, f"rank {rank} is not {how}", limit_s)
        return found

    def _wait_until(self, is_so: Callable[[], bool], otherwise: str, limit_s: float) -> None:
        give_up_at_s = time.monotonic() + limit_s
        while not is_so():
            is_over = self.process.poll() is not None or time.monotonic() > give_up_at_s
            assert not is_over, f"{otherwise}\n{self._gather().story()}"
            time.sleep(0.05)

    def _watch_pids(self) -> None:
        """Note each pid that a rank has according to status.json, until the launcher has ended."""
        while self.run_dir is not None:
            is_over = self.process.poll() is not None
            for rank in _read_json(self.run_dir / "status.json").get("ranks", ()):
                known = self.pids.setdefault(rank["rank"], [])
                if rank["pid"] is not None and rank["pid"] not in known:
                    known.append(rank["pid"])
            if is_over:
                return
            time.sleep(0.05)

    def _gather(self) -> Run:
        run = gather(self.script, self.folder, self._out, self.process.poll(), self.run_dir)
        run.output = (self.folder / "launcher.log").read_text(encoding="utf-8", errors="replace")
        run.pids, run.faults = self.pids, self.faults
        run.shared_memory = set(os.listdir("/dev/shm")) - self._shared_memory
        return run


# Who starts launchers in the present test, where that can be; None: each is a new Python.
forked: ForkedLaunchers | None = None


def _start(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], within: int
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a launcher in a folder, where its output goes to launcher.log.

    words    its command; the first `within` of them say where it runs, the next three are `python -m MODULE`
    """
    log = folder / "launcher.log"
    log.touch()
    if forked is not None and words[within + 2] == "ttprun":
        process = forked.start(words[within + 3 :], folder, log, environment, words[:within])
        if process is not None:
            return process
    with open(log, "wb") as written:
        return subprocess.Popen(
            list(words),
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def gather(script: str, folder: Path, out: Path, exit_code: int | None, run_dir: Path | None = None) -> Run:
    """What a run has left in its folder, where the script writes, and where its launcher writes its status."""
    final = out / "final.pt"
    return Run(
        script=script,
        folder=folder,
        exit_code=exit_code,
        stdout=_lines(folder, "stdout.log"),
        stderr=_lines(folder, "stderr.log"),
        status=_read_json(run_dir / "status.json") if run_dir is not None else {},
        events=_read_events(run_dir / "events.jsonl") if run_dir is not None else [],
        final=hashlib.sha256(final.read_bytes()).hexdigest() if final.exists() else None,
    )


# What the fixtures `run_ttprun`, `start_ttprun`, `undisturbed` and `replaced` are.
RunTtprun = Callable[..., Run]
StartTtprun = Callable[..., Launch]
Undisturbed = Callable[..., Run]
Replaced = Callable[..., Run]


def start_ttprun(
    script: str,
    ranks: int,
    folder: Path,
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    script_args: Sequence[str] = (),
    out: Path | None = None,
    device: str = "",
    within: Sequence[str] = (),
) -> Launch:
    """Start `ttprun` on a script.

    faults       of the form kill:rank=1,step=5,phase=backward
    options      further options of ttprun
    script_args  further arguments of the script
    out          where the script writes, default: out/ in the folder
    device       "npu": its processes have the simulated NPU
    within       as in Launch
    """
    run_dir = folder / "run"
    ours = ["--run-dir", str(run_dir)]
    if faults:
        ours.append("--allow-faults")
    for fault in faults:
        ours += ["--fault", fault]
    return Launch("ttprun", script, ranks, folder, [*ours, *options], script_args, run_dir, faults, out, device, within)


def start_torchrun(script: str, ranks: int, folder: Path, script_args: Sequence[str] = (), device: str = "") -> Launch:
    """Start plain torchrun on a script."""
    return Launch("torch.distributed.run", script, ranks, folder, script_args=script_args, device=device)


def assert_same_outcome(result: Run, reference: Run) -> None:
    """The script said the same in every rank, line by line, and ended with the same weights and exit code."""
    for rank in sorted(reference.stdout.keys() | result.stdout.keys()):
        expected, got = reference.stdout.get(rank, []), result.stdout.get(rank, [])
        difference = list(difflib.unified_diff(expected, got, "undisturbed", "this run", n=1, lineterm=""))[:40]
        assert not difference, f"rank {rank} printed other lines\n" + "\n".join(difference) + f"\n{result.story()}"
    assert result.hashes == reference.hashes, result.story()
    assert result.final == reference.final, f"final.pt differs\n{result.story()}"
    assert result.exit_code == reference.exit_code, result.story()
    is_named = bool(result.status.get("not_proved"))
    assert is_named == (result.script in NOT_PROVED), f"{result.status.get('not_proved')}\n{result.story()}"


def assert_only_replaced(result: Run, incidents: int = 1) -> None:
    """There were so many incidents, and each ended with the lost ranks replaced and no step lost."""
    assert len(result.incidents) == incidents, result.story()
    for incident in result.incidents:
        assert incident["outcome"] == "recovered", result.story()
        assert incident["rung"] == "replace", result.story()
        assert incident["steps_lost"] == 0, result.story()


def assert_recovered_by(result: Run, rungs: Sequence[str]) -> None:
    """There was an incident for each rung, in this order, and each was recovered from by it with no step lost."""
    assert [incident["rung"] for incident in result.incidents] == list(rungs), result.story()
    assert {incident["outcome"] for incident in result.incidents} == {"recovered"}, result.story()
    assert {incident["steps_lost"] for incident in result.incidents} == {0}, result.story()


def assert_survivors_kept_their_pids(result: Run) -> None:
    """Every rank that no fault was ordered for was one process from its start to its end."""
    lost = {int(found) for found in re.findall(r"rank=(\d+)", " ".join(result.faults))}
    several = {rank: pids for rank, pids in result.pids.items() if rank not in lost and len(pids) != 1}
    assert result.pids, f"status.json named no pids\n{result.story()}"
    assert not several, f"survivors had these pids: {several}\n{result.story()}"


def assert_no_orphans(result: Run) -> None:
    """No process of the run is alive and nothing of it is left in /dev/shm. Waits at most ORPHAN_LIMIT_S.

    What came into /dev/shm during the run and no process has mapped any more is taken to be the run's.
    """
    give_up_at_s = time.monotonic() + ORPHAN_LIMIT_S
    while (alive := processes_of(result.folder / "run")) and time.monotonic() < give_up_at_s:
        time.sleep(0.1)
    described = [f"{process.pid} {_command_of(process)}" for process in alive]
    assert not described, "still alive: " + "; ".join(described)
    while (left := _unmapped(result.shared_memory)) and time.monotonic() < give_up_at_s:
        time.sleep(0.1)
    assert not left, f"left in /dev/shm: {left}"


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Processes of the run: ranks, standbys, DataLoader workers. They have it in their environment, or work there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_of_run = process.cwd() == str(run_dir.parent) or process.environ().get("_TTPRUN_RUN_DIR") == str(run_dir)
            if is_of_run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end_processes_of(run_dir: Path) -> None:
    """SIGKILL to whatever of the run is still alive, so that a failed test does not slow the next one down."""
    for process in processes_of(run_dir):
        with contextlib.suppress(psutil.Error):
            process.kill()


def environment(device: str = "") -> Mapping[str, str]:
    """The environment of a launcher: ours without what would steer it, one thread a rank, and ttprun importable.

    device   "npu": also the simulated NPU, compiled if it was not; skips the test where it cannot be
    """
    clean = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    clean["OMP_NUM_THREADS"] = "1"
    try:
        distribution("ttprun")
    except PackageNotFoundError:
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, (str(REPOSITORY), clean.get("PYTHONPATH"))))
    if device == "npu":
        clean = with_simulated_npu(clean, simulated_npu.on_path())
    return clean


def with_simulated_npu(environment: Mapping[str, str], path: str) -> dict[str, str]:
    """That environment, with the simulated NPU's folder on PYTHONPATH; the ranks of a run share the devices' memory."""
    paths = filter(None, (path, environment.get("PYTHONPATH")))
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "SIMULATED_NPU_MEMORY": "npu-memory"}


def listed(name: str) -> set[str]:
    """The tests that a list in this folder names."""
    lines = (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def _lines(folder: Path, name: str) -> dict[int, list[str]]:
    """Local rank -> lines of its log files `name`: <log dir>/<run>/attempt_<n>/<local rank>/<name>."""
    found: dict[int, list[str]] = {}
    for path in sorted(folder.glob(f"logs/*/attempt_*/*/{name}"), key=_attempt):
        read = path.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in read if not line.startswith(_GLOO)]
        found.setdefault(int(path.parent.name), []).extend(lines)
    return found


def _attempt(path: Path) -> tuple[int, str]:
    return int(path.parents[1].name.removeprefix("attempt_")), str(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The complete lines of an event log; [] if there is none."""
    with contextlib.suppress(OSError):
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    return []


def _unmapped(names: set[str]) -> set[str]:
    """Those of the names in /dev/shm that are there and in nobody's memory."""
    left = names & set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            mapped = maps.read_text(errors="replace")
            left = {name for name in left if f"/dev/shm/{name}" not in mapped}
    return left


def _command_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:120]
    return "(gone)"
