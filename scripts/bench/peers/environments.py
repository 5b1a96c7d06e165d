"""Other launchers that repair a job, each in a virtual environment of its own below the user's cache folder.

Begin with `PEERS` and `prepare`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ttprun-peers"
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """One of them.

    package   with its release
    job       takes the place of the launcher
    script    train.py with the changes that it asks for
    """

    package: str
    job: Path
    script: Path


PEERS = {
    "torchft": Peer("torchft==0.2.0", HERE / "torchft_job.py", HERE / "torchft_train.py"),
    "nvrx": Peer("nvidia-resiliency-ext==0.4.1", HERE / "nvrx_job.py", HERE / "nvrx_train.py"),
}


def prepare(name: str) -> Path:
    """The Python of a peer's environment, which is made if it is not there. Ends the program if that fails."""
    wanted = [TORCH, PEERS[name].package, "numpy"]
    folder = CACHE / name
    python, stamp, stated = folder / "bin" / "python", folder / "installed.json", json.dumps([wanted, sys.version])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == stated:
        return python
    print(f"making an environment for {wanted[1]} (some minutes) ...", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], pip):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: {' '.join(command)} failed:\n{done.stdout[-2000:]}")
    stamp.write_text(stated, encoding="utf-8")
    return python
