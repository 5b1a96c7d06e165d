"""Where a run differs from one under torchrun, and what is no difference."""

from __future__ import annotations

from ttprun.chaos.trial.compare import AT_END, OfRank, RunDifference, differing_values, unlike

DIGEST, OTHER = "0" * 32, "1" * 32


def test_the_first_value_that_is_not_as_under_torchrun_is_named_with_both() -> None:
    ours = {1: OfRank(values=[{"lr": "0.1", "weight": f"float32 [2] {DIGEST}"}, {"lr": "0.2", "weight": "x"}])}
    theirs = {1: OfRank(values=[{"lr": "0.1", "weight": f"float32 [2] {DIGEST}"}, {"lr": "0.3", "weight": "y"}])}

    assert differing_values(ours, theirs) == [RunDifference(2, "lr in rank 1")]
    assert differing_values(ours, theirs)[0].detail == "after step 1: 0.2 instead of 0.3"


def test_of_a_tensor_with_the_same_form_no_digest_is_shown() -> None:
    ours, theirs = ({0: OfRank(values=[{"weight": f"float32 [2] {digest}"}])} for digest in (DIGEST, OTHER))

    assert [one.detail for one in differing_values(ours, theirs)] == ["after step 0: other elements"]


def test_steps_that_one_of_them_has_not_noted_are_not_compared() -> None:
    assert differing_values({0: OfRank()}, {0: OfRank(values=[{"lr": "0.1"}])}) == []


def test_files_whose_names_hold_a_time_or_a_pid_differ_by_themselves() -> None:
    found = [RunDifference(AT_END, "file runs/events.171.4a2"), RunDifference(AT_END, "file out/final.pt")]
    by_itself = [RunDifference(AT_END, "file runs/events.169.77f")]

    assert unlike(found, by_itself) == [RunDifference(AT_END, "file out/final.pt")]
