"""A real Slurm for tests: three nodes on this machine, without root; Debian's packages slurm-wlm and munge.

Begin with `Slurm` and `Job`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

FOLDER = Path(__file__).parent
BATCH = FOLDER.parents[1] / "configs" / "slurm" / "train.sbatch"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
_LIMIT_S = 90.0
_COMMAND_LIMIT_S = 30.0
_REVOKED_S = 3  # a job that is started again in the second in which it was ended has no valid credential


def is_installed() -> bool:
    """Whether this machine has what it takes."""
    return all(shutil.which(name) for name in ("slurmctld", "slurmd", "munged", "sbatch"))


class Slurm:
    """A Slurm with nodes 127.0.1.1, 127.0.1.2, ...; to be closed.

    folder   with a short path: a socket lies in it
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], nodes: int = 3, **settings: str) -> None:
        self.folder = folder
        self._begin = {**environment, **settings}
        up = [str(FOLDER / "up.sh"), str(folder), str(nodes), "4"]
        try:
            subprocess.run(up, env=self._begin, check=True, capture_output=True, timeout=_LIMIT_S, text=True)
        except subprocess.CalledProcessError as error:
            self.close()
            raise AssertionError(f"Slurm did not start: {error.stdout}{error.stderr}") from None
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self.environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}

    def run(self, *words: str, **variables: str) -> str:
        """Run one of Slurm's commands; returns what it writes to stdout."""
        found = subprocess.run(
            words,
            env={**self.environment, **variables},
            capture_output=True,
            timeout=_COMMAND_LIMIT_S,
            text=True,
            cwd=self.folder,
        )
        assert found.returncode == 0, f"{words}: {found.stderr}"
        return found.stdout.strip()

    def close(self) -> None:
        """End its daemons."""
        subprocess.run([str(FOLDER / "down.sh"), str(self.folder)], env=self._begin, timeout=_LIMIT_S, check=False)


class Job:
    """A job of configs/slurm/train.sbatch, in a folder of its own.

    words       the script and its arguments
    options     of sbatch
    variables   of the batch script: NNODES, RANKS_PER_NODE, ...
    """

    def __init__(
        self, slurm: Slurm, folder: Path, words: list[str], options: list[str] | None = None, **variables: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.slurm, self.folder = slurm, folder
        variables = {"RANKS_PER_NODE": "1", **variables}
        where = [f"--chdir={folder}", f"--output={folder}/job.out", "--cpus-per-task=1"]
        self.id = slurm.run("sbatch", "--parsable", *where, *(options or ()), str(BATCH), *words, **variables)

    @property
    def fields(self) -> dict[str, str]:
        """What Slurm says of it."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.slurm.run("scontrol", "show", "job", self.id)))

    @property
    def output(self) -> str:
        """What has come out, of all its starts."""
        path = self.folder / "job.out"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def outcome(self) -> dict[str, Any]:
        """What its launchers have written; {} if they have written nothing."""
        path = self.save_dir / f"outcome-{self.id}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    @property
    def save_dir(self) -> Path:
        return self.folder / f"checkpoints-{self.id}"

    @property
    def checkpoints(self) -> list[str]:
        """Names, in order."""
        return sorted(path.name for path in self.save_dir.glob("step-*"))

    def wait_until(self, is_so: Callable[[], bool], what: str, limit_s: float = _LIMIT_S) -> None:
        """Block until something is so; AssertionError after `limit_s`."""
        ends_s = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < ends_s, f"{what} is not so: {self.fields}\n{self.output[-4000:]}"
            time.sleep(0.2)

    def wait_for_output(self, text: str, times: int = 1) -> None:
        """Block until this was written so often."""
        self.wait_until(lambda: self.output.count(text) >= times, f"{text!r} ({times})")

    def finish(self) -> str:
        """Block until the job has ended for good; returns its state."""
        self.wait_until(lambda: self.fields["JobState"] in ENDED, "the end")
        return self.fields["JobState"]

    def start_again(self) -> None:
        """Block until Slurm has queued the job again, and start it now; Slurm itself waits for two minutes."""
        self.wait_until(lambda: self.fields["JobState"] == "PENDING", "queued again")
        self.slurm.run("scontrol", "update", f"JobId={self.id}", f"StartTime=now+{_REVOKED_S}")
        self.wait_until(lambda: self.fields["JobState"] != "PENDING", "started again")

    def launchers(self) -> dict[str, psutil.Process]:
        """Those that run, by the name of their node."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                words, variables = process.cmdline(), process.environ()
                is_one = [Path(word).name for word in words[1:2]] == ["ttprun"]
                if is_one and variables.get("SLURM_JOB_ID") == self.id:
                    found[variables["SLURMD_NODENAME"]] = process
        return found

    def statuses(self) -> dict[str, dict[str, Any]]:
        """What the launchers say of the job, by the name of their node."""
        paths = self.folder.glob(f"ttprun-runs/{self.id}/*/status.json")
        return {path.parent.name: json.loads(path.read_text()) for path in paths}

    def end(self) -> None:
        """Cancel it, whatever it does."""
        self.slurm.run("scancel", self.id)
        self.wait_until(lambda: self.fields["JobState"] in ENDED, "cancelled")
