"""Nodes and parts of the agent, made for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from ttprun import recovery
from ttprun.agent.core.node import Node
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory


def ignore(event: recovery.Event) -> None: ...


class Asked:
    """A role that hands on what it is to decide."""

    asked_elsewhere = ""

    def __init__(self, advance: Callable[[recovery.Event], None]) -> None:
        self.advance = advance


def node_of(directory: Path, *slots: Any, advance: Callable[[recovery.Event], None] = ignore, **config: Any) -> Node:
    """A node with these slots, whose ranks have not been started."""
    job = recovery.new_job(recovery.Settings(world_size=max(1, len(slots))))
    node = Node(Config(**config), RunDirectory(directory), True, job)
    node.role = Asked(advance)  # type: ignore[assignment]
    node.slots = list(slots)
    return node


T = TypeVar("T")


def part(kind: type[T], node: Any, **others: Any) -> T:
    """A part of the agent that uses these others; whatever else it has is None."""
    nobody = {field.name: None for field in fields(kind) if field.init}  # type: ignore[arg-type]
    return kind(**nobody | {"node": node} | others)
