"""Processes of ranks, and standbys: how they are started, copied, and given a priority.

They are what torch's subprocess handlers are, with the agent's line into each process. A standby prepares itself at a
low priority, and forks twice for a copy of it: the process in between ends, and the copy becomes a child of the agent,
which is a "child subreaper" at that moment. As such it can be waited for, and ends with the agent (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from ttprun import text_hashes
from ttprun.device.device_errors import VARIABLES
from ttprun.protocol import channel, standby_messages, to_rank
from ttprun.protocol.channel import Channel
from ttprun.protocol.reason import Reason
from ttprun.rank.bootstrap import unhooked
from ttprun.rank.bootstrap.install import AGENT_VARIABLE, CHANNEL_VARIABLE, PR_SET_PDEATHSIG

NICE = 5  # a quarter of a processor that a rank wants, too: with 19, next to busy ranks, it would never be ready
_BETWEEN_ORDERS_S = 0.11
_MOST_ORDERS = 16
_AUTOGROUP = Path("/proc/self/autogroup")
_priority_lock = threading.Lock()
_pending: dict[int, str] = {}  # process -> nice value of its autogroup, which the kernel has not taken yet


def lower_priority(pid: int) -> None:
    """Let a process, which leads a session, run when nobody else wants to. What cannot be had is done without."""
    _set_priority(pid, str(NICE), (psutil.IOPRIO_CLASS_IDLE,), os.SCHED_BATCH, NICE)


def restore_priority(pid: int) -> None:
    """Give a process our own priority again."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    _set_priority(pid, _own_autogroup_nice(), psutil.Process().ionice(), os.SCHED_OTHER, own)


def _set_priority(pid: int, of_group: str, io: tuple[int, ...], policy: int, nice: int) -> None:
    _set_autogroup(pid, of_group)
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return  # the job has been given a policy on purpose
    with contextlib.suppress(psutil.Error, OSError):
        psutil.Process(pid).ionice(*io)
    for task in _tasks_of(pid):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(task, policy, os.sched_param(0))
        if _can_be_nice():
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, task, nice)


def _own_autogroup_nice() -> str:
    """The nice value of this process's autogroup; "0" where the kernel keeps none: it may then show an empty file."""
    try:
        fields = _AUTOGROUP.read_text().split()
    except OSError:
        fields = []
    return fields[-1] if fields else "0"


def _set_autogroup(pid: int, nice: str) -> None:
    """Order it; if the kernel takes others' orders first, a thread orders it again: recovery does not wait for it."""
    with _priority_lock:
        is_pending = pid in _pending
        if _is_answered(pid, nice):
            _pending.pop(pid, None)
            return
        _pending[pid] = nice
    if not is_pending:
        threading.Thread(target=_insist, args=(pid,), name="ttprun-priority", daemon=True).start()


def _insist(pid: int) -> None:
    """Give the newest order for a process again, until it is taken, or _MOST_ORDERS times."""
    for _ in range(_MOST_ORDERS):
        time.sleep(_BETWEEN_ORDERS_S)
        with _priority_lock:
            if pid not in _pending or _is_answered(pid, _pending[pid]):
                break
    with _priority_lock:
        _pending.pop(pid, None)


def _is_answered(pid: int, nice: str) -> bool:
    """Give one order; returns whether it is of no use to give it again."""
    try:
        fd = os.open(f"/proc/{pid}/autogroup", os.O_WRONLY)
        try:
            os.write(fd, nice.encode())
        finally:
            os.close(fd)
    except BlockingIOError:  # without privilege Linux takes ten such orders a second, of all processes together
        return False
    except OSError:
        pass  # there are no such groups, or the process has ended
    return True


