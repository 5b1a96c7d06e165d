"""The low priority at which a standby prepares itself, and that it can leave again without any privilege."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.starting import ROOT, wait_until_ready
from ttprun.agent.node import rank_processes
from ttprun.agent.node.rank_processes import NICE, Standby, kill_session

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
