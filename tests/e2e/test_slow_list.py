"""The lists of slow tests and of smoke tests name tests that there are: a renamed one would run unseen, or never."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.harness import listed


@pytest.mark.parametrize("name", ["slow.txt", "smoke.txt"])
def test_every_test_that_is_listed_is_there(name: str) -> None:
    here = Path(__file__).parent
    text = "".join(path.read_text() for path in here.glob("test_*.py"))
    functions = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))

    assert {test.split("::")[1].split("[")[0] for test in listed(name)} <= functions


def test_no_smoke_test_is_left_out_as_slow() -> None:
    assert listed("smoke.txt") & listed("slow.txt") == set()


def test_whole_runs_are_in_one_group_where_tests_run_side_by_side(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("tests run one after another")

    assert request.node.nodeid.endswith("@e2e")
