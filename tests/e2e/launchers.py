"""How tests start the launcher: as a new Python, or as a fork of a process that has torch (forked_launchers.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ttprun.agent.node.rank_processes import AdoptedProcess, adopting
from ttprun.device import device_errors

GIVEN = {"PYTHONHASHSEED": "1", **device_errors.VARIABLES}  # which the launcher gives its ranks, before they have torch
# Not a file: no frame of the tests' own code is to lie under a script's.
PROGRAM = "import sys; from tests.e2e import forked_launchers as forked; sys.exit(forked.serve()())"
_REPOSITORY = Path(__file__).resolve().parents[2]


class ForkedProcess(AdoptedProcess):
    """What the harness uses of subprocess.Popen."""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkedLaunchers:
    """Starts launchers by forks. To be closed.

    environments  those in which it can: of launchers whose ranks import what the common process has
    """

    def __init__(self, environments: Sequence[Mapping[str, str]]) -> None:
        self._environments = list(environments)
        self._programs: dict[int, subprocess.Popen[str]] = {}

    def start(
        self, words: Sequence[str], folder: Path, log: Path, environment: Mapping[str, str], within: Sequence[str]
    ) -> ForkedProcess | None:
        """Start `ttprun WORDS`; None if only a new Python can be in that environment and place.

        folder       working directory
        log          file for stdout and stderr, which is there
        environment  of the launcher
        within       a command that sets its place: see `place_of`
        """
        place = place_of(within)
        if place is None or environment not in self._environments:
            return None
        program = self._program(self._environments.index(environment))
        assert program.stdin is not None
        assert program.stdout is not None
        network, variables = place
        order = {"words": list(words), "folder": str(folder), "log": str(log)}
        with adopting():
            program.stdin.write(json.dumps(order | {"network": network, "variables": variables}) + "\n")
            program.stdin.flush()
            pid = int(program.stdout.readline())
        return ForkedProcess(pid)

    def _program(self, number: int) -> subprocess.Popen[str]:
        """The one that forks in this environment."""
        if number not in self._programs:
            self._programs[number] = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                cwd=_REPOSITORY,
                env={**self._environments[number], **GIVEN},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        return self._programs[number]

    def close(self) -> None:
        """End the processes that fork."""
        for program in self._programs.values():
            program.communicate(timeout=60.0)


def place_of(within: Sequence[str]) -> tuple[str, dict[str, str]] | None:
    """The network namespace and the variables that a command such as `nsenter --net=FILE env NAME=VALUE` gives.

    None: it does something else.
    """
    network, variables = "", {}
    for word in within:
        name, sign, value = word.partition("=")
        if word in ("nsenter", "env"):
            continue
        if not sign:
            return None
        if name == "--net":
            network = value
        else:
            variables[name] = value
    return network, variables
