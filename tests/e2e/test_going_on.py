"""A job whose state is saved goes on from it by itself, and no checkpoint fails it twice: scenario A36."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.harness import (
    PLAIN,
    SCRIPTS,
    RunTtprun,
    StartTtprun,
    Undisturbed,
    assert_no_orphans,
    assert_same_outcome,
)

KILL = "kill:rank=1,step=20,phase=backward"
NO_REPLACING = ["--rungs", "reconnect,rewind,restart,persist"]


def test_a_job_that_cannot_replace_a_rank_goes_on_by_itself_from_the_state_that_it_saves(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    run = run_ttprun(PLAIN, 2, faults=[KILL], options=NO_REPLACING)

    (incident,) = run.incidents
    assert (incident["rung"], incident["outcome"], incident["steps_lost"]) == ("restart", "recovered", 0), run.story()
    assert f"all resume from the state saved at step {incident['boundary']}" in incident["reason"], run.story()
    assert_same_outcome(run, undisturbed(PLAIN, 2))
    assert_no_orphans(run)


def test_a_script_that_has_been_changed_begins_anew_says_so_and_keeps_what_was_saved(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    text = (SCRIPTS / PLAIN).read_text()
    script.write_text(text)
    save_dir = tmp_path / "save"
    same = {"options": ["--save-dir", str(save_dir), "--keep-checkpoints", "1"], "out": tmp_path / "out"}
    start_ttprun(str(script), 2, faults=["preempt:rank=0,step=10,phase=backward"], **same).finish()
    (saved,) = save_dir.glob("step-*")

    script.write_text("import os\n" + text)  # every line of it stands elsewhere now
    second = start_ttprun(str(script), 2, faults=["preempt:rank=0,step=20,phase=backward"], **same).finish()
    third = start_ttprun(str(script), 2, **same).finish()

    assert second.exit_code == 143, second.story()
    assert f"the same command and files do not resume from '{saved}' again" in second.output, second.story()
    assert "the script starts anew" in second.output, second.story()
    assert second.incidents == [], second.story()
    assert saved.exists()
    assert third.status["resume"]["boundary"] == second.status["checkpoint"]["boundary"], third.story()
    assert third.final == undisturbed(PLAIN, 2).final, third.story()
