"""The Python stack of a rank that hangs or has crashed: from py-spy if it is installed, else the rank writes it itself.

A process that has been stopped is let go on for as long as it takes to write, some milliseconds. That is no danger: it
is about to be killed, and a rank may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from ttprun.rank.process.stack import SIGNAL

PY_SPY_LIMIT_S = 4.0
ANSWER_LIMIT_S = 1.0
_LOOK_AGAIN_S = 0.005
_OURS = str(Path(__file__).resolve().parents[2])
_LEFT_OUT = (_OURS + os.sep, "<frozen importlib")
_NOT_THE_USERS = (_OURS + os.sep, sysconfig.get_path("stdlib") + os.sep, "<frozen", "<string>")
# faulthandler's lines, and py-spy's.
_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_SPIED = re.compile(r"^ +(?P<name>\S.*) \((?P<file>[^()]+):(?P<line>\d+)\)$")


def create() -> int:
    """A memfd for one rank's stacks."""
    return os.memfd_create("ttprun-stack", os.MFD_CLOEXEC)


def take(pid: int, fd: int, is_stopped: bool) -> str:
    """The stacks of all threads of a living process, "" if they cannot be had. Blocks some seconds at most.

    fd   the memfd into which the process writes when it is asked
    """
    return _spy(pid, is_stopped) or _ask(pid, fd, is_stopped)


def ask_all(targets: Sequence[tuple[int, int]]) -> list[str]:
    """The stacks of several running processes, "" for one that does not answer. Blocks ANSWER_LIMIT_S at most.

    targets   (pid, memfd) of each
    """
    asked = [fd for pid, fd in targets if _signal(pid, fd)]
    give_up_at_s = time.monotonic() + ANSWER_LIMIT_S
    sizes: list[int] = []
    while time.monotonic() < give_up_at_s:
        time.sleep(_LOOK_AGAIN_S)
        before, sizes = sizes, [os.fstat(fd).st_size for fd in asked]
        if sizes == before and all(sizes):
            break
    return [_read(fd) if fd in asked else "" for _, fd in targets]


def of_the_user(text: str) -> str:
    """The frames of one thread without those of imports, and without ttprun's own, which differ while a rank waits."""
    frames = ((line, _FRAME.match(line) or _SPIED.match(line)) for line in text.splitlines())
    return "\n".join(line for line, frame in frames if frame and not frame["file"].startswith(_LEFT_OUT))


def left_behind(fd: int) -> str:
    """What a process that has crashed has written, "" if nothing; the memfd is empty afterwards."""
    text = _read(fd).partition("\nExtension modules:")[0]
    with contextlib.suppress(OSError):
        _clear(fd)
    return text


def current_thread_of(text: str) -> str:
    """The part of the thread that has crashed; all of the text if it is not marked."""
    return next((block for block in _blocks(text) if block.startswith("Current thread")), text)


def main_thread_of(text: str, main_thread: int) -> str:
    """The main thread's part of a text of `take`; all of it if it is not marked.

    main_thread   its ident, as the rank has reported it
    """
    spied = re.match(r"Process (\d+):", text)
    headings = (f"0x{main_thread:016x}", f"Thread {spied[1]} " if spied else '"MainThread"')
    return next(
        (block for block in _blocks(text) if any(heading in block[:200] for heading in headings)), text.strip("\n")
    )


def innermost_user_frame(text: str) -> str:
    """ "train.py:33 in forward", "" if there is no frame of the user's; frames come innermost first."""
    for line in text.splitlines():
        found = _FRAME.match(line) or _SPIED.match(line)
        if found and not found["file"].startswith(_NOT_THE_USERS) and "-packages/" not in found["file"]:
            return f"{os.path.basename(found['file'])}:{found['line']} in {found['name']}"
    return ""


def _blocks(text: str) -> list[str]:
    """One for each thread."""
    return [block.strip("\n") for block in re.split(r"\n(?=(?:Current thread|Thread) )", "\n" + text)]


def _spy(pid: int, is_stopped: bool) -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if program is None:
        return ""
    # It holds a process with ptrace while it reads, which fails with one that is stopped already (py-spy 0.4).
    how = ["--nonblocking"] if is_stopped else []
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [program, "dump", *how, "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_LIMIT_S
        )
        return done.stdout if done.returncode == 0 else ""
    return ""


def _ask(pid: int, fd: int, is_stopped: bool) -> str:
    with contextlib.suppress(OSError):
        if not _signal(pid, fd):
            return ""
        if is_stopped:
            os.kill(pid, signal.SIGCONT)
        give_up_at_s = time.monotonic() + ANSWER_LIMIT_S
        before = -1
        while time.monotonic() < give_up_at_s:
            time.sleep(_LOOK_AGAIN_S)
            size = os.fstat(fd).st_size
            if size and size == before:
                break
            before = size
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    return _read(fd)


def _signal(pid: int, fd: int) -> bool:
    """Ask a process for its stack, if it is one that answers: the signal would end any other.

    Its main thread, which has a stack of its own for signals. Of a process that was stopped any thread may take a
    signal: a rank on a GPU crashed so, in a thread of a library whose stack has no room for it (H100, AMX registers).
    """
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        if caught and int(caught[1], 16) >> (SIGNAL - 1) & 1:
            _clear(fd)
            return bool(ctypes.CDLL(None).tgkill(pid, pid, SIGNAL) == 0)
    return False


def _clear(fd: int) -> None:
    """The rank shares our place in the file, so it writes from the beginning again."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)


def _read(fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.pread(fd, 1 << 18, 0).decode(errors="replace").lstrip("\0")
    return ""
