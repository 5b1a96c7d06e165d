"""A process with torch imported that waits to become a replacement: `python -m ttprun.rank.bootstrap.standby`.

Mostly a fork of it becomes the replacement: a fork takes milliseconds, while importing torch takes seconds of CPU time
that the training needs. That is safe as long as nothing has been computed here: thread pools (OpenMP's, a BLAS's) and
devices in use are known to hang or to differ in a forked child, and a standby with one of these is not forked.

The environment, the arguments and the output of the rank come with the agent's welcome. Until then it has the
environment of some rank, so that what runs at the start of each Python (.pth files, `sitecustomize`) does the same.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
from collections.abc import Sequence

from ttprun.capture.position import user_code
from ttprun.capture.position.user_code import run
from ttprun.device import accelerator
from ttprun.protocol import standby_messages, to_rank
from ttprun.protocol.channel import Channel
from ttprun.rank.bootstrap import install, patch_table, preload

WARM = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",  # DistributedDataParallel imports it when it is made, which takes longer than all the rest
    "torch.utils.data.distributed",
    "torch.optim.lr_scheduler",
    "numpy",
    "ttprun.rank.bootstrap.hooks",
    "ttprun.tensors.gradients",
)


def main() -> None:
    """Wait for a welcome, then run the user's script as the rank that it names."""
    agent = int(os.environ[install.AGENT_VARIABLE])
    install.die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    # Packages ask at import whether there is a GPU. torch then asks NVML, and not CUDA, which no fork could use later.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    channel = Channel(socket.socket(fileno=fd))
    warm_up(WARM)
    channel.send(standby_messages.Ready(is_copyable()))
    fds: list[int] = []
    try:
        while True:
            message, came = channel.receive_with_fds()
            fds += came  # one read may bring several messages, and then the descriptors come with the first
            match message:
                case standby_messages.WarmUp(modules=modules, files=files):
                    warm_up(modules)
                    user_code.prepare(files)
                    channel.send(standby_messages.Ready(is_copyable()))
                case standby_messages.Preload(follow=follow, loops=loops):
                    user_code.install(follow, loops)
                    patch_table.apply_all(with_replay=True)  # before a package does `from torch import save`
                    notebook, plan = fds.pop(), fds.pop()
                    refused = preload.preload(plan, notebook)
                    channel.send(standby_messages.Ready(is_copyable(), refused))
                case standby_messages.Copy(device=device):
                    channel = give_copy(channel, fds.pop(), agent, device)
                case to_rank.Welcome():
                    welcome = message
                    break
                case _:
                    raise SystemExit(f"ttprun: a standby cannot use this message of the agent: {message}")
    except EOFError:
        os._exit(0)  # without the packages' exit handlers
    for output, target in zip(fds[welcome.descriptors :], (1, 2), strict=False):
        os.dup2(output, target)
        os.close(output)
    os.environ.clear()
    os.environ.update(preload.added | welcome.env)
    arguments: list[str] = welcome.arguments
    is_followed = not welcome.options.mindio
    if is_followed:
        user_code.install(welcome.options.follow, welcome.options.loops)
    is_module = arguments[0] == "-m"
    script = arguments[1] if is_module else user_code.full_path(arguments[0])
    sys.path[0] = os.getcwd() if is_module else user_code.directory_of(script)
    preload.again.run()
    install.enter(channel, welcome, fds[: welcome.descriptors], "" if is_module else script)
    run(arguments, is_followed)


def warm_up(modules: Sequence[str]) -> None:
    """Import modules beforehand; a failed import is ignored, and left to the script."""
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def is_copyable() -> bool:
    """Whether a fork of this process is as good as a new one: it has one thread, and no device in use.

    Both are checked after a trial fork: torch reports a device in use only in a child, and a BLAS that has ended its
    threads for the fork restarts them only when it computes.
    """
    gc.collect()
    gc.freeze()  # a collection in a copy would write to, and so copy, all pages
    child = os.fork()
    if child == 0:
        os._exit(has_inherited_a_device())
    _, status = os.waitpid(child, 0)
    return status == 0 and len(os.listdir("/proc/self/task")) == 1


def has_inherited_a_device() -> bool:
    """In a forked child: whether its parent had used a device, so that the child cannot use one."""
    torch = sys.modules.get("torch")
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu", "mps", "npu"))
    return any(getattr(device, "_is_in_bad_fork", bool)() for device in devices)


def give_copy(channel: Channel, theirs: int, agent: int, device: int | None) -> Channel:
    """Fork a copy, a child of the agent, and report its pid to the agent.

    theirs    the copy's end of its channel to the agent
    device    see standby_messages.Copy
    returns   the channel to listen on: in the copy, its own
    """
    go_r, go_w = os.pipe()
    pid_r, pid_w = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork():
            os._exit(0)
        os.setsid()
        for fd in (go_w, pid_r):
            os.close(fd)
        channel.close()  # an open one would close some other file of its number, whenever it is forgotten
        if not os.read(go_r, 1):
            os._exit(1)
        install.die_with_parent()
        if os.getppid() != agent:
            os._exit(1)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # two copies would draw the same; random does this by itself
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() == 1:
            # It makes its pool of threads anew in a fork, at first use: autograd's threads, one for each device, that
            # come there at once find none, and abort the process.
            torch.set_num_threads(1)
        os.write(pid_w, str(os.getpid()).encode())
        for fd in (go_r, pid_w):
            os.close(fd)
        channel = Channel(socket.socket(fileno=theirs))
        if device is not None:
            accelerator.make_context(device)
            channel.send(standby_messages.Ready(is_copyable=False))
        return channel
    for fd in (theirs, go_r, pid_w):
        os.close(fd)
    os.waitpid(between, 0)  # from here on the copy's parent is the agent
    os.write(go_w, b"x")
    pid = os.read(pid_r, 32)
    for fd in (go_w, pid_r):
        os.close(fd)
    if not pid:
        raise SystemExit("ttprun: a standby could not be copied")
    channel.send(standby_messages.Copied(int(pid)))
    return channel


if __name__ == "__main__":
    main()
