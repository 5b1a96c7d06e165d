"""Which slow cases a commit runs, and in which order."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import commits, turns
from tests.e2e.harness import listed

GREEN = {"green": {"commit": "abc"}, "seconds": 3.0}
FAILED = {"green": {"commit": "abc"}, "failed": {"commit": "def"}}


@given(st.dictionaries(st.text(max_size=5), st.floats(0.1, 60.0), max_size=60))
def test_each_case_has_one_turn_and_no_turn_lasts_longer_than_another_by_more_than_a_case(
    seconds: dict[str, float],
) -> None:
    parts = turns.deal(seconds)

    loads = [sum(seconds[case] for case in part) for part in parts]
    assert len(parts) == commits.TURNS
    assert sorted(case for part in parts for case in part) == sorted(seconds)
    assert max(loads) - min(loads) <= max(seconds.values(), default=0.0) + 1e-6


def test_what_failed_was_never_run_or_was_changed_comes_first_and_the_rest_in_another_order_each_time() -> None:
    results = {"a.py::green": GREEN, "b.py::green": GREEN, "a.py::failed": FAILED}
    cases = ["a.py::green", "b.py::green", "b.py::new", "a.py::failed"]
    many = [f"a.py::{number}" for number in range(20)]

    assert turns.order(cases, results, {"b.py"}, "abc") == ["a.py::failed", "b.py::new", "b.py::green", "a.py::green"]
    assert turns.order(many, {}, (), "one") == turns.order(reversed(many), {}, (), "one")
    assert turns.order(many, {}, (), "one") != turns.order(many, {}, (), "two")
    assert turns.lasting(["old", "new"], {"old": GREEN}) == {"old": 3.0, "new": 3.0}


def test_what_is_written_down_names_tests_that_there_are_and_what_is_known_to_fail_has_a_reason() -> None:
    there = {
        f"{path.name}::{function}"
        for path in (commits.REPOSITORY / "tests").rglob("test_*.py")
        for function in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    not_green = turns.load_not_green()

    ordinary, smoke = listed("ordinary.txt"), listed("smoke.txt")

    assert {case.split("[")[0] for case in [*turns.load_results(), *not_green, *ordinary]} <= there
    assert smoke <= ordinary
    assert all(reason.strip() for reason in not_green.values())


def test_whole_runs_are_in_one_group_where_tests_run_side_by_side(request: pytest.FixtureRequest) -> None:
    if not hasattr(request.config, "workerinput"):
        pytest.skip("tests run one after another")

    runs = [item.nodeid for item in request.session.items if item.get_closest_marker("e2e")]
    assert [name for name in runs if not name.endswith("@e2e")] == []
