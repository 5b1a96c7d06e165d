"""Signals that come while the launcher still imports torch, to real launchers with a torch that takes long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 100.0
CONSOLE_SCRIPT = str(Path(sys.executable).with_name("ttprun"))
SLOW_TORCH = """
import os, time
os.close(os.open(os.environ["IMPORTING"], os.O_CREAT))
{on_signal}
time.sleep(300)
"""
AS_A_DESTRUCTOR = """
class Caught:
    def __del__(self):  # Python prints what is raised here, and goes on
        time.sleep(3)
caught = Caught()
del caught
raise ImportError("no torch")
"""


def _signal_while_importing(folder: Path, command: list[str], numbers: list[int], on_signal: str) -> tuple[int, str]:
    """Start a launcher, send it signals while it imports torch; returns its exit code and what it has written."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(SLOW_TORCH.format(on_signal=on_signal))
    importing = folder / "importing"
    environment = os.environ | {"PYTHONPATH": str(folder), "IMPORTING": str(importing)}
    process = subprocess.Popen(
        [*command, "train.py"], cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    ends_s = time.monotonic() + LIMIT_S
    while not importing.exists():
        assert process.poll() is None, "the launcher has ended"
        assert time.monotonic() < ends_s, "torch is not being imported"
        time.sleep(0.01)
    for number in numbers:
        process.send_signal(number)
    errors = process.communicate(timeout=LIMIT_S)[1].decode()
    return process.returncode, errors


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)],
    ids=["TERM", "USR1", "INT"],
)
def test_a_signal_during_the_import_of_torch_ends_the_launcher_in_order(
    tmp_path: Path, number: signal.Signals, exit_code: int
) -> None:
    found = _signal_while_importing(tmp_path, [CONSOLE_SCRIPT], [number], on_signal="")

    assert found == (exit_code, f"ttprun: ended by {number.name} before any rank was started\n")


def test_a_signal_whose_exception_is_lost_in_a_destructor_ends_the_launcher_nevertheless(tmp_path: Path) -> None:
    code, errors = _signal_while_importing(tmp_path, [CONSOLE_SCRIPT], [signal.SIGUSR1], on_signal=AS_A_DESTRUCTOR)

    assert code == 143
    assert errors.endswith("ttprun: ended by SIGUSR1 before any rank was started\n")


def test_ignored_signals_stay_ignored(tmp_path: Path) -> None:
    """As `nohup ttprun train.py` asks for."""
    command = ["bash", "-c", 'trap "" HUP; exec "$0" "$@"', CONSOLE_SCRIPT]

    code, errors = _signal_while_importing(tmp_path, command, [signal.SIGHUP, signal.SIGTERM], on_signal="")

    assert (code, errors) == (143, "ttprun: ended by SIGTERM before any rank was started\n")
