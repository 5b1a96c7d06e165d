"""The kernel kills a rank for memory, really: in a control group of its own, if this machine lets us make one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import Launch, Run, assert_no_orphans, assert_only_replaced, assert_same_outcome
from ttprun.tensors.memory import own_cgroup

HUNGRY = "hungry.py"
LIMIT_BYTES = 3 << 30  # a launcher, two ranks and a standby need half of it


@pytest.fixture
def memory_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A control group below our own, with a limit on memory; version 2 (memory.max) or 1.

    A fork's memory counts for the group of the process that it was forked from: only new Pythons get into it whole.
    """
    monkeypatch.setattr(harness, "forked", None)
    group = (own_cgroup() or Path("/none")) / f"ttprun-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        limits = [group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()]
        if not limits:
            pytest.skip("a control group made here has no limit on memory")
        limits[0].write_text(str(LIMIT_BYTES))
        yield group
    finally:
        group.rmdir()


def test_a_rank_killed_for_memory_is_named_so_and_replaced(
    memory_group: Path, start_ttprun: Callable[..., Launch], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    launch = start_ttprun(HUNGRY, 2, script_args=[f"--appetite={tmp_path / 'eaten'}"])
    (memory_group / "cgroup.procs").write_text(str(launch.process.pid))  # before it has started anything

    result = launch.finish()

    assert_no_orphans(result)
    assert (tmp_path / "eaten").exists()
    # The first replacement is answered as the lost rank was, and eats again; the second one finds what is there.
    assert_only_replaced(result, incidents=2)
    for incident in result.incidents:
        assert incident["kind"] == "signal 9", result.story()
        assert "out of memory (cgroup limit)" in incident["reason"], result.story()
    assert_same_outcome(result, undisturbed(HUNGRY, 2))
