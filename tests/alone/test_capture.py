"""A training loop is recorded in one process and goes on in another, with a file between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alone.scripts import LOADER, RANGE, run

NOTHING_OF_A_RANK = "not wanted: []"
CAPTURED = ("-c", "from tests.alone.capture import Capture; Capture('loop.rec').run('train.py')")


@pytest.mark.parametrize(
    ("script", "kills"),
    [pytest.param(LOADER, [1, 5, 11], id="loader", marks=pytest.mark.slow), pytest.param(RANGE, [7], id="range")],
)
def test_a_killed_loop_goes_on_in_another_process_to_the_same_losses_and_weights(
    tmp_path: Path, script: str, kills: list[int]
) -> None:
    (tmp_path / "train.py").write_text(script)
    undisturbed = run(tmp_path, "train.py")

    killed = [run(tmp_path, *CAPTURED, kill_after=number) for number in kills]
    last = run(tmp_path, *CAPTURED)

    assert [said.splitlines() for said in killed] == [[NOTHING_OF_A_RANK]] * len(kills)
    assert NOTHING_OF_A_RANK in last.splitlines()
    assert last == undisturbed
