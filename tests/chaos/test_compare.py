"""What counts as identical: files, lines, and what was noted after each step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ttprun.chaos.trial.compare import (
    AT_END,
    OfRank,
    RunDifference,
    compare_files,
    compare_lines,
    differing_values,
    unlike,
)


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def test_archives_of_equal_tensors_are_identical_though_their_bytes_differ(twins: tuple[Path, Path]) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "steps": 5, "h": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(state, twins[0] / "final.pt")
    torch.save(dict(state), twins[1] / "other_name.pt")
    (twins[1] / "other_name.pt").rename(twins[1] / "final.pt")

    found = compare_files("final.pt", *twins)

    assert (twins[0] / "final.pt").read_bytes() != (twins[1] / "final.pt").read_bytes()
    assert found.is_identical
    assert found.how == "tensors"


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.tensor([1.0, 2.0000002])},
        {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)},
        {"w": torch.tensor([[1.0, 2.0]])},
        {"v": torch.tensor([1.0, 2.0])},
        {"w": torch.tensor([1.0, 2.0]), "more": 1},
        {"w": torch.tensor([1.0, 2.0]), "s": {2}},
        {"w": [1.0, 2.0]},
    ],
)
def test_any_other_content_differs(twins: tuple[Path, Path], other: dict[str, object]) -> None:
    torch.save({"s": {1}, "w": torch.tensor([1.0, 2.0])}, twins[0] / "f.pt")
    torch.save({"s": {1}} | other, twins[1] / "f.pt")

    found = compare_files("f.pt", *twins)

    assert not found.is_identical
    assert "disturbed" in found.detail


def test_other_files_are_compared_by_their_bytes(twins: tuple[Path, Path]) -> None:
    for folder, text in zip(twins, ("1\n", "2\n"), strict=True):
        (folder / "log.csv").write_text(text)
        (folder / "same.csv").write_text("x")

    assert not compare_files("log.csv", *twins).is_identical
    assert compare_files("same.csv", *twins).is_identical


def test_a_file_that_one_run_did_not_write_is_no_match(twins: tuple[Path, Path]) -> None:
    (twins[1] / "f.pt").write_text("x")

    found = compare_files("f.pt", *twins)

    assert not found.is_identical
    assert found.detail == "the disturbed run did not write it"


def test_the_first_line_that_differs_is_shown() -> None:
    found = compare_lines(1, ["a", "b"], ["a", "c"])

    assert not found.is_identical
    assert found.detail == "line 2: 'b', undisturbed 'c'"
    assert compare_lines(0, ["a"], ["a"]).is_identical
    assert compare_lines(0, ["a"], ["a", "b"]).detail == "line 2: no line, undisturbed 'b'"


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
