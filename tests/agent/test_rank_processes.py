"""Processes of the agent end with it, and with each other."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agent.starting import ROOT, wait_for_end, wait_until_ready
from ttprun.agent.node import rank_processes
from ttprun.agent.node.rank_processes import NICE, RankHandler, Standby, command_of, kill_session

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


# Without CAP_SYS_NICE, as in a container; others than root do not have it anyway.
UNPRIVILEGED = ["setpriv", "--bounding-set=-sys_nice,-sys_admin"] if os.geteuid() == 0 else []
PRINT = """
import json, os, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import psutil
from pathlib import Path
from ttprun.agent.node import rank_processes as priority
if len(sys.argv) > 2:
    priority._AUTOGROUP = Path(sys.argv[2])
def state(pid):
    group = f"/proc/{pid}/autogroup"
    nice_of_group = int(open(group).read().split()[-1]) if os.path.exists(group) and open(group).read() else None
    ioclass = int(psutil.Process(pid).ionice().ioclass)
    return [os.sched_getscheduler(pid), os.getpriority(os.PRIO_PROCESS, pid), ioclass, nice_of_group]
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
states = [state(child.pid)]
priority.lower_priority(child.pid)
while priority._pending:
    time.sleep(0.01)
states.append(state(child.pid))
priority.restore_priority(child.pid)
while priority._pending:
    time.sleep(0.01)
states.append(state(child.pid))
child.kill()
child.wait()
print(json.dumps(states))
"""


def test_without_privilege_a_low_priority_is_left_again_and_no_nice_value_is_given_that_could_not_be() -> None:
    printed = subprocess.run(
        [*UNPRIVILEGED, sys.executable, "-c", PRINT, ROOT], capture_output=True, text=True, check=True
    ).stdout

    before, low, after = json.loads(printed)
    assert after == before
    assert (low[0], low[1], low[2]) == (os.SCHED_BATCH, before[1], 3)
    assert low[3] in (None, NICE)


def test_a_launcher_in_no_autogroup_restores_the_usual_priority(tmp_path: Path) -> None:
    shown_by_the_kernel_then = tmp_path / "autogroup"
    shown_by_the_kernel_then.write_text("")

    printed = subprocess.run(
        [*UNPRIVILEGED, sys.executable, "-c", PRINT, ROOT, str(shown_by_the_kernel_then)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    before, _, after = json.loads(printed)
    assert after == before


def test_the_newest_order_is_given_again_until_the_kernel_takes_it_and_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without privilege it takes ten a second, of all processes together."""
    refused, taken, may_go_on = list[str](), threading.Event(), threading.Event()

    def answer(pid: int, nice: str) -> bool:
        if len(refused) < 4:
            refused.append(nice)
            return False
        refused.append(nice)
        taken.set()
        return True

    monkeypatch.setattr(rank_processes, "_is_answered", answer)
    monkeypatch.setattr(rank_processes.time, "sleep", lambda seconds: may_go_on.wait(60))

    rank_processes._set_autogroup(12345, "5")
    rank_processes._set_autogroup(12345, "0")
    assert refused == ["5", "0"]
    may_go_on.set()

    assert taken.wait(60)
    assert refused == ["5", "0", "0", "0", "0"]


@pytest.fixture
def standby(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    found = Standby(str(tmp_path_factory.mktemp("run")), {})
    yield found
    found.end()


def test_a_copy_of_a_standby_has_the_priority_of_a_rank_and_a_standby_that_is_waited_for_too(standby: Standby) -> None:
    wait_until_ready(standby)
    copy = standby.copy()
    assert copy is not None
    pids = (standby.process.pid, copy.process.pid)

    policies = [os.sched_getscheduler(pid) for pid in pids]
    nices = [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids]
    standby.hurry()

    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert policies == [os.SCHED_BATCH, os.SCHED_OTHER]
    assert nices[1] == ours
    assert os.sched_getscheduler(standby.process.pid) == os.SCHED_OTHER
    assert os.getpriority(os.PRIO_PROCESS, standby.process.pid) == ours
    kill_session(copy.process.pid)
    copy.process.wait()
    copy.channel.close()
