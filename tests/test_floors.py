"""Modules import from floors below, never from beside or above, not even inside a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ttprun"
# What each part may import of ttprun, beside its own modules.
FLOORS = {
    "recovery": set(),
    "device": set(),
    "observe": {"errors"},
    "rank": {"board", "channel", "device", "faults", "errors", "state", "text_hashes", "torch_versions"},
    "shim": {"rank"},
    "mindio": {"errors", "rank"},
    "state": {"__version__", "errors"},
    "agent": {"board", "channel", "config", "device", "errors", "faults", "mindio", "observe", "rank", "recovery"}
    | {"schedule", "state", "text_hashes", "torch_versions"},
    "cli": {"agent", "board", "config", "device", "drill", "errors", "faults", "mindio", "observe", "rank", "schedule"}
    | {"state", "torch_versions"},
    "drill": {"config", "errors", "faults", "observe", "schedule", "text_hashes"},
}
CAN_ACT = {"os", "time", "socket", "subprocess", "threading", "logging", "random", "torch", "asyncio", "sys"}


def imported(path: Path) -> Iterator[str]:
    """Dotted names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("part", FLOORS)
def test_a_part_imports_only_from_the_floors_below(part: str) -> None:
    ours = {
        (path.name, name.split(".")[1])
        for path in (PACKAGE / part).rglob("*.py")
        for name in imported(path)
        if name.startswith("ttprun.")
    }

    assert {(path, name) for path, name in ours if name not in FLOORS[part] | {part}} == set()


def test_the_recovery_imports_nothing_that_can_act() -> None:
    roots = {name.split(".")[0] for path in (PACKAGE / "recovery").glob("*.py") for name in imported(path)}

    assert roots & CAN_ACT == set()


def test_the_shim_imports_only_the_standard_library_before_it_hands_over() -> None:
    tree = ast.parse((PACKAGE / "shim" / "sitecustomize.py").read_text(encoding="utf-8"))
    names = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}

    assert names == {"os", "sys"}
