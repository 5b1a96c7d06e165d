"""Note with which torch and Python the smoke tests have passed: `pytest -p tests.versions -m smoke --record-version`.

scripts/test_matrix.sh runs them so. A pair has one entry in tests/results/versions.json, that of its last run; the
package's bounds and the README claim no release without one (tests/test_torch_versions.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.commits import RESULTS, with_what, write_results

VERSIONS = RESULTS / "versions.json"


def load_versions() -> dict[str, dict[str, Any]]:
    """ "torch 2.6, Python 3.12" -> what was seen: commit, date, torch, python, passed, failed (numbers of tests)."""
    loaded: dict[str, dict[str, Any]] = json.loads(VERSIONS.read_text(encoding="utf-8")) if VERSIONS.exists() else {}
    return loaded


def pair_of(what: dict[str, str]) -> str:
    """The name of an entry: releases without their last number."""
    torch, python = (".".join(what[name].split(".")[:2]) for name in ("torch", "python"))
    return f"torch {torch}, Python {python}"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of this module."""
    parser.addoption("--record-version", action="store_true", help=f"write what came of the run to {VERSIONS.name}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line on what was run, and its entry if that is asked for."""
    what = with_what()
    counts = {kind: len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed")}
    counts["failed"] += len(terminalreporter.stats.get("error", ()))
    terminalreporter.line(f"smoke tests on {pair_of(what)}: {counts['passed']} passed, {counts['failed']} failed")
    if config.getoption("--record-version") and any(counts.values()):
        write_results(VERSIONS, load_versions() | {pair_of(what): what | counts})
