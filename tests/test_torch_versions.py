"""What is said and done about torch releases, by their versions alone; scripts/test_matrix.sh runs jobs on them."""

from __future__ import annotations

import tomllib
from argparse import Namespace
from pathlib import Path

import pytest

from tests.versions import load_versions
from ttprun import torch_versions

REPOSITORY = Path(__file__).resolve().parents[1]
GREEN = [seen for seen in load_versions().values() if seen["passed"] and not seen["failed"]]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_the_lower_bound_of_the_package_is_the_oldest_release_that_was_tried() -> None:
    oldest, newest = torch_versions.OLDEST, torch_versions.NEWEST

    assert f"torch>={oldest[0]}.{oldest[1]}" in PROJECT["dependencies"]
    assert torch_versions.release_of(torch_versions.TRIED[0]) == oldest
    assert torch_versions.release_of(torch_versions.TRIED[-1]) == newest


def test_no_release_and_no_python_is_claimed_on_which_the_smoke_tests_were_not_seen_green() -> None:
    releases = sorted({torch_versions.release_of(seen["torch"]) for seen in GREEN})
    pythons = {seen["python"].rpartition(".")[0] for seen in GREEN}
    classified = {word.rpartition(" ")[2] for word in PROJECT["classifiers"] if "Python :: 3." in word}

    assert [torch_versions.release_of(tried) for tried in torch_versions.TRIED] == releases
    assert classified == pythons


@pytest.mark.parametrize("page", ["README.md", "ttprun/guide/limits.md"])
def test_what_is_written_of_the_releases_is_what_was_tried(page: str) -> None:
    text = " ".join((REPOSITORY / page).read_text(encoding="utf-8").split())
    *tried, newest = torch_versions.TRIED

    assert f"{', '.join(tried)} and {newest}" in text


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.15.1", "2.9.0a0+git1234"])
def test_nothing_is_said_of_a_release_between_those_that_were_tried(version: str) -> None:
    assert torch_versions.why_untried(version) == ""


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0", "2.5.1", "unknown"])
def test_another_release_is_named_with_what_to_do(version: str) -> None:
    said = torch_versions.why_untried(version)

    assert version in said
    assert "ttprun doctor" in said
    assert "\n" not in said


def test_an_option_that_torchrun_does_not_have_yet_is_as_torch_does_anyway() -> None:
    old = Namespace(nnodes="1")

    assert torch_versions.launch_option(old, "signals_to_handle") == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert torch_versions.launch_option(Namespace(signals_to_handle="SIGHUP"), "signals_to_handle") == "SIGHUP"
