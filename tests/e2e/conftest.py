"""Fixtures for whole runs: `run_ttprun`, `start_ttprun`, `undisturbed`, `replaced`. What they do is in harness.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.e2e.harness")

from tests import simulated_npu  # noqa: E402
from tests.e2e import harness  # noqa: E402 - its assertions are rewritten only if it is imported afterwards
from tests.e2e.launchers import ForkedLaunchers  # noqa: E402
from tests.e2e.references import References  # noqa: E402
from tests.turns import ORDINARY, function_of  # noqa: E402


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups, also where this file was named as an argument
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark everything in this folder; as slow all that ordinary.txt does not list, as smoke what smoke.txt does.

    One at a time, also where tests run side by side: each whole run keeps several processors busy.
    """
    here = Path(__file__).parent
    ordinary_runs, smoke = harness.listed("ordinary.txt"), harness.listed("smoke.txt")
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.xdist_group("e2e"))
            name = f"{item.path.name}::{item.name}"
            if name not in ordinary_runs:
                item.add_marker(pytest.mark.slow)
            if name in smoke:
                item.add_marker(pytest.mark.smoke)
    ordinary = config.stash[ORDINARY] = {}
    for item in items:
        function = function_of(item)
        ordinary[function] = ordinary.get(function, False) or item.get_closest_marker("slow") is None


@pytest.fixture(scope="session")
def launchers() -> Iterator[ForkedLaunchers]:
    """Forks launchers in the tests' own environment, with and without the simulated NPU."""
    plain = harness.environment()
    found = ForkedLaunchers([plain, harness.with_simulated_npu(plain, str(simulated_npu.FOLDER))])
    yield found
    found.close()


@pytest.fixture(autouse=True)
def start_by_forks(request: pytest.FixtureRequest, launchers: ForkedLaunchers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers and ranks are forks, which takes a third of the time; in `-m smoke` and test_replace.py new Pythons."""
    is_smoke = request.node.get_closest_marker("smoke") is not None
    is_new = is_smoke and (request.config.option.markexpr == "smoke" or request.path.name == "test_replace.py")
    if not is_new:
        monkeypatch.setattr(harness, "forked", launchers)


@pytest.fixture
def new_pythons(start_by_forks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, too: a fork's collector, arguments and modules are not those of a new Python."""
    monkeypatch.setattr(harness, "forked", None)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., harness.Run]]:
    """`undisturbed(script, ranks, script_args=())`: the reference without ttprun, run once per session."""
    references = References(tmp_path_factory.mktemp)
    yield references.undisturbed
    references.close()


@pytest.fixture
def start_ttprun(tmp_path: Path) -> Iterator[Callable[..., harness.Launch]]:
    """`start_ttprun(script, ranks, faults=(), ...)`: a run to do things to; ends with the test."""
    launches: list[harness.Launch] = []

    def start(script: str, ranks: int, **how: Any) -> harness.Launch:
        launches.append(harness.start_ttprun(script, ranks, tmp_path / str(len(launches)), **how))
        return launches[-1]

    yield start
    for launch in launches:
        launch.stop()
        harness.end_processes_of(launch.folder / "run")


@pytest.fixture
def run_ttprun(start_ttprun: Callable[..., harness.Launch]) -> Callable[..., harness.Run]:
    """`run_ttprun(script, ranks, ...)`: the same, waited for; no test may leave a process or shared memory behind."""

    def run(script: str, ranks: int, **how: Any) -> harness.Run:
        result = start_ttprun(script, ranks, **how).finish()
        harness.assert_no_orphans(result)
        return result

    return run


@pytest.fixture
def replaced(run_ttprun: Callable[..., harness.Run], undisturbed: Callable[..., harness.Run]) -> harness.Replaced:
    """`replaced("script arguments: fault fault", ranks=2)`: each fault costs a replacement, and nothing differs."""

    def run(case: str, ranks: int = 2, device: str = "") -> harness.Run:
        command, _, faults = case.partition(": ")
        script, *words = command.split()
        reference = undisturbed(script, ranks, words, device=device)
        result = run_ttprun(script, ranks, faults=faults.split(), script_args=words, device=device)
        harness.assert_only_replaced(result, len(faults.split()))
        harness.assert_same_outcome(result, reference)
        return result

    return run
