"""Scripts that do one odd thing each: whoever is lost is replaced, and nothing differs; or it is refused, and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Replaced, RunTtprun, Undisturbed, assert_same_outcome, assert_survivors_kept_their_pids
from tests.e2e.test_checkpoints import Series, assert_resumed, assert_saved

# Script, its arguments: what befalls it.
ODD = [
    # The second of three trainings has taken one step; the replay passes over the first, and the groups it destroyed.
    "sweep.py: kill:rank=1,step=13,phase=backward kill:rank=0,step=31,phase=in_step",
    "sweep_own.py: kill:rank=1,step=17,phase=backward kill:rank=0,step=20,phase=forward",
    # The first step after a trial that was pruned, and one in the middle of another.
    "sweep_by_pass.py counted: kill:rank=1,step=14,phase=backward kill:rank=0,step=17,phase=backward",
    "sweep_by_pass.py drawn: kill:rank=1,step=14,phase=backward kill:rank=0,step=17,phase=backward",
    "validates_first.py: kill:rank=1,step=3,phase=backward kill:rank=0,step=7,phase=backward",
    "config_of_locals.py: kill:rank=1,step=8,phase=backward",
    "samples_in_memory.py --kind arrays --write: kill:rank=1,step=13,phase=backward kill:rank=1,step=19,phase=in_step",
    "samples_in_memory.py --kind tokens: kill:rank=1,step=13,phase=backward kill:rank=1,step=19,phase=in_step",
    "samples_in_memory.py --kind annotations --write: kill:rank=1,step=13,phase=backward kill:rank=1,step=19",
    # While the averaged weights stand in the place of the trained ones.
    "weights_by_hand.py --manner swap: kill:rank=1,step=11,phase=validation",
    "closure_steps.py --optimizer wrapper: kill:rank=1,step=4,phase=backward kill:rank=0,step=9,phase=in_step",
    # It saves and rotates checkpoints in each second step; its set-up looks for them.
    "looks_at_files.py: kill:rank=1,step=7,phase=backward kill:rank=0,step=10,phase=forward",
    "worker_contexts.py --context forkserver: kill:rank=1,step=8,phase=backward",
    "worker_contexts.py --context forkserver --persistent: kill:rank=1,step=17,phase=backward",
    "worker_contexts.py --context fork --persistent --stateful: kill:rank=1,step=17,phase=backward",
]


@pytest.mark.parametrize("case", ODD)
def test_a_rank_of_a_script_that_does_something_odd_is_replaced_and_nothing_differs(
    replaced: Replaced, case: str
) -> None:
    if "--stateful" in case:
        pytest.importorskip("torchdata")
    replaced(case)


# The boundaries of a GAN lie after each of its two steps, the discriminator's first.
CARRIED = [
    "gan: kill:rank=1,step=9,phase=forward kill:rank=0,step=13,phase=in_step",  # the generator's pass, and the other's
    "gan: kill:rank=0,step=11,phase=backward kill:rank=1,step=14,phase=backward",
    "never: kill:rank=1,step=5,phase=backward kill:rank=0,step=7,phase=in_step",
    "sharded: kill:rank=1,step=6,phase=backward kill:rank=0,step=9,phase=forward",
    "by-hand: kill:rank=1,step=6,phase=collective",
    "damped: kill:rank=1,step=6,phase=forward",
    "late: kill:rank=1,step=9,phase=backward",
    "logged: kill:rank=1,step=6,phase=backward kill:rank=0,step=9,phase=in_step",
]


@pytest.mark.parametrize("case", CARRIED)
def test_a_replacement_has_the_gradients_that_the_next_backward_adds_to(replaced: Replaced, case: str) -> None:
    replaced(f"carried_gradients.py --what {case}")


def test_without_a_mirror_all_go_back_to_a_snapshot_that_has_the_gradients(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    fault, args = "kill:rank=1,step=6,phase=backward", ["--what", "sharded"]
    result = run_ttprun("carried_gradients.py", 2, faults=[fault], options=["--buddy", "off"], script_args=args)

    assert [(one["rung"], one["outcome"]) for one in result.incidents] == [("rewind", "recovered")], result.story()
    expected = undisturbed("carried_gradients.py", 2, script_args=args)
    assert (result.final, result.hashes) == (expected.final, expected.hashes), result.story()


def test_gradients_that_are_carried_for_the_first_time_are_named_in_that_step(replaced: Replaced) -> None:
    result = replaced("carried_gradients.py --what late: kill:rank=1,step=7,phase=before_step")

    named = [event["boundary"] for event in result.events if event["event"] == "rank_hindered" and event["reason"]]
    assert named == [6, 6], result.story()


# Of the 16 and 20 steps over the chain's parts the 4th of the second one; nested in a generator that has begun anew;
# behind a step no loss shows it; the slice is in its loader's second round.
COUNTING = [
    "track: step=13",
    "chain: step=20",
    "generator: step=13",
    "accumulated: step=4",
    "nested: step=15",
    "slice: step=24",
]


@pytest.mark.parametrize("case", ["nested: step=15,phase=after_step", *(f"{case},phase=backward" for case in COUNTING)])
def test_a_replacement_counts_on_where_the_lost_rank_had_counted_to(replaced: Replaced, case: str) -> None:
    """What a loop runs over may count for itself."""
    manner, _, moment = case.partition(": ")
    replaced(f"counting_iterators.py --manner {manner}: kill:rank=1,{moment}")


@pytest.mark.parametrize(
    ("script", "words", "moment"),
    [
        ("counting_iterators.py", "--manner track", "step=13,phase=backward"),
        ("counting_iterators.py", "--manner nested", "step=15,phase=backward"),
        ("weights_by_hand.py", "--manner swap", "step=11,phase=validation"),
    ],
)
def test_a_job_of_such_a_script_that_is_ended_is_resumed_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, tmp_path: Path, script: str, words: str, moment: str
) -> None:
    """All ranks replay here, so that there is none that could notice."""
    series = Series(run_ttprun, tmp_path, script, 2, words.split())

    saved = series.launch([f"preempt:rank=1,{moment}"])
    resumed = series.launch()

    assert_saved(saved, "ended")
    assert_resumed(resumed, saved.status["checkpoint"]["boundary"])
    assert_same_outcome(series.as_one(), undisturbed(script, 2, words.split()))


def test_what_cannot_be_made_to_count_on_is_refused_by_its_place(run_ttprun: RunTtprun, tmp_path: Path) -> None:
    series = Series(run_ttprun, tmp_path, "counting_iterators.py", 2, ["--manner", "cycle"])

    first = series.launch(["preempt:rank=1,step=13,phase=backward"])
    second = series.launch()

    assert (first.exit_code, second.exit_code) == (143, 0), first.story() + second.story()
    assert "the iterable of loop 1 around the step" in second.output, second.story()
    assert "is a cycle that gathers what it will hand out again" in second.output


def test_a_rank_is_replaced_though_its_epoch_begins_with_what_the_ones_before_have_made(replaced: Replaced) -> None:
    """A replay passes over the epochs before."""
    result = replaced("heads_of_epochs.py: kill:rank=1,step=10,phase=backward kill:rank=0,step=13,phase=forward")

    assert "is replaced once more: the replay jumps into a loop" in result.status["incidents"][0]["reason"]


def test_an_epoch_that_begins_with_what_no_replay_can_make_ends_the_job_with_the_scripts_error(
    run_ttprun: RunTtprun,
) -> None:
    kill = "kill:rank=1,step=10,phase=backward"

    result = run_ttprun("heads_of_epochs.py", 2, faults=[kill], script_args=["--keep-objects"])

    (incident,) = result.incidents
    assert incident["outcome"] == "failed", result.story()
    assert "IndexError: list index out of range" in incident["reason"]


def test_a_script_that_ends_in_a_replay_is_reported_with_its_last_words(run_ttprun: RunTtprun) -> None:
    words = ["--what", "by_a_command"]
    result = run_ttprun("looks_at_files.py", 2, faults=["kill:rank=1,step=8,phase=backward"], script_args=words)

    reasons = " ".join(event.get("reason") or "" for event in result.events)
    assert "the script's last words: a command has looked | " in reasons, result.story()
    assert "rank1 was trained before" in reasons, result.story()


def test_a_change_that_nobody_could_see_ends_in_a_restart_and_never_in_other_weights(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    script, args = "weights_by_hand.py", ["--manner", "once"]
    kill = "kill:rank=1,step=11,phase=backward"

    run = run_ttprun(script, 2, faults=[kill], options=["--max-restarts", "1"], script_args=args)

    (restarted,) = run.incidents
    assert (restarted["rung"], restarted["outcome"]) == ("restart", "restarted"), run.story()
    assert "loss number 1 of step 11 differs from the lost rank's" in restarted["reason"], run.story()
    assert run.exit_code == 0, run.story()
    assert run.final == undisturbed(script, 2, args).final, run.story()


def test_an_optimizer_that_keeps_a_loss_of_each_rank_s_own_goes_back_to_a_snapshot(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    script, args = "closure_steps.py", ["--optimizer=lbfgs-once"]  # LBFGS keeps the last loss in its state
    kill, options = "kill:rank=1,step=13,phase=backward", ["--snapshot-every", "5steps"]

    result = run_ttprun(script, 2, faults=[kill], options=options, script_args=args)

    assert [(one["rung"], one["outcome"]) for one in result.incidents] == [("rewind", "recovered")], result.story()
    assert "model.module.0.weight" in result.incidents[0]["reason"], result.story()
    assert result.hashes == undisturbed(script, 2, args).hashes, result.story()


def test_an_optimizer_that_calls_its_closure_several_times_is_refused_at_its_first_step_with_the_reason(
    run_ttprun: RunTtprun, undisturbed: Undisturbed
) -> None:
    script, args = "closure_steps.py", ["--optimizer=lbfgs"]

    result = run_ttprun(script, 2, script_args=args)

    assert_same_outcome(result, undisturbed(script, 2, args))
    assert_survivors_kept_their_pids(result)
    reasons = [event["reason"] for event in result.events if event["event"] == "rank_unprotected"]
    assert any("calls its closure several times" in reason for reason in reasons), result.story()
