"""What torchrun's own options and variables do to output and error files, ttprun's do as well: both are run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.harness import RUN_LIMIT_S, SCRIPTS, environment

# Different in each run: pids, times, the random part of a name, where the launcher was started.
UNIQUE = re.compile(r"\(pid: \d+\)|\d{4}-\d\d-\d\d_[\d:]+|[0-9a-f-]{36}_[a-z0-9_]{8}")
FRAME_OF_RUNPY = re.compile(r'^(\[default1\]:)?  File "<frozen runpy>".*\n', re.MULTILINE)
PET = {
    "PET_NPROC_PER_NODE": "2",
    "PET_LOG_DIR": "logs",
    "PET_REDIRECTS": "0:3,1:1",
    "PET_TEE": "0:1,1:2",
}


def start(module: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a job whose second rank fails."""
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", module, *options, str(SCRIPTS / "fails_recorded.py"), "--out=out"],
        cwd=folder, env={**environment(), **PET, "TORCHELASTIC_ERROR_FILE": "whole.json"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def left(process: subprocess.Popen[str], folder: Path) -> dict[str, Any]:
    """What a run has left and said, without what no two runs have alike."""
    try:
        out, err = process.communicate(timeout=RUN_LIMIT_S)
    finally:
        process.kill()
    files = {
        UNIQUE.sub("*", str(path.relative_to(folder))): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {"run", "out"} & set(path.relative_to(folder).parts)
    }
    errors = [json.loads(files.pop(name))["message"] for name in sorted(files) if name.endswith(".json")]
    cause = err[err.index("Root Cause") :].rpartition("====")[0].rstrip("=\n ")
    return {
        "exit code": process.returncode,
        "stdout": sorted(out.splitlines()),
        "tee": FRAME_OF_RUNPY.sub("", "".join(sorted(re.findall(r"^\[default.*\n", err, re.MULTILINE)))),
        "files": {name: FRAME_OF_RUNPY.sub("", text) for name, text in files.items()},
        "errors": [(one["message"], one["extraInfo"]["py_callstack"]) for one in errors],
        "root cause": UNIQUE.sub("*", cause),
    }


def test_output_and_error_files_by_pet_variables_are_torchruns(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "torchrun", tmp_path / "ttprun"
    processes = start("torch.distributed.run", theirs), start("ttprun", ours, "--run-dir", "run")

    expected, found = left(processes[0], theirs), left(processes[1], ours)

    assert found == expected
    assert expected["exit code"] == 1
    assert len(expected["errors"]) == 2  # of the rank, and its copy for who has started the launcher
    assert sorted(expected["files"]) == [
        f"logs/*/attempt_0/{rank}/{name}" for rank in (0, 1) for name in ("stderr.log", "stdout.log")
    ]
