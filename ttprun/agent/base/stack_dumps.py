"""The Python stack of a rank that hangs or has crashed: from py-spy if it is installed, else the rank writes it itself.

It is asked on the board first, and then by a signal (`ttprun.rank.heartbeat` says why).
A process that has been stopped is let go on for as long as it takes to write, some milliseconds. That is no danger: it
is about to be killed, and a rank may be killed at any moment.
"""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttprun.protocol.board import Board, Field
from ttprun.rank.heartbeat import SIGNAL

PY_SPY_LIMIT_S = 4.0
ANSWER_LIMIT_S = 1.0  # of a rank to the signal
_BOARD_LIMIT_S = 0.5  # of a rank that can have the GIL
_LOOK_AGAIN_S = 0.005
_LINE_CHARACTERS = 100
_OURS = str(Path(__file__).resolve().parents[2])
_LEFT_OUT = (_OURS + os.sep, "<frozen importlib")
_NOT_THE_USERS = (_OURS + os.sep, sysconfig.get_path("stdlib") + os.sep, "<frozen", "<string>")
_FLIGHT_RECORDER = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_FLIGHT_RECORDS = "/tmp/nccl_trace_rank_"  # the default of torch
# faulthandler's lines, and py-spy's.
_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_SPIED = re.compile(r"^ +(?P<name>\S.*) \((?P<file>[^()]+):(?P<line>\d+)\)$")


def create() -> int:
    """A memfd for one rank's stacks."""
    return os.memfd_create("ttprun-stack", os.MFD_CLOEXEC)


@dataclass(frozen=True)
class Writer:
    """A process that writes its stacks when it is asked.

    fd           memfd into which it writes them
    board, row   where it sees that it is asked
    """

    pid: int
    fd: int
    board: Board
    row: int


def take(writer: Writer, is_stopped: bool) -> str:
    """The stacks of all threads of a living process, "" if they cannot be had. Blocks some seconds at most."""
    return _spy(writer.pid, is_stopped) or _ask(writer, is_stopped)


def ask_all(writers: Sequence[Writer]) -> list[str]:
    """The stacks of several running processes, "" for one that does not answer. Blocks two seconds at most."""
    for writer in writers:
        _ask_on_board(writer)
    _wait(writers, _BOARD_LIMIT_S)
    signalled = [writer for writer in writers if not _end_asking(writer) and _signal(writer)]
    _wait(signalled, ANSWER_LIMIT_S)
    return [_read(writer.fd) for writer in writers]


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
    frame = _innermost_of_the_user(text)
    return f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['name']}" if frame else ""


def innermost_user_line(text: str) -> str:
    """What stands there in the file, its beginning if it is long, "" if that is not known."""
    frame = _innermost_of_the_user(text)
    linecache.checkcache()
    line = linecache.getline(frame["file"], int(frame["line"])).strip() if frame else ""
    return line if len(line) <= _LINE_CHARACTERS else f"{line[: _LINE_CHARACTERS - 3]}..."


def _innermost_of_the_user(text: str) -> re.Match[str] | None:
    frames = (_FRAME.match(line) or _SPIED.match(line) for line in text.splitlines())
    return next(
        (
            frame
            for frame in frames
            if frame and not frame["file"].startswith(_NOT_THE_USERS) and "-packages/" not in frame["file"]
        ),
        None,
    )


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


def _ask(writer: Writer, is_stopped: bool) -> str:
    with contextlib.suppress(OSError):
        _ask_on_board(writer)
        if is_stopped:
            os.kill(writer.pid, signal.SIGCONT)
        _wait([writer], _BOARD_LIMIT_S)
        if not _end_asking(writer) and _signal(writer):
            _wait([writer], ANSWER_LIMIT_S)
        if is_stopped:
            os.kill(writer.pid, signal.SIGSTOP)
    return _read(writer.fd)


def _ask_on_board(writer: Writer) -> None:
    with contextlib.suppress(OSError):
        _clear(writer.fd)
        writer.board.announce(writer.row, Field.STACK_ASKED, time.monotonic_ns())


def _end_asking(writer: Writer) -> bool:
    """Take the request back; returns whether it was answered."""
    writer.board.set(writer.row, Field.STACK_ASKED, 0)
    return bool(os.fstat(writer.fd).st_size)


def _wait(writers: Sequence[Writer], limit_s: float) -> None:
    """Wait until all have written, and have written all of it."""
    give_up_at_s = time.monotonic() + limit_s
    sizes: list[int] = []
    while writers and time.monotonic() < give_up_at_s:
        time.sleep(_LOOK_AGAIN_S)
        before, sizes = sizes, [os.fstat(writer.fd).st_size for writer in writers]
        if sizes == before and all(sizes):
            break


def _signal(writer: Writer) -> bool:
    """Ask a process for its stack, if it is one that answers: the signal would end any other.

    Its main thread, which has a stack of its own for signals. Of a process that was stopped any thread may take a
    signal: a rank on a GPU crashed so, in a thread of a library whose stack has no room for it (H100, AMX registers).
    """
    with contextlib.suppress(OSError):
        pid = writer.pid
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
        if caught and int(caught[1], 16) >> (SIGNAL - 1) & 1:
            _clear(writer.fd)
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


def flight_records(ranks: list[int], since_s: float) -> list[str]:
    """Files of NCCL's flight recorder that were written since then. They are pickled: nothing here reads them.

    since_s   Unix time
    """
    prefix = next((os.environ[name] for name in _FLIGHT_RECORDER if name in os.environ), _FLIGHT_RECORDS)
    return [
        str(path)
        for path in (Path(f"{prefix}{rank}") for rank in ranks)
        if path.is_file() and path.stat().st_mtime >= since_s
    ]
