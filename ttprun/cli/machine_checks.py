"""What `ttprun doctor` looks at in the machine: kernel, limits, network, files. All is tried, nothing guessed.

A check returns its findings and may raise; `doctor` makes a finding of that too. Read CHECKS first.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ttprun.protocol.board import Board, Field
from ttprun.state.cost_limits import in_words

Level = Literal["ok", "note", "fails"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    area     "software", "devices", "kernel", "limits", "network", "files" or "mindio"
    subject  the thing
    found    what is there: a version, a number
    level    "ok"; "note": it works, but something is less or worth knowing; "fails": recovery cannot work
    means    what works less, or not at all, because of it; "" if ok
    cure     what to do about it; "" if nothing
    """

    area: str
    subject: str
    found: str
    level: Level = "ok"
    means: str = ""
    cure: str = ""


def judged(area: str, subject: str, found: str, is_well: bool, means: str, cure: str, level: Level = "note") -> Finding:
    """A finding that is ok if all is well; if not, this is what it means, and the cure."""
    return Finding(area, subject, found) if is_well else Finding(area, subject, found, level, means, cure)


LOOK_UP_LIMIT_S = 1.0
GIB = 1 << 30
ENOUGH_FILES = 1024
ENOUGH_SHARED_BYTES = GIB
ENOUGH_DISK_BYTES = GIB
ENOUGH_PORTS = 1000
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
CGROUP_MEMORY = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def kernel() -> Iterator[Finding]:
    """What ttprun asks of the kernel."""
    yield Finding("kernel", "Linux", platform.release())
    update = "a kernel from 5.3 on (or a container without a seccomp rule against it)"
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Finding("kernel", "pidfd", "works")
    except (OSError, AttributeError) as error:
        yield Finding("kernel", "pidfd", _why(error), "fails", "the agent cannot see a rank's exit", f"use {update}")
    yield _shared_page()


def _shared_page() -> Finding:
    """The board: a memfd and a futex, as ranks use them."""
    try:
        fd, board = Board.create(1)
        try:
            started = time.monotonic()
            board.wait_for_change(0, Field.RECORDED, 0, 0.02)
            waited_s = time.monotonic() - started
            board.announce(0, Field.RECORDED, 1)
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        return Finding("kernel", "memfd, futex", _why(error), "fails", "ranks share no page of memory", "allow them")
    waits, cure = waited_s >= 0.01, "allow the system call 'futex' in the container's seccomp profile"
    found = "work" if waits else "futex does not wait"
    return judged("kernel", "memfd, futex", found, waits, "ranks busy-wait before each step", cure)


def stacks() -> Iterator[Finding]:
    """How the Python stack of a rank that hangs is had."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    own = "a rank that hangs writes its own Python stack, without the frames of native code"
    yield judged("kernel", "py-spy", program or "not installed", program is not None, own, "pip install py-spy")
    if not YAMA.exists():
        return
    scope = YAMA.read_text().strip()
    is_refused = program is not None and scope in ("2", "3") and not (scope == "2" and os.geteuid() == 0)
    cure = "sysctl kernel.yama.ptrace_scope=1, or --cap-add SYS_PTRACE for a container"
    means = f"py-spy is refused: {own}"
    yield judged("kernel", "ptrace (yama)", f"ptrace_scope {scope}", not is_refused, means, cure)


def limits() -> Iterator[Finding]:
    """What this process, and so each rank, may use."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    means = "an agent with many ranks, or a DataLoader with many workers, runs out of them"
    enough = files == resource.RLIM_INFINITY or files >= ENOUGH_FILES
    yield judged("limits", "open files", _describe(files), enough, means, "ulimit -n 65536")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir())
    enough, means = not has_rdma or locked == resource.RLIM_INFINITY, "RDMA cannot register its buffers"
    yield judged("limits", "locked memory", _describe(locked, "bytes"), enough, means, "ulimit -l unlimited")
    core, _ = resource.getrlimit(resource.RLIMIT_CORE)
    means = "a rank that crashes writes its memory to disk first, and is only replaced when that is done"
    found = _describe(core, "bytes") if core else "none"
    yield judged("limits", "core files", found, not core, means, "ulimit -c 0, unless you need them")
    yield from _memory()
    shared = shutil.disk_usage("/dev/shm").total
    means = "DataLoader workers may be ended by SIGBUS when they pass large batches"
    cure = "docker run --shm-size=8g, or --ipc=host"
    yield judged("limits", "/dev/shm", in_words(shared), shared >= ENOUGH_SHARED_BYTES, means, cure)


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in CGROUP_MEMORY:
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(path.read_text()))
    cores = len(os.sched_getaffinity(0))
    yield Finding("limits", "memory", f"{in_words(total)}, {cores} cores")


def network() -> Iterator[Finding]:
    """What connects the ranks."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LOOK_UP_LIMIT_S)
            with socket.create_connection(server.getsockname(), LOOK_UP_LIMIT_S):
                server.accept()[0].close()
        yield Finding("network", "loopback", "works")
    except OSError as error:
        cure = "ip link set lo up; allow 127.0.0.1 in the packet filter"
        yield Finding("network", "loopback", _why(error), "fails", "ranks cannot connect to each other", cure)
    yield _own_name()
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
        means = "connections fail when many ranks of several groups take a port each"
        cure = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        yield judged("network", "ports", f"{first} to {last}", last - first >= ENOUGH_PORTS, means, cure)


def _own_name() -> Finding:
    """torch's rendezvous looks the host's name up; a name server that does not answer takes seconds each time."""
    name = socket.gethostname()
    addresses: list[str] = []

    def look_up() -> None:
        with contextlib.suppress(OSError):
            addresses.append(str(socket.getaddrinfo(name, None)[0][4][0]))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(LOOK_UP_LIMIT_S)
    if addresses:
        return Finding("network", "host name", f"{name} is {addresses[0]}")
    how = "takes more than a second to resolve" if thread.is_alive() else "cannot be resolved"
    cure = f"add '127.0.0.1 {name}' to /etc/hosts"
    return Finding("network", "host name", f"{name} {how}", "note", "starting a job takes seconds longer", cure)


def files() -> Iterator[Finding]:
    """Where a run puts its status, events and logs: here, unless configured otherwise."""
    cure = "start in another directory, or give --run-dir"
    try:
        with tempfile.TemporaryDirectory(prefix=".ttprun-doctor-", dir=".") as folder:
            os.chmod(folder, 0o700)
            at = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            try:
                with socket.socket(socket.AF_UNIX) as server:
                    server.bind(f"/proc/self/fd/{at}/control.sock")
            finally:
                os.close(at)
    except OSError as error:
        means = "a run directory cannot be made here"
        yield Finding("files", "this directory", _why(error), "note", means, cure)
    else:
        yield Finding("files", "this directory", os.getcwd())
    free, means = shutil.disk_usage(".").free, "events and logs may not be written"
    yield judged("files", "free disk", in_words(free), free >= ENOUGH_DISK_BYTES, means, cure)


def signals() -> Iterator[Finding]:
    """A signal that is ignored is ignored in all children too."""
    ignored = [name.name for name in (signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(name) is signal.SIG_IGN]
    found = f"{', '.join(ignored)} ignored" if ignored else "reach the launcher"
    means = "a scheduler's notice of the end is ignored"
    yield judged("kernel", "signals", found, not ignored, means, "start without 'trap \"\"'")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (kernel, signals, stacks, limits, network, files)


def _describe(value: int, unit: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else in_words(value) if unit else str(value)


def _why(error: BaseException) -> str:
    """What the system said, in a phrase."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
