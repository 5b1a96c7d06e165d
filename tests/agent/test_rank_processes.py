"""Processes of the agent end with it, and with each other."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.starting import ROOT, wait_for_end
from ttprun.agent.node.rank_processes import RankHandler, command_of, kill_session

AGENT = f"""
import os, signal, sys
from ttprun.agent.node.rank_processes import RankHandler, Standby
from tests.options import OPTIONS
from ttprun.protocol.board import Board
from ttprun.protocol.to_rank import Welcome

def start(entry, *words):
    return {{"entrypoint": entry, "args": words, "env": {{"PYTHONPATH": {ROOT!r}}}, "stdout": None, "stderr": None,
            "local_rank_id": 0, "numa_options": None}}

rank = RankHandler(start(sys.executable, "-c", '''
import os, signal
worker = os.fork()
if worker:
    print("rank", os.getpid(), flush=True)
    print("worker", worker, flush=True)
signal.pause()
'''), "/tmp", True, True)
rank.channel.send(Welcome(0, 0, 1, 1, 1, "/tmp", False, OPTIONS),
    [Board.create(1)[0], os.memfd_create("record"), os.memfd_create("stack")])
program = RankHandler(start("/bin/sh", "-c", "echo program $$; exec sleep 600"), "/tmp", True, False)
standby = Standby("/tmp", {{}})
while not standby.is_ready:
    standby.read()
print("standby", standby.process.pid, flush=True)
print("copy", standby.copy().process.pid, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def has_ended() -> dict[str, bool]:
    """An agent starts one process of each kind and is killed: which of them have ended then."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": ROOT}
    )
    assert agent.stdout is not None
    pids = dict(agent.stdout.readline().split() for _ in range(5))
    agent.kill()
    agent.wait()
    agent.stdout.close()
    ended = {kind: wait_for_end(int(pid)) for kind, pid in pids.items()}
    for kind, has_ended in ended.items():
        if not has_ended:
            os.kill(int(pids[kind]), signal.SIGKILL)
    return ended


@pytest.mark.parametrize("kind", ["rank", "worker", "program", "standby", "copy"])
def test_nothing_that_an_agent_has_started_outlives_its_sigkill(kind: str, has_ended: dict[str, bool]) -> None:
    assert has_ended[kind]


def test_what_a_rank_has_started_ends_with_it(started: Callable[..., RankHandler], tmp_path: Path) -> None:
    (tmp_path / "script.sh").write_text("sleep 600 & echo $!; sleep 600\n")
    handler = started(str(tmp_path / "script.sh"), entry="/bin/sh", is_python=False, is_redirected=True)
    log = tmp_path / "stdout"
    waiting = select.poll()
    while not log.read_text().endswith("\n"):
        waiting.poll(10)
    child = int(log.read_text())

    kill_session(handler.proc.pid)
    handler.proc.wait()

    assert wait_for_end(child)


def test_to_kill_a_process_that_is_gone_is_no_error(started: Callable[..., RankHandler]) -> None:
    handler = started("-c", "", entry="/bin/sh", is_python=False)
    handler.proc.wait()

    kill_session(handler.proc.pid)
    handler.close(signal.SIGTERM)


def test_the_log_of_a_rank_is_continued_by_its_replacement(started: Callable[..., RankHandler], tmp_path: Path) -> None:
    for is_new, word in ((True, "first"), (False, "second")):
        handler = started("-c", f"echo {word}", entry="/bin/sh", is_new=is_new, is_python=False, is_redirected=True)
        handler.proc.wait()

    assert (tmp_path / "stdout").read_text() == "first\nsecond\n"


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (("-u", "train.py", "-u", "alice"), ["train.py", "-u", "alice"]),
        (("-u", "-m", "train", "-u"), ["-m", "train", "-u"]),
        ((), []),
    ],
)
def test_only_torchruns_own_option_is_left_out_of_what_a_replacement_runs(
    args: tuple[str, ...], command: list[str]
) -> None:
    assert command_of({"args": args}) == command
