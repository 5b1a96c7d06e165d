"""A training loop is recorded in one process and goes on in another, with a file between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.alone.scripts import CALL, LOADER, RANGE, run

NOTHING_OF_A_RANK = "not wanted: []"


@pytest.mark.parametrize("script", [LOADER, RANGE], ids=["loader", "range"])
def test_a_killed_loop_goes_on_in_another_process_to_the_same_losses_and_weights(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    undisturbed = run(tmp_path, "train.py")

    first = run(tmp_path, "-c", CALL.format("Capture().record('train.py', 'loop.rec')"), kill_after=7)
    second = run(tmp_path, "-c", CALL.format("Capture().replay('train.py', 'loop.rec')"))

    assert first.splitlines() == [NOTHING_OF_A_RANK]
    assert NOTHING_OF_A_RANK in second.splitlines()
    assert second == undisturbed


def test_a_loop_that_is_killed_three_times_loses_no_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOADER)
    undisturbed = run(tmp_path, "train.py")

    run(tmp_path, "-c", CALL.format("Capture().record('train.py', 'loop.rec')"), kill_after=1)
    for kill_after in (5, 11):
        run(tmp_path, "-c", CALL.format("Capture().replay('train.py', 'loop.rec', every=1)"), kill_after=kill_after)
    last = run(tmp_path, "-c", CALL.format("Capture().replay('train.py', 'loop.rec')"))

    assert last == undisturbed


def test_a_file_of_another_script_is_refused_and_its_output_is_shown_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANGE)
    run(tmp_path, "-c", CALL.format("Capture().record('train.py', 'loop.rec', every=4)"), kill_after=5)
    (tmp_path / "train.py").write_text(RANGE.replace("        x =", "\n        x ="))

    attempt = "\ntry:\n    Capture().replay('train.py', 'loop.rec')\nexcept RuntimeError as error:\n    print(error)"
    said = run(tmp_path, "-c", CALL.format(attempt))

    assert "does not reach the place of boundary 3" in said or "not boundary 4" in said


def test_a_step_that_no_replay_could_reach_says_why(tmp_path: Path) -> None:
    script = RANGE.replace(
        "        if step % 2:\n            optimizer.step()",
        "        if step:\n            optimizer.step(lambda: loss)",
    )
    (tmp_path / "train.py").write_text(script)

    attempt = "\ntry:\n    Capture().record('train.py', 'loop.rec')\nexcept RuntimeError as error:\n    print(error)"
    said = run(tmp_path, "-c", CALL.format(attempt))

    assert said.strip() == "the optimizer's step is given a closure: call step() without one"
