"""The shim: what each rank's Python loads at its start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.options import OPTIONS
from ttprun import text_hashes
from ttprun.protocol import channel
from ttprun.protocol.board import Board
from ttprun.protocol.to_rank import Welcome

ROOT = Path(__file__).resolve().parents[2]
SHIM = str(ROOT / "ttprun" / "shim")
LOOK = "import json, os, sys; print(json.dumps({'path': os.environ.get('PYTHONPATH'), 'sys': sys.path, 'modules': sorted(sys.modules)}))"


def run(
    path: list[str], command: str = LOOK, flags: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """Python with this PYTHONPATH; its output is that of `command`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("_TTPRUN", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *flags, "-c", command], env=kept | {"PYTHONPATH": os.pathsep.join(path)} | more,
        text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip


def look(path: list[str], **more: str) -> dict[str, list[str]]:
    done = run(path, **more)
    assert done.stderr == ""
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_the_shim_takes_itself_off_the_path_so_that_a_ranks_children_are_not_hooked() -> None:
    found = look([SHIM, "/somewhere"])

    assert found["path"] == "/somewhere"
    assert SHIM not in found["sys"]


def test_the_seed_of_hashes_that_ttprun_gives_is_hidden_from_the_script_and_its_children() -> None:
    look = "import os; print(os.environ.get('PYTHONHASHSEED'), [name for name in os.environ if 'HASH_SEED' in name])"
    seen = [
        run([SHIM], look, **given | text_hashes.seeded(given)).stdout
        for given in ({}, {"PYTHONHASHSEED": "random"}, {"PYTHONHASHSEED": "7"})
    ]

    assert seen == ["None []\n", "random []\n", "7 []\n"]


def test_texts_have_the_same_hashes_in_each_rank_but_those_that_the_user_has_seeded() -> None:
    seeds = [{}, {"PYTHONHASHSEED": "random"}, {"PYTHONHASHSEED": "7"}]
    ours, again, of_random, of_user = (
        run([SHIM], "print(hash('text'))", **given | text_hashes.seeded(given)).stdout for given in [{}, *seeds]
    )
    of_user_alone = run([], "print(hash('text'))", **seeds[-1]).stdout

    assert ours == again == of_random != of_user == of_user_alone


def test_without_ttpruns_environment_the_shim_loads_nothing_of_ttprun() -> None:
    found = look([SHIM, str(ROOT)])

    assert [name for name in found["modules"] if name.split(".")[0] in ("ttprun", "torch", "numpy", "socket")] == []


def test_the_users_own_sitecustomize_runs_and_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['MINE'] = 'ran'\nwho = 'user'\n")

    done = run([SHIM, str(tmp_path)], "import os, sitecustomize; print(os.environ['MINE'], sitecustomize.who)")

    assert (done.stdout, done.stderr) == ("ran user\n", "")


def test_an_error_in_the_users_own_sitecustomize_is_said_as_python_says_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise KeyError('mine')\n")

    with_shim, without = (run([*shim, str(tmp_path)], "print('script')") for shim in ([SHIM], []))

    assert with_shim.stdout == without.stdout == "script\n"
    assert with_shim.stderr == without.stderr != ""
    assert with_shim.returncode == without.returncode == 0


@pytest.mark.parametrize("fd", ["not a number", "987"])
def test_hooks_that_cannot_be_installed_leave_the_script_alone(fd: str) -> None:
    done = run([SHIM, str(ROOT)], "print('script')", _TTPRUN_CHANNEL_FD=fd)

    assert (done.returncode, done.stdout) == (0, "script\n")
    assert done.stderr.startswith("ttprun: the hooks could not be installed, this rank is not protected")
    assert len(done.stderr.splitlines()) == 1


def test_a_broken_installation_of_ttprun_leaves_the_script_alone(tmp_path: Path) -> None:
    (tmp_path / "ttprun").mkdir()
    (tmp_path / "ttprun" / "__init__.py").write_text("raise RuntimeError('broken')\n")

    done = run([SHIM, str(tmp_path)], "print('script')", _TTPRUN_CHANNEL_FD="3")

    assert (done.returncode, done.stdout) == (0, "script\n")
    assert "RuntimeError('broken')" in done.stderr


def welcomed(
    command: str, tmp_path: Path, flags: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """A rank's Python with an agent at the other end; returns what it did and the ops that it sent."""
    ours, theirs = channel.pair()
    board_fd, _ = Board.create(1)
    record_fd, stack_fd = os.memfd_create("record"), os.memfd_create("stack")
    welcome = Welcome(0, 0, 1, 1, 1, str(tmp_path), is_replacement=False, options=replace(OPTIONS, may_rerun=False))
    ours.send(welcome, [board_fd, record_fd, stack_fd])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("_TTPRUN", "PYTHON"))}
    kept |= {
        "PYTHONPATH": os.pathsep.join([SHIM, str(ROOT)]),
        "_TTPRUN_CHANNEL_FD": str(theirs.fileno()),
        "_TTPRUN_AGENT_PID": str(os.getpid()),
    }
    done = subprocess.run(
        [sys.executable, *flags, "-c", command], env=kept, pass_fds=(theirs.fileno(),), cwd=tmp_path,
        text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    theirs.close()
    ops = [type(message).__name__ for message in ours.messages()]
    ours.close()
    os.close(board_fd)
    os.close(record_fd)
    os.close(stack_fd)
    return done, ops


def test_a_rank_greets_the_agent_and_imports_no_torch(tmp_path: Path) -> None:
    done, ops = welcomed("import sys; print('torch' in sys.modules, 'numpy' in sys.modules)", tmp_path)

    assert (done.stdout, done.stderr) == ("False False\n", "")
    assert ops == ["Present"]


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_a_python_that_skips_the_shim_says_no_hello_and_runs(flag: str, tmp_path: Path) -> None:
    done, ops = welcomed("print('script')", tmp_path, flags=(flag,))

    assert (done.returncode, done.stdout) == (0, "script\n")
    assert ops == []


def test_a_child_of_a_rank_is_no_rank(tmp_path: Path) -> None:
    child = "import os, sys; print('ttprun.rank.bootstrap.install' in sys.modules, '_TTPRUN_CHANNEL_FD' in os.environ)"
    done, ops = welcomed(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])", tmp_path)

    assert done.stdout == "False False\n"
    assert ops == ["Present"]


CHILDS_DESCRIPTORS = """
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.exists(f"/proc/self/fd/{name}"):
        print(os.readlink(f"/proc/self/fd/{name}"))
"""


def test_what_the_agent_gave_a_rank_is_not_inherited_by_its_children(tmp_path: Path) -> None:
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILDS_DESCRIPTORS!r}], close_fds=False)"

    done, _ = welcomed(start, tmp_path)

    assert [found for found in done.stdout.splitlines() if found.startswith(("socket", "/memfd"))] == []


def test_the_agent_hears_what_ended_the_script(tmp_path: Path) -> None:
    done, ops = welcomed("raise KeyError('mine')", tmp_path)

    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert ops == ["Present", "ScriptError"]


def test_a_rank_whose_agent_has_died_before_it_started_ends(tmp_path: Path) -> None:
    """Its parent is not the agent that it was started by."""
    done = run([SHIM, str(ROOT)], "print('script')", _TTPRUN_CHANNEL_FD="0", _TTPRUN_AGENT_PID="1")

    assert (done.returncode, done.stdout) == (1, "")
