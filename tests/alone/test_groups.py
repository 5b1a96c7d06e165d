"""Groups alone: a member that is lost is replaced in the middle of a step, without capture, ranks or an agent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.alone.members import LOOP, run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(LOOP, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("kill_at", "again", "at_least"),
    [
        ("1 inside 2", "", 2),  # a small all-reduce has completed, a large one is under way
        ("2 inside 0", "2 inside 0", 3),  # before any boundary; and its replacement in the same collective
        ("0 between 3", "", 1),  # it has passed a boundary: the others, too, though they may not know
    ],
)
def test_a_member_killed_inside_a_collective_is_replaced_and_results_are_those_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: list[dict[str, str]], kill_at: str, again: str, at_least: int
) -> None:
    lost = int(kill_at[0])

    found = run(LOOP, tmp_path, kill_at, again)

    assert [member["result"] for member in found] == [member["result"] for member in undisturbed]
    assert len({member["result"] for member in found}) == 1
    assert {member["not wanted"] for member in found} == {"[]"}
    assert {member["unprotected"] for member in found} == {""}
    assert all(int(member["issued again"]) >= at_least for rank, member in enumerate(found) if rank != lost)


ALONE = """
import sys
import torch.distributed as dist
from tests.alone.groups import Groups

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
groups = Groups(store, 0, 2, limit_s=0.5)
try:
    groups.pass_boundary({"state": STATE})
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("1.0", "TimeoutError: nobody has reported 'rank 1 at boundary 1' within 0 s"),
        ("sys", "TypeError: "),
        ("object()", "TypeError: a process in the place of this one could not read the state"),
    ],
)
def test_a_member_that_does_not_come_and_a_state_that_nobody_could_read_are_errors(state: str, said: str) -> None:
    program = ALONE.replace("STATE", state)

    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)

    assert found.stdout.startswith(said), (found.stdout, found.stderr)
