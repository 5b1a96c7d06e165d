"""A program that starts launchers by forking itself, after it has imported torch and ttprun; so do they their ranks.

Most of what a short run costs is the import of torch: once in the launcher, in each rank and in each standby. Here all
are forks of a process that has it; otherwise they are what they always are: processes of their own, in a session of
their own, and from the fork on ttprun's code alone runs in them. A rank comes from a standby (`standby.py`) from the
first launch on, as a replacement does in every run, and not by way of the shim: that is for tests that start Python.

Reads lines of JSON: {"words", "folder", "log", "network", "variables"}; writes the pid of each launcher. It is run by
`launchers.PROGRAM`, so that no frame of a file of the tests lies under a script's.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import ttprun.cli.run
from tests.e2e.launchers import GIVEN
from ttprun import mindio
from ttprun.agent.launcher.elastic_agent import ReplacingAgent
from ttprun.agent.node import rank_processes, standbys
from ttprun.agent.node.rank_processes import (
    AdoptedProcess,
    RankHandler,
    Standby,
    StandbyCopy,
    StandbyHandler,
    with_agent,
)
from ttprun.cli.main import program
from ttprun.protocol import channel
from ttprun.protocol.channel import Channel
from ttprun.rank.bootstrap import standby

CLONE_NEWNET = 0x40000000


def serve() -> Callable[[], Any]:
    """Carry out one order after another, until stdin ends; in a forked process, what is to be done there."""
    for name in GIVEN:
        os.environ.pop(name)  # the launcher gives it to ranks by itself
    standby.warm_up(standby.WARM)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a fork would write to, and so copy, all pages
    for line in sys.stdin:
        order = json.loads(line)
        read_end, write_end = os.pipe()
        between = os.fork()
        if between == 0:
            pid = os.fork()
            if pid:
                os.write(write_end, str(pid).encode())
                os._exit(0)
            os.close(read_end)
            os.close(write_end)
            return _be_launcher(**order)
        os.waitpid(between, 0)  # from here on the launcher's parent is the test's process
        os.close(write_end)
        print(os.read(read_end, 32).decode(), flush=True)
        os.close(read_end)
    return int


def _be_launcher(
    words: list[str], folder: str, log: str, network: str, variables: Mapping[str, str]
) -> Callable[[], Any]:
    """Be the process of `ttprun WORDS`, and fork what ranks and standbys are copied from: in that, become a standby.

    folder     working directory
    log        file for stdout and stderr
    network    file of a network namespace; "": ours
    variables  of the environment, beside ours
    """
    os.setsid()
    if network:
        with open(network) as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0, network
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.close(written)
    os.environ.update(variables)
    if "--mindio" in words:
        sys.path.insert(1, mindio.PATH)  # the launcher puts it on PYTHONPATH, which is read at the start of a Python
    sys.argv = [str(Path(ttprun.cli.run.__file__).parents[1] / "__main__.py"), *words]
    agent = os.getpid()
    ours, theirs = channel.pair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.environ.update(with_agent({}, "") | {standby.install.AGENT_VARIABLE: str(agent)})
        sys.argv = ["standby", str(os.dup(theirs.fileno()))]
        ours.close()
        theirs.close()
        return standby.main
    theirs.close()
    _Source(pid, ours).use()
    return program


class _Source(Standby):
    """The standby that all others, and all ranks, are copies of. Its lock: the agent's threads ask for them."""

    def __init__(self, pid: int, ours: Channel) -> None:
        self.process = AdoptedProcess(pid)
        self.channel = ours
        self._answers_due, self.has_started, self.is_copyable, self.has_hung_up = 1, False, False, False
        self._copying = threading.Lock()

    def use(self) -> None:
        """From now on the launcher of this process gets its ranks and standbys here."""
        make_handler = ReplacingAgent._make_handler
        source = self

        class Copied(Standby):
            """A standby that has torch at once."""

            def __init__(self, run_dir: str, environment: Mapping[str, str]) -> None:
                copy = source.new_copy()
                self.process, self.channel = copy.process, copy.channel
                self._answers_due, self.has_started, self.is_copyable, self.has_hung_up = 0, True, True, False
                rank_processes.lower_priority(self.process.pid)

        def make(agent: ReplacingAgent, **start: Any) -> RankHandler:
            is_of_standby = agent._taken is not None or agent._again is not None
            if is_of_standby or not agent.supervisor.node.is_python or os.environ.get("PYTHON_EXEC"):
                return make_handler(agent, **start)
            copy = source.new_copy()
            copy.channel.sock.setblocking(True)
            handler = StandbyHandler(start, copy)
            agent.supervisor.assign(start["local_rank_id"], handler)
            return handler

        setattr(standbys, "Standby", Copied)  # noqa: B010 - which an assignment may not do to a class
        setattr(ReplacingAgent, "_make_handler", make)  # noqa: B010

    def new_copy(self) -> StandbyCopy:
        """A copy. Raises OSError if it gives none."""
        with self._copying:
            while not self.is_ready:
                self.read()
            copy = self.copy()
        if copy is None:
            raise OSError("what ranks are copied from has ended")
        return copy
