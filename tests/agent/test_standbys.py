"""Standbys, and copies of them: how they become ranks, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agent.starting import LIMIT_S, ROOT, wait_until_ready
from ttprun.agent.node import standbys as module
from ttprun.agent.node.rank_processes import Standby, StandbyCopy, kill_session
from ttprun.agent.node.standbys import Standbys


@pytest.fixture
def standby(tmp_path: Path) -> Iterator[Standby]:
    found = Standby(str(tmp_path), {})
    found.hurry()  # tests have time limits
    yield found
    found.end()


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    """One that can be copied, for several tests."""
    found = Standby(str(tmp_path_factory.mktemp("run")), {})
    found.hurry()
    wait_until_ready(found)
    yield found
    found.end()


TELL = "import os, sys\nprint(sys.argv[1:], os.environ['ROLE'], os.getcwd(), __name__, flush=True)\n"
TOLD = f"['--lr', '1'] mine {os.getcwd()} __main__\n"


def test_a_standby_becomes_the_rank_that_it_is_ordered_to_be(
    standby: Standby, become_rank: Callable[..., tuple[int, str]]
) -> None:
    standby.warm_up(["json", "there_is_no_such_module"], [])

    assert become_rank(standby, TELL) == (0, TOLD)


def test_a_copy_of_a_standby_has_the_users_modules_compiled_already(
    ready: Standby, become_rank: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    script = (
        "from ttprun.capture.position import user_code as rewrite\nprint([*rewrite._prepared], [*rewrite.followed])\n"
    )
    (tmp_path / "script.py").write_text(script)
    (tmp_path / "broken.py").write_text("for\n")
    files = [str(tmp_path / name) for name in ("script.py", "broken.py", "there_is_none.py")]

    ready.warm_up([], files)
    wait_until_ready(ready)
    copy = ready.copy()
    assert copy is not None

    assert become_rank(copy, script) == (0, f"{files[:1]} {files[:1]}\n")


def test_a_copys_last_collection_frees_what_it_would_free_in_a_process_of_its_own(
    ready: Standby, become_rank: Callable[..., tuple[int, str]]
) -> None:
    """Or compiled modules that the standby had imported write a page about objects that leak."""
    ring = "class Ring:\n    def __del__(self):\n        print('freed')\nring = Ring()\nring.ring = ring\n"
    ready.warm_up([], [])
    wait_until_ready(ready)
    copy = ready.copy()
    assert copy is not None

    assert become_rank(copy, f"import gc\n{ring}del ring\ngc.freeze()\n") == (0, "freed\n")


def test_copies_of_a_standby_become_ranks_one_after_the_other_and_it_stays(
    ready: Standby, become_rank: Callable[..., tuple[int, str]]
) -> None:
    ready.warm_up(["there_is_no_such_module"], [])
    wait_until_ready(ready)
    draw = TELL + "import random, numpy\nprint(random.random(), numpy.random.random(), flush=True)\n"

    copies = [ready.copy() for _ in range(2)]
    ends = [become_rank(copy, draw) for copy in copies]

    drawn = [written.splitlines()[-1].split() for _, written in ends]
    assert [(code, written.splitlines(keepends=True)[-2]) for code, written in ends] == [(0, TOLD)] * 2
    assert all(first != second for first, second in zip(*drawn, strict=True))
    assert ready.process.poll() is None


def test_a_copy_computes_on_several_threads_what_a_fresh_process_computes(
    ready: Standby, become_rank: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    compute = """
