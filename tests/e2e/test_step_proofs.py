"""The step of a replacement is proved, too, where the lost rank alone held its part of the state."""

from __future__ import annotations

from tests.e2e.harness import RunTtprun, Undisturbed, assert_only_replaced, assert_same_outcome

SCRIPT = "hidden_step.py"
KILL = "kill:rank=0,step=18,phase=backward"


def test_a_step_that_gives_the_same_again_is_proved(run_ttprun: RunTtprun, undisturbed: Undisturbed) -> None:
    result = run_ttprun(SCRIPT, 2, faults=[KILL])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(SCRIPT, 2))
    proved = "rank 0: the step of the optimizer to boundary 18, taken again from the mirror"
    assert proved in result.incidents[0]["equal"], result.story()
    assert result.incidents[0]["not_proved"] == []


def test_a_step_that_gives_the_same_to_rounding_is_named_and_training_goes_on(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(SCRIPT, 2, faults=[KILL], script_args=["--kind", "rounding"])

    assert_only_replaced(result)
    (named,) = result.incidents[0]["not_proved"]
    assert named.startswith(
        "rank 0: the step of its optimizer: taken again, it gives the lost rank's state to rounding"
    )
    assert named in result.output


def test_a_step_that_gives_something_else_is_refused(run_ttprun: RunTtprun) -> None:
    result = run_ttprun(SCRIPT, 2, faults=[KILL], script_args=["--kind", "wrong"])

    assert result.exit_code != 0
    assert [one["outcome"] for one in result.incidents] == ["failed"], result.story()
    assert "does not give what it gave in the lost rank" in result.output
