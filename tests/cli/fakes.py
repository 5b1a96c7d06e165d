"""Stand-ins for the agent: one that is called by the run command, one that listens on a run's control socket."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

from torch.distributed.launcher.api import LaunchConfig

from ttprun.agent.launcher.outcome import Outcomes
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory


class FakeLaunch:
    """Takes the place of the module `ttprun.agent.launcher.launch`: notes the call, starts nothing."""

    def __init__(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code
        self.calls: list[tuple[Config, LaunchConfig, Any, list[str], RunDirectory]] = []
        self.is_python: bool | None = None
        self.is_place_named: bool | None = None

    def launch(
        self,
        config: Config,
        launch_config: LaunchConfig,
        entrypoint: Any,
        args: list[str],
        run: RunDirectory,
        is_python: bool,
        is_place_named: bool,
        page: str,
        outcomes: Outcomes | None,
    ) -> int:
        self.is_python = is_python
        self.is_place_named = is_place_named
        self.calls.append((config, launch_config, entrypoint, args, run))
        return self.exit_code


class FakeAgent:
    """Answers one request on a run's control socket with a fixed line; use with `with`."""

    def __init__(self, run: RunDirectory, answer: str) -> None:
        self.requests: list[dict[str, Any]] = []
        self._answer = answer
        self._server = socket.socket(socket.AF_UNIX)
        with run.control_address() as address:
            self._server.bind(address)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FakeAgent:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(60)
        self._server.close()

    def _serve(self) -> None:
        self._server.settimeout(60)
        connection, _ = self._server.accept()
        with connection, connection.makefile("rw", encoding="utf-8") as lines:
            self.requests.append(json.loads(lines.readline()))
            lines.write(self._answer + "\n")