def _tasks_of(pid: int) -> list[int]:
    try:
        return [int(task) for task in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


@cache
def _can_be_nice() -> bool:
    """Whether this process may lower a nice value that it has raised. A thread tries it, for itself alone."""
    answers: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            own = threading.get_native_id()
            before = os.getpriority(os.PRIO_PROCESS, own)
            os.setpriority(os.PRIO_PROCESS, own, before + 1)
            os.setpriority(os.PRIO_PROCESS, own, before)
            answers.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(answers)


PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Orphans among this process's descendants become its children meanwhile, and not those of init.

    Not for good: what a rank leaves behind would wait here for somebody to take its exit code.
    Raises OSError if the kernel will not have it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class AdoptedProcess:
    """What torch and we use of subprocess.Popen, for a child that is known by its number only. For any thread.

    returncode   exit code, or minus the signal that ended it; None until somebody has waited for it
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._taking = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        with self._taking:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        code = self.poll()
        if code is None:
            with contextlib.suppress(ProcessLookupError):  # another thread has waited for it meanwhile
                pidfd = os.pidfd_open(self.pid)
                try:
                    ended = select.poll()
                    ended.register(pidfd, select.POLLIN)
                    ended.poll(None if timeout is None else timeout * 1000)
                finally:
                    os.close(pidfd)
            code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(["rank"], timeout or 0.0)
        return code


SHIM = str(Path(__file__).resolve().parents[2] / "shim")
RUN_VARIABLE = "_TTPRUN_RUN_DIR"
_COPY_LIMIT_S = 2.0  # it takes some 20 ms


def with_agent(environment: Mapping[str, str], run_dir: str) -> dict[str, str]:
    """What a rank sees beside torchrun's variables: those of the device's libraries, the agent's pid, and the run."""
    return {**environment, **VARIABLES, AGENT_VARIABLE: str(os.getpid()), RUN_VARIABLE: run_dir}


def rank_environment(environment: Mapping[str, str], run_dir: str) -> dict[str, str]:
    """What a rank's Python is started with: also the shim first in its PYTHONPATH, and a seed for its hashes."""
    inherited = environment.get("PYTHONPATH")
    path = SHIM + (os.pathsep + inherited if inherited else "")
    return with_agent(environment, run_dir) | {"PYTHONPATH": path} | text_hashes.seeded(environment)


# What says which devices a process sees -> the files of all devices of its kind.
_VISIBLE = {"ASCEND_RT_VISIBLE_DEVICES": "davinci[0-9]*", "CUDA_VISIBLE_DEVICES": "nvidia[0-9]*"}


def other_devices(environment: Mapping[str, str], at: int | None) -> tuple[str, dict[str, dict[str, str]]]:
    """The device that a process with this environment has at an index, and by their names others that it could have.

    returns   "" if it is not known; of each other one what the environment must have, in which two change places
    """
    for name, files in _VISIBLE.items():
        every = ",".join(str(number) for number, _ in enumerate(Path("/dev").glob(files)))
        seen = environment.get(name, every).split(",")
        if at is not None and "".join(seen[at:]):
            own, others = seen[at], [*seen[at + 1 :], *seen[:at]]
            return own, {to: {name: ",".join({own: to, to: own}.get(it, it) for it in seen)} for to in others}
    return "", {}


class RankHandler(SubprocessHandler):
    """A rank's process, started by torch's code for the first time, by ours for a replacement.

    channel    the agent's end of the line into it
    is_new     False: its log files are continued
    is_python  False: the entry point is the user's own program, which dies with the agent all the same
    """

    def __init__(self, start: dict[str, Any], run_dir: str, is_new: bool, is_python: bool) -> None:
        self.start = start
        self._run_dir = run_dir
        self._is_new = is_new
        self._is_python = is_python
        self.channel, self._theirs = channel.pair()
        self.channel.waits = False  # the supervisor flushes it
        plain = start if is_new else start | {"stdout": None, "stderr": None}
        try:
            super().__init__(**plain)
        except OSError:
            self.channel.close()
            raise
        finally:
            self._theirs.close()

    def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> subprocess.Popen[Any]:
        if not self._is_new:
            self._stdout, self._stderr = open_logs(self.start)
        fd = self._theirs.fileno()
        prctl = ctypes.CDLL(None).prctl
        return subprocess.Popen(
            args=args,
            env=rank_environment(env, self._run_dir) | {CHANNEL_VARIABLE: str(fd)},
            stdout=self._stdout,
            stderr=self._stderr,
            start_new_session=True,
            pass_fds=(fd,),
            preexec_fn=None if self._is_python else lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the rank, and let it know that it is meant to end; one that is gone already is no error.

        It hears of it behind the signal, so that the script's handler has its turn first.
        """
        with contextlib.suppress(ProcessLookupError):
            super().close(death_sig)
        self.channel.send(to_rank.EndAsked())
        for log in (self._stdout, self._stderr):
            if log is not None:
                log.close()


class StandbyHandler(RankHandler):
    """A standby, or a copy of one, that has become a rank."""

    def __init__(self, start: dict[str, Any], standby: Standby | StandbyCopy) -> None:
        self.start = start
        self.local_rank_id = start["local_rank_id"]
        self.proc: Any = standby.process
        self.channel = standby.channel
        self.channel.waits = False
        self._stdout, self._stderr = open_logs(start)

    def outputs(self) -> list[int]:
        """Descriptors that the process is to use as its stdout and stderr."""
        streams = (self._stdout or sys.stdout, self._stderr or sys.stderr)
        return [stream.fileno() for stream in streams]


def open_logs(start: dict[str, Any]) -> list[Any]:
    """Open a rank's log files at their ends; None where its output is not redirected."""
    return [open(path, "a") if path else None for path in (start["stdout"], start["stderr"])]


def command_of(start: dict[str, Any]) -> list[str]:
    """The Python arguments of a rank behind the interpreter's own options: [script, ...] or ["-m", module, ...]."""
    command = [str(argument) for argument in start["args"]]
    return command[1:] if command[:1] == ["-u"] else command  # torchrun puts it in front


@dataclass(frozen=True)
class StandbyCopy:
    """A process that a standby has forked, to become a rank in its place."""

    process: AdoptedProcess
    channel: Channel


class Standby:
    """A process with torch imported that waits to become a rank, or to be copied. Raises OSError if none can be had.

    It prepares itself at a low priority, and has ours again when it is waited for, or becomes a rank.

    environment   what a rank's has beside ours: .pth files and `sitecustomize` look there, and do the same as in a rank
    has_started   it has been ready once
    is_copyable   no thread and no device stands in the way of a fork
    has_hung_up   its end of the line is closed: it ends, or is of no use though it lives
    """

    has_hung_up = False

    def __init__(self, run_dir: str, environment: Mapping[str, str]) -> None:
        self.channel, theirs = channel.pair()
        fd = theirs.fileno()
        prctl = ctypes.CDLL(None).prctl
        inherited = os.environ | environment
        try:
            self.process: subprocess.Popen[bytes] | AdoptedProcess = subprocess.Popen(
                [sys.executable, "-u", "-m", "ttprun.rank.bootstrap.standby", str(fd)],
                env=with_agent(inherited, run_dir) | text_hashes.seeded(inherited),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(fd,),
                # At a low priority it may be long before it can say so itself.
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.become(self)

    def become(self, made: Standby | StandbyCopy) -> None:
        """Be this process from now on, at a low priority, and wait for its first answer."""
        self.process, self.channel = made.process, made.channel
        lower_priority(self.process.pid)
        self._answers_due = 1
        self.has_started = self.is_copyable = False

    @property
    def is_ready(self) -> bool:
        """It has imported and compiled all that it was to."""
        return self._answers_due == 0

    @property
    def is_alive(self) -> bool:
        """It can be asked for something. Its process may outlive its line by seconds, on a busy machine by many."""
        return not self.has_hung_up and self.process.poll() is None

    def read(self) -> None:
        """It has said that it is ready. Raises EOFError or OSError if it is gone."""
        try:
            messages = self.channel.read_available()
        except (EOFError, OSError):
            self.has_hung_up = True
            raise
        for message in messages:
            if isinstance(message, standby_messages.Ready):
                self.take(message)

    def take(self, message: standby_messages.Ready) -> None:
        """What it says when it is ready."""
        self._answers_due -= 1
        self.has_started = True
        self.is_copyable = message.is_copyable

    def warm_up(self, modules: list[str], files: list[str]) -> None:
        """Have it import modules, and compile the user's; it is not ready until it says so again."""
        self._answers_due += 1
        self.channel.send(standby_messages.WarmUp(modules, files))

    def hurry(self) -> None:
        """It is needed now, or will be at once: it has a rank's priority from now on."""
        restore_priority(self.process.pid)

    def copy(self, device: int | None = None) -> StandbyCopy | None:
        """A copy of it, made within milliseconds; None if it gives none, and then it has been killed.

        device   see standby_messages.Copy
        """
        if not self.is_alive:
            return None
        ours, theirs = channel.pair()
        try:
            with adopting():
                self.channel.send(standby_messages.Copy(device), [theirs.fileno()])
                pid = self._pid_of_copy(_COPY_LIMIT_S)
            restore_priority(pid)
            return StandbyCopy(AdoptedProcess(pid), ours)
        except (OSError, EOFError):
            ours.close()
            self.has_hung_up = True
            kill_session(self.process.pid)
            return None
        finally:
            theirs.close()

    def _pid_of_copy(self, limit_s: float) -> int:
        """Wait for its answer. Raises OSError, EOFError, or TimeoutError, which is one, after so many seconds."""
        answered = select.poll()
        answered.register(self.channel.sock, select.POLLIN)
        if not answered.poll(limit_s * 1000):
            raise TimeoutError("the standby does not answer")
        answer, _ = self.channel.receive_with_fds()
        if not isinstance(answer, standby_messages.Copied):
            raise OSError(f"the standby has answered with {answer}")
        return answer.pid

    def end(self) -> None:
        """Kill it."""
        kill_session(self.process.pid)
        self.bury()

    def bury(self) -> None:
        """It has ended, or will at once: take its exit code, and close the line."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.channel.close()


def kill_session(pid: int) -> None:
    """SIGKILL a rank and all that it has started (it leads a session of its own); 0 is none, and not our own group."""
    if pid <= 0:
        return
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def why_silent(pid: int) -> Reason:
    """Why a process that uses torch will never load our hooks; "" if it still may."""
    if not unhooked.has_torch(pid):
        return Reason()
    option = unhooked.why_skipped(unhooked.words_of(pid))
    if option:
        return option
    is_cut_off = SHIM not in unhooked.environment_of(pid).get("PYTHONPATH", "").split(os.pathsep)
    if not is_cut_off and not unhooked.seems_to_train(pid):  # a .pth file may import torch before our `sitecustomize`
        return Reason()
    return Reason(
        "hooks-missing",
        f"it uses torch, and its Python ({unhooked.command_of(pid)}) has not loaded ttprun's hooks: something has "
        "removed ttprun's folder from PYTHONPATH, or site-packages are switched off",
    )


__all__ = [
    "Channel",
    "RankHandler",
    "Standby",
    "StandbyCopy",
    "StandbyHandler",
    "command_of",
    "kill_session",
    "rank_environment",
    "why_silent",
    "with_agent",
]
