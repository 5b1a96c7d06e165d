"""`--keep-steps` and `ttprun replay` on real runs: the step of one rank, taken again in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, environment
from tests.e2e.harness import command as run

SCRIPT = str(SCRIPTS / "taken_again.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run of two ranks, which has ended well, has kept two steps."""
    folder = tmp_path_factory.mktemp("kept")
    code, output = run(folder, "--keep-steps", "2", "--run-dir", "run", "--nproc-per-node", "2", SCRIPT)
    assert code == 0, output
    return folder


@pytest.mark.parametrize(("rank", "step"), [("0", "last"), ("1", "7")])
def test_a_kept_step_taken_again_in_one_process_is_equal_in_all_that_is_compared(
    folder: Path, rank: str, step: str
) -> None:
    code, output = run(folder, "replay", "run", "--rank", rank, "--step", step)

    compared = "2 collectives, 1 batch, 1 loss, weights and optimizer state after the step equal"
    number = 8 if step == "last" else int(step)
    assert (code, output[-1]) == (0, f"rank-0000{rank}-step-{number:08d}: {compared}"), output
    assert "mean loss" in output[0]  # the result of a collective with the other rank, of the step before


def test_what_differs_is_named_from_the_loss_on(folder: Path) -> None:
    code, output = run(folder, "replay", "run", "--rank", "1", FACTOR="1.5")

    assert code == 1, output
    assert "first difference: the loss at taken_again.py:25" in output, output


def test_an_exception_before_the_step_is_named(folder: Path) -> None:
    code, output = run(folder, "replay", "run", "--rank", "1", FACTOR="none")

    assert (code, "ValueError: could not convert string to float: 'none'" in output[-1]) == (2, True), output


def test_an_exception_inside_a_step_comes_again(tmp_path: Path) -> None:
    options = ["--keep-steps", "1", "--run-dir", "run", "--rungs", "restart", "--nproc-per-node", "2"]
    failed, _ = run(tmp_path, *options, SCRIPT, BAD_STEP="5")
    code, output = run(tmp_path, "replay", "run", BAD_STEP="5")

    met = "2 collectives, 1 batch, 1 loss, the same error: ValueError: bad step 5 (taken_again.py:27) equal"
    assert (failed, code) == (1, 0), output
    assert f"rank-00001-step-00000005: {met}" in output, output


def test_a_step_can_be_looked_at_in_the_debugger_and_by_code_of_a_file(folder: Path) -> None:
    (folder / "look.py").write_text("step = 41 + rank\n")

    debugged, seen = run(folder, "replay", "run", "--rank", "1", "--pdb", STDIN="p 'at step', step\nc\n")
    code, output = run(folder, "replay", "run", "--rank", "1", "--run-code", "look.py")

    assert (debugged, "('at step', 7)" in "\n".join(seen)) == (0, True), seen
    assert (code, output[0].startswith("mean loss 42 ")) == (0, True), output


def test_a_step_that_was_saved_is_taken_again_without_its_run(folder: Path, tmp_path: Path) -> None:
    saved, _ = run(folder, "replay", "run", "--rank", "1", "--save", str(tmp_path / "saved"))
    code, output = run(tmp_path, "replay", "saved")

    compared = "2 collectives, 1 batch, 1 loss, weights and optimizer state after the step equal"
    assert (saved, code, output[-1]) == (0, 0, f"saved: {compared}"), output


def test_a_step_with_nan_is_kept_and_the_debugger_stops_where_it_appears(tmp_path: Path) -> None:
    options = ["--on-nan", "keep", "--run-dir", "run", "--nproc-per-node", "2"]
    trained, said = run(tmp_path, *options, SCRIPT, AT_5="nan")
    code, output = run(tmp_path, "replay", "run", "--rank", "1", "--at", "nan", AT_5="nan", STDIN="p step\nc\n")

    assert (trained, "is kept: ttprun replay --rank 1 --step 5" in "\n".join(said)) == (0, True), said
    assert "taken_again.py(25)<module>()" in "\n".join(output), output  # the line behind the loss
    equal = "rank-00001-step-00000005: 2 collectives, 1 batch, 1 loss equal"
    assert (code, output[-1].removeprefix("(Pdb) ")) == (0, equal), output


def test_a_step_on_a_device_is_taken_again_there(tmp_path: Path) -> None:
    on_npu = environment("npu")
    run(tmp_path, "--keep-steps", "1", "--run-dir", "run", str(SCRIPTS / "on_device.py"), "--with", "dropout", **on_npu)

    code, output = run(tmp_path, "replay", "run", **on_npu)

    equal = "1 batch, 1 loss, 1 collective, weights and optimizer state after the step equal"
    assert (code, output[-1].split(": ")[1]) == (0, equal)


@pytest.mark.parametrize("words", [("--pdb", "--run-code", SCRIPT), ("--pdb", "--save", "there")])
def test_two_ways_to_look_into_a_step_are_refused_together(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, output = run(tmp_path, "replay", "run", *words)

    assert (code, f"{words[0]} and {words[1]} cannot be combined" in " ".join(output)) == (2, True), output


def test_a_run_without_kept_steps_says_how_to_keep_them(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "control.token").write_text("0")
    code, output = run(tmp_path, "replay", "run")

    assert (code, "--keep-steps 1" in " ".join(output)) == (2, True), output
