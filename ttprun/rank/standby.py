"""A process with torch imported that waits to become a replacement: `python -m ttprun.rank.standby`.

It reads nothing and draws nothing that a fresh interpreter would not: the environment, the arguments and the output of
the rank come with the agent's welcome.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Sequence

from ttprun.channel import Channel
from ttprun.rank import install, rewrite
from ttprun.rank.script import run

WARM = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch._dynamo",  # DistributedDataParallel imports it when it is made, which takes longer than all the rest
    "torch.utils.data.distributed",
    "torch.optim.lr_scheduler",
    "numpy",
    "ttprun.rank.hooks",
    "ttprun.rank.gradients",
)


def main() -> None:
    """Wait for a welcome, then run the user's script as the rank that it names."""
    agent = int(os.environ[install.AGENT_VARIABLE])
    install.die_with_parent()
    if os.getppid() != agent:
        os._exit(1)
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    warm_up(WARM)
    channel.send({"op": "ready"})
    try:
        welcome, fds = channel.receive_with_fds()
        while welcome["op"] == "warm":
            warm_up(welcome["modules"])
            welcome, later = channel.receive_with_fds()
            fds += later  # one read may bring both messages, and then the descriptors come with the first
    except EOFError:
        return
    for output, target in zip(fds[3:], (1, 2), strict=False):
        os.dup2(output, target)
        os.close(output)
    os.environ.clear()
    os.environ.update(welcome["env"])
    arguments: list[str] = welcome["arguments"]
    rewrite.install()
    is_module = arguments[0] == "-m"
    script = arguments[1] if is_module else rewrite.full_path(arguments[0])
    sys.path[0] = os.getcwd() if is_module else rewrite.directory_of(script)
    install.enter(channel, welcome, fds[:3], "" if is_module else script)
    install.take_over()
    run(arguments)


def warm_up(modules: Sequence[str]) -> None:
    """Import modules beforehand; one that cannot be imported is the script's business, if it needs it."""
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


if __name__ == "__main__":
    main()