import hashlib, sys, numpy, torch
torch.set_num_threads(2)
torch.manual_seed(0)
x, y = torch.randn(300, 300, requires_grad=True), torch.randn(8, 16, 32, 32)
(torch.nn.functional.conv2d(y, torch.ones(4, 16, 3, 3)).sum() * torch.linalg.inv(x @ x.T + torch.eye(300)).sum()).backward()
z = numpy.random.default_rng(0).random((200, 200)); z = z @ z
sys.stdout.write(hashlib.sha256(x.grad.numpy().tobytes() + z.tobytes()).hexdigest())
"""
    fresh = subprocess.run([sys.executable, "-c", compute], capture_output=True, text=True, check=True).stdout

    code, copied = become_rank(ready.copy(), compute)

    assert (code, copied) == (0, fresh)


def test_a_copy_is_a_process_of_the_agent_whose_end_is_reported_as_of_any_other(ready: Standby) -> None:
    copy = ready.copy()
    assert copy is not None
    stat = Path(f"/proc/{copy.process.pid}/stat").read_text().rpartition(")")[2].split()

    with pytest.raises(subprocess.TimeoutExpired):
        copy.process.wait(0.01)
    kill_session(copy.process.pid)

    assert stat[1:4] == [str(os.getpid()), str(copy.process.pid), str(copy.process.pid)]  # parent, group, session
    assert [copy.process.wait(LIMIT_S), copy.process.poll()] == [-signal.SIGKILL] * 2
    assert ready.process.poll() is None
    copy.channel.close()


def test_a_copy_outlives_its_standby(standby: Standby) -> None:
    wait_until_ready(standby)
    copy = standby.copy()
    assert copy is not None

    standby.end()

    assert copy.process.poll() is None
    copy.channel.close()
    assert copy.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "a thread"),
        ("import torch; torch.cuda._is_in_bad_fork = lambda: True", "a device"),
    ],
)
def test_a_standby_that_has_a_thread_or_a_device_is_not_copied_but_taken_itself(
    module: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_with_more.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), ROOT)))
    standbys, watched = Standbys(1, str(tmp_path)), list[Standby]()
    standbys.warm_up(["module_with_more"], [])
    standbys.refill(watched.append, {})
    wait_until_ready(watched[0])

    taken = standbys.take()

    assert taken is watched[0]
    watched[0].end()


def test_a_standby_that_is_as_warm_as_it_should_be_stays_ready(tmp_path: Path) -> None:
    standbys, watched = Standbys(1, str(tmp_path)), list[Standby]()
    standbys.warm_up(["json"], [])
    standbys.refill(watched.append, {})
    wait_until_ready(watched[0])

    standbys.warm_up(["json"], [])

    assert standbys.ready == 1
    standbys.end()


def test_a_standby_that_gives_no_copy_is_killed_and_another_one_is_taken(tmp_path: Path) -> None:
    standbys, watched = Standbys(2, str(tmp_path)), list[Standby]()
    standbys.refill(watched.append, {})
    for standby in watched:
        wait_until_ready(standby)
    watched[0].channel.sock.shutdown(2)

    taken = standbys.take()

    assert isinstance(taken, StandbyCopy)
    assert taken.process.pid not in [standby.process.pid for standby in watched]
    assert watched[0].process.wait(LIMIT_S) is not None
    kill_session(taken.process.pid)
    taken.process.wait()
    taken.channel.close()
    standbys.end()
    watched[0].channel.close()


def test_a_context_that_never_comes_is_given_up_with_a_line(
    ready: Standby, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "HANG_S", 0.0)
    standbys, held = Standbys(1, str(tmp_path), contexts=True), list[Standby]()
    standbys._waiting.append(ready)
    standbys.preloads.why_not, standbys.preloads.devices = "nothing else is imported", {0: 0}

    for _ in range(2):
        standbys.look_for_contexts(lambda _, copy: held.append(copy) or os.kill(copy.process.pid, signal.SIGSTOP))

    assert held[0].process.wait(LIMIT_S) is not None
    assert (len(held), standbys.preloads.devices) == (1, {})
    assert "no context on the device of local rank 0" in caplog.text
    held[0].end()


def test_a_standby_that_is_not_needed_ends_with_the_line(standby: Standby) -> None:
    standby.read()

    standby.channel.sock.shutdown(2)

    assert standby.process.wait(LIMIT_S) == 0


def test_standbys_are_refilled_and_a_ready_one_is_taken_first(tmp_path: Path) -> None:
    standbys, watched = Standbys(2, str(tmp_path)), list[Standby]()
    standbys.refill(watched.append, {})
    first, second = watched
    wait_until_ready(second)
    second.is_copyable = False

    taken = standbys.take()
    standbys.refill(watched.append, {})

    assert taken is second
    assert [standby is first or standby is second for standby in watched] == [True, True, False]
    assert standbys.take() is None
    assert (standbys.ready, standbys.is_on_its_way) == (0, True)
    second.end()
    standbys.end()
    assert [standby.process.returncode for standby in watched] == [-signal.SIGKILL] * 3


def test_a_standby_that_ends_while_it_imports_more_is_followed_by_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_kills.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), ROOT)))
    standbys, watched = Standbys(1, str(tmp_path)), list[Standby]()
    standbys.warm_up(["module_that_kills"], [])
    standbys.refill(watched.append, {})
    with pytest.raises(EOFError):
        wait_until_ready(watched[0])
    watched[0].bury()

    standbys.forget_warmth()
    standbys.refill(watched.append, {})
    wait_until_ready(watched[1])

    assert watched[0].has_started
    assert watched[1].process.poll() is None
    standbys.end()


class NotGoneYet:
    """A process that has closed its line and is not gone: it waits for a disk, or the machine is busy."""

    returncode = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired(["standby"], timeout)


def test_a_standby_whose_line_is_closed_is_asked_for_nothing_though_its_process_lives(tmp_path: Path) -> None:
    standbys, watched = Standbys(1, str(tmp_path)), []
    standbys.refill(watched.append, {})
    standby = watched[0]
    standby.hurry()
    wait_until_ready(standby)
    kill_session(standby.process.pid)
    standby.process.wait(LIMIT_S)
    standby.process = NotGoneYet(0)

    with pytest.raises((EOFError, OSError)):
        standby.read()
    standby.bury()

    assert standby.copy() is None
    assert standbys.take() is None
    assert (standbys.ready, standbys.is_on_its_way) == (0, False)
    standbys.refill(watched.append, {})
    assert len(watched) == 2
    standbys.end()
