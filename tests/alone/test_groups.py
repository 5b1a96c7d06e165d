"""Groups alone: a member that is lost is replaced in the middle of a step, without capture, ranks or an agent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alone.members import LOOP, run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(LOOP, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("kill_at", "again", "at_least"),
    [
        ("1 inside 2", "", 8),  # a small all-reduce has completed, a large one is under way
        # And its replacement in the same collective.
        pytest.param("2 inside 0", "2 inside 0", 3, marks=pytest.mark.slow),
        pytest.param("0 before 3", "", 10, marks=pytest.mark.slow),
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
