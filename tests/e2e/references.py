"""Undisturbed runs of scripts, without ttprun, with which disturbed ones are compared."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.e2e import harness
from tests.e2e.harness import SCRIPTS, Run

ABORTED_AT_EXIT = "terminate called without an active exception"
KILLED = -signal.SIGKILL
FORKING = Path(__file__).with_name("forked_ranks.py")


class References:
    """Undisturbed runs; each is made once, when it is first asked for. To be closed.

    Scripts run in forks of a process that has torch, in the environment of torchrun (forked_ranks.py): that takes a
    quarter of the time. Where torchrun is asked for, it is torchrun.

    new_folder   makes a folder, of a name that begins like this
    """

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self._new_folder = new_folder
        self._runs: dict[tuple[str, int, tuple[str, ...], str, bool], Run] = {}
        self._forking: dict[frozenset[tuple[str, str]], subprocess.Popen[str]] = {}  # by their environment

    def undisturbed(
        self, script: str, ranks: int, script_args: Sequence[str] = (), device: str = "", by_torchrun: bool = False
    ) -> Run:
        """The reference for a script with that number of ranks and those arguments, on that device.

        torch 2.13 aborts a rank now and then while its interpreter exits (ABORTED_AT_EXIT; once even in two runs of a
        script, one after the other), or hangs when it destroys a group: such a reference is made again.
        """
        key = (script, ranks, tuple(script_args), device, by_torchrun)
        if key not in self._runs:
            run = self._make(*key)
            for _ in range(4):
                if run.exit_code != KILLED and (run.exit_code == 0 or ABORTED_AT_EXIT not in run.story()):
                    break
                run = self._make(*key)
            assert run.exit_code == 0, run.story()
            self._runs[key] = run
        return self._runs[key]

    def close(self) -> None:
        """End the processes that fork."""
        for process in self._forking.values():
            process.communicate(timeout=60.0)

    def _make(self, script: str, ranks: int, script_args: Sequence[str], device: str, by_torchrun: bool) -> Run:
        folder = self._new_folder(f"{Path(script).stem}-{ranks}-")
        if by_torchrun:
            return harness.start_torchrun(script, ranks, folder, script_args, device).finish()
        environment = harness.environment(device)
        key = frozenset(environment.items())
        if key not in self._forking:
            self._forking[key] = subprocess.Popen(
                [sys.executable, str(FORKING)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        forking = self._forking[key]
        assert forking.stdin is not None
        assert forking.stdout is not None
        out = folder / "out"
        order = {
            "script": str(SCRIPTS / script),
            "ranks": ranks,
            "arguments": [f"--out={out}", *script_args],
            "folder": str(folder),
        }
        forking.stdin.write(json.dumps(order) + "\n")
        forking.stdin.flush()
        codes = json.loads(forking.stdout.readline())
        exit_code = KILLED if KILLED in codes else int(any(codes))
        return harness.gather(script, folder, out, exit_code)
