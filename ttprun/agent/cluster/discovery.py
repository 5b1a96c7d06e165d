"""Which hosts may train, as a command of the user's says it (`--discovery`): run now and again by the agent that leads.

A command that fails later, or names no host, changes nothing: the hosts that were named last stay. Begin with
`Discovery.first`.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

from ttprun.errors import ConfigError, one_line
from ttprun.recovery.membership_policy import parse_hosts

logger = logging.getLogger("ttprun")

EVERY_S = 5.0
LIMIT_S = 30.0  # for one run of the command


class Discovery:
    """Runs the command on a thread of its own.

    command          for the shell
    ranks_per_node   so many slots has a launcher
    named            address -> how many launchers it may have; None before the command has named any host
    """

    def __init__(self, command: str, ranks_per_node: int, every_s: float = EVERY_S) -> None:
        self._command = command
        self._ranks_per_node = ranks_per_node
        self._every_s = every_s
        self._is_failing = False
        self._thread: threading.Thread | None = None
        self.named: Mapping[str, int] | None = None

    def first(self) -> None:
        """Run the command until it names a host. Raises ConfigError if it fails at once."""
        is_said = False
        while True:
            try:
                hosts = self._run()
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                raise ConfigError(
                    f"--discovery: '{self._command}' fails: {one_line(error)}", "it must print one host a line"
                ) from None
            if hosts:
                self.named = hosts
                return
            if not is_said:
                logger.warning("--discovery: '%s' names no host yet: waiting for one", self._command)
                is_said = True
            time.sleep(self._every_s)

    def start(self) -> None:
        """Run the command now and again from now on; once is enough."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_running, name="ttprun-discovery", daemon=True)
            self._thread.start()

    def _keep_running(self) -> None:
        while True:
            self.poll()
            time.sleep(self._every_s)

    def poll(self) -> None:
        """Run the command once; what it cannot answer changes nothing."""
        why = "it names no host"
        try:
            hosts = self._run()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            hosts, why = {}, one_line(error)
        if hosts:
            self.named, self._is_failing = hosts, False
        elif not self._is_failing:
            logger.warning("--discovery: %s: the hosts that were named last stay, and it is run again", why)
            self._is_failing = True

    def _run(self) -> dict[str, int]:
        done = subprocess.run(self._command, shell=True, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            said = " ".join(done.stderr.split()) or "it says nothing on stderr"
            raise ValueError(f"exit code {done.returncode} ({said})")
        hosts: dict[str, int] = {}
        for host, launchers in parse_hosts(done.stdout, self._ranks_per_node).items():
            hosts.setdefault(_address_of(host), launchers)
        return hosts


def _address_of(host: str) -> str:
    """Its address, by which launchers name their nodes; the name itself if it is not known here."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host
