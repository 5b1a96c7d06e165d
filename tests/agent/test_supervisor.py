"""The supervisor's thread: what it does when something goes wrong in it, and between two groups of ranks."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.starting import LIMIT_S
from ttprun.agent.supervisor import Supervisor
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.state.store import CheckpointStore


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """Of two ranks, none of which has been started; its thread runs."""
    run = RunDirectory.create("run", tmp_path / "run")
    store = CheckpointStore(tmp_path / "checkpoints", 3)
    found = Supervisor(Config(standbys=0), run, 2, is_python=True, max_restarts=0, store=store)
    found.start()
    yield found
    found.stop(0)
    run.release()


def comes_around(supervisor: Supervisor) -> bool:
    """Whether the thread has come to its selector again, and to all that is ready there."""
    done, visits = threading.Event(), iter(range(2))
    ready, end = os.pipe()
    os.write(end, b"x")

    def visit() -> None:
        if next(visits, None) is None:
            supervisor.selector.unregister(ready)
            done.set()

    def listen() -> None:
        supervisor.selector.register(ready, selectors.EVENT_READ, visit)

    supervisor.call(listen)
    is_seen = done.wait(LIMIT_S)
    os.close(ready)
    os.close(end)
    return is_seen


def test_what_has_become_ready_under_a_number_that_is_given_anew_is_not_taken_for_the_new_owner(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    """Both pipes are ready in one look; whoever comes first closes the other one, whose number goes to a third."""
    called: list[str] = []
    pipes = {name: os.pipe() for name in ("a", "b")}
    for _, end in pipes.values():
        os.write(end, b"x")

    def answer(name: str, other: str) -> None:
        called.append(name)
        number = pipes[other][0]
        for name_of in (name, other):
            supervisor.selector.unregister(pipes[name_of][0])
        third, third_end = os.pipe()
        pipes["third"] = (os.dup2(third, number), third_end)
        os.close(third)
        supervisor.selector.register(number, selectors.EVENT_READ, lambda: called.append("third"))

    def listen() -> None:
        for name, other in (("a", "b"), ("b", "a")):
            supervisor.selector.register(pipes[name][0], selectors.EVENT_READ, lambda n=name, o=other: answer(n, o))

    supervisor.call(listen)

    assert comes_around(supervisor)
    assert called in (["a"], ["b"])
    assert caplog.records == []
