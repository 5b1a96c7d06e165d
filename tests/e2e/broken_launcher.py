"""`ttprun` with bugs on purpose: BREAKS names what raises, see `test_failure_domains.py`. Run as `python -m` it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from ttprun import recovery
from ttprun.agent.launcher import supervisor
from ttprun.agent.lead.coordinator import Coordinator
from ttprun.cli.main import program
from ttprun.protocol.process_orders import Action


def break_part(name: str) -> None:
    """Have a method raise whenever it is called in an incident: "module:Class.method"."""
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    *classes, method = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    original = getattr(owner, method)

    def broken(self: Any, *args: Any) -> Any:
        node = getattr(self, "node", None) or getattr(self, "_node", None) or NODES[0]
        if node.job.phase not in (recovery.JobPhase.RUNNING, recovery.JobPhase.DONE):
            raise ArithmeticError(f"{method} in {node.job.phase}")
        return original(self, *args)

    setattr(owner, method, broken)


def break_orders(names: list[str]) -> None:
    """Have the carrying out of the first order of each of these kinds raise, in their order."""
    original: Callable[..., None] = Coordinator.carry_out

    def carry_out(self: Coordinator, action: Action) -> None:
        if names and type(action).__name__ == names[0]:
            del names[0]
            raise ArithmeticError(f"the order {type(action).__name__}")
        original(self, action)

    Coordinator.carry_out = carry_out  # type: ignore[method-assign]
    supervisor.RENEWED_EVERY_S = 0.0


NODES: list[Any] = []


class Noted(supervisor.Agent):
    """An agent that parts without a node find."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        NODES.append(self)


if __name__ == "__main__":
    supervisor.Agent = Noted  # type: ignore[misc]
    words = os.environ["BREAKS"].split(",")
    break_orders([word for word in words if ":" not in word])
    for word in words:
        if ":" in word:
            break_part(word)
    program()
