"""Full, read-only and forbidden places: the reason is said, the draft goes, what was there stays valid.

Each case is made by the kernel, in a process of its own: a small file system in a mount namespace that ends with it, a
limit on the size of files, an ordinary user.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.state.making import run_program

# Prints the error, then the checkpoint that is found, then what is in the directory.
PROGRAM = """
import os, resource, subprocess, sys
from contextlib import suppress
from pathlib import Path
from tests.state.making import DESCRIPTION, names, newest_valid, take, why_invalid
from ttprun.state.files import CannotWriteError
from ttprun.state.store import CheckpointStore

case, folder = sys.argv[1], Path(sys.argv[2])
if case.startswith("full") or case == "read-only":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
store = CheckpointStore(folder)
store.lock("r1")
take(store, 100, b"x" * 300_000)
try:
    if case == "full at the commit":
        draft = store.begin(120)
        with open(draft.path("tensors"), "wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        draft.commit(DESCRIPTION)
    elif case == "read-only":
        store.unlock()
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        CheckpointStore(folder).lock("r2")
    elif case == "forbidden":
        folder.chmod(0o500)
        if os.geteuid() == 0:  # whom no mode stops
            for path in (folder, *folder.rglob("*")):
                os.chown(path, 65534, 65534)
            os.setuid(65534)
    elif case == "file limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
    take(store, 120, b"x" * 900_000)
except CannotWriteError as error:
    print(error)
chosen = newest_valid(store)
print(chosen and chosen.name, why_invalid(store))
print(sorted(names(folder)))
"""
NEEDS_MOUNT = ("full", "full at the commit", "read-only")
FULL = "the disk is full; free some space, or name another directory with --save-dir"


@cache
def namespace() -> tuple[str, ...] | None:
    """A command whose processes may mount, unseen by others; None if this machine has none."""
    for command in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        mount = (*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt")
        if shutil.which("unshare") and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            return command
    return None


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        ("full", FULL),
        ("full at the commit", FULL),
        ("read-only", "the file system is read-only; mount it writable, or name another directory with --save-dir"),
        ("forbidden", "permission denied; make it writable for you, or name another directory with --save-dir"),
        ("file limit", "a file would be larger than is allowed; raise 'ulimit -f', or name another file system"),
    ],
)
def test_a_place_that_cannot_be_written_is_named_with_cause_and_cure(case: str, complaint: str) -> None:
    prefix = namespace() if case in NEEDS_MOUNT else ()
    if prefix is None:
        pytest.skip("nothing may be mounted here")
    # Not tmp_path: its parents are closed to the ordinary user that one case becomes.
    folder = Path(subprocess.check_output(["mktemp", "--directory"], text=True).strip())

    done = run_program(PROGRAM, case, folder, prefix=prefix)
    folder.chmod(0o700)
    shutil.rmtree(folder)

    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"no checkpoint can be written to '{folder}': {complaint}",
        "step-00000100 {}",
        "['latest', 'step-00000100']",
    ]
