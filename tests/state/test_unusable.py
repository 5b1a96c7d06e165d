"""Notes that a run could not go on from a checkpoint: for whom they hold, and what becomes of such checkpoints."""

from __future__ import annotations

from pathlib import Path

from tests.state.making import locked, names, take
from ttprun.state.checkpoint import fingerprint, note, why_passed_over


def launch(folder: Path, *words: str, world_size: int = 2) -> str:
    return fingerprint(words or ("train.py",), world_size, [folder])


def test_the_same_launch_does_not_try_a_refused_checkpoint_again_and_another_one_does(tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "parts").mkdir(parents=True)
    (code / "parts" / "model.py").write_text("width = 1\n")
    one = take(locked(tmp_path / "save"), 10).path

    note(one, launch(code), "rank 1: it stands elsewhere", is_refused=True)

    assert "rank 1: it stands elsewhere" in why_passed_over(one, launch(code))
    assert "remove" in why_passed_over(one, launch(code))
    assert why_passed_over(one, launch(code, "train.py", "--lr", "1")) == ""
    assert why_passed_over(one, launch(code, world_size=3)) == ""
    (code / "parts" / "model.py").write_text("width = 2\n")
    assert why_passed_over(one, launch(code)) == ""


def test_processes_that_were_lost_on_the_way_count_when_it_happens_at_a_second_launch(tmp_path: Path) -> None:
    one = take(locked(tmp_path / "save"), 10).path

    note(one, "launch", "3 attempts failed", is_refused=False)
    after_one = why_passed_over(one, "launch")
    note(one, "launch", "3 attempts failed", is_refused=False)

    assert after_one == ""
    assert "3 attempts failed" in why_passed_over(one, "launch")


def test_a_run_that_begins_anew_does_not_remove_what_could_not_be_used(tmp_path: Path) -> None:
    store = locked(tmp_path / "save", keep=1)
    note(take(store, 50).path, "launch", "it stands elsewhere", is_refused=True)

    for boundary in (10, 20, 30):
        take(store, boundary)

    assert names(store.save_dir) == {"step-00000050", "step-00000030", "latest"}


def test_a_note_that_is_no_note_is_none(tmp_path: Path) -> None:
    one = take(locked(tmp_path / "save"), 10).path
    (one / "unusable.json").write_text("[1, 2")

    assert why_passed_over(one, "launch") == ""
