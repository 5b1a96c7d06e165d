"""The support matrix: its tests are there and are run as often as it says, and the README says the same in words."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.commits import TURNS, git
from tests.turns import ORDINARY, Results, load_not_green, load_results
from ttprun.cli import guide
from ttprun.cli.main import main

TESTS = Path(__file__).resolve().parent
README = (TESTS.parent / "README.md").read_text(encoding="utf-8")
PARTS, ROWS = guide.read_table()["parts"], guide.read_table()["rows"]
PROOF = {often: {test for row in ROWS for test in row["proof"].get(often, ())} for often in ("every check", "in turns")}
# A proof is too old after two rounds of the slow list. They are counted in days, one slice a day: histories get
# squashed, which leaves no commits to count; dates stay.
GREEN_FOR_DAYS = 2 * TURNS
GREEN = {"commit": "abc", "date": "2026-11-24", "torch": "2.13.0", "python": "3.11.7"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['lost']}: {row['parallelism']}: {row['program']}")
def test_each_row_has_a_rung_and_names_tests_that_are_there(row: dict[str, Any]) -> None:
    tests = [test.split("::") for named in row["proof"].values() for test in named]

    assert row["lost"] in guide.COSTS
    assert row["device"] in ("cpu", "simulated")
    assert set(row["proof"]) <= {"every check", "in turns", "by hand"}
    assert tests
    assert [name for path, name in tests if name not in functions_of(TESTS / path)] == []


def test_tests_are_run_as_often_as_the_matrix_says(request: pytest.FixtureRequest) -> None:
    ordinary = request.config.stash.get(ORDINARY, {})
    named = PROOF["every check"] | PROOF["in turns"]
    if not named <= set(ordinary):
        pytest.skip("not all tests were collected")

    assert {test for test in named if ordinary[test]} == PROOF["every check"]


def test_the_readme_has_eight_rows_in_words_and_each_row_of_the_matrix_is_in_one() -> None:
    table = README[README.index("| what trains |") :].splitlines()[2:10]
    costs = [{row["lost"] for row in ROWS if row["part"] == part} for part in range(1, len(PARTS) + 1)]

    assert table == [f"| {part['what']} | {part['lost']} |" for part in PARTS]
    assert [set(re.findall("|".join(guide.COSTS), part["lost"])) for part in PARTS] == costs
    assert "test_" not in README


def test_the_page_says_of_each_test_when_it_was_green(capsys: pytest.CaptureFixture[str]) -> None:
    main(["guide", "support"])

    page = capsys.readouterr().out
    assert all(f"`tests/{test}`" in page for test in PROOF["every check"] | PROOF["in turns"])
    assert [line for line in page.splitlines() if "in turns: " in line] == []


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ({}, "not seen green on this code yet"),
        ({"a.py::b[x]": {"failed": GREEN}}, "not seen green on this code yet, 1 cases failed in their last run"),
        ({"a.py::bc": {"green": GREEN}}, "not seen green on this code yet"),
        (
            {"a.py::b[x]": {"green": GREEN}, "a.py::b[y]": {"green": GREEN | {"date": "2026-11-25"}}},
            "2 cases green, 2026-11-24, abc, torch 2.13.0, Python 3.11.7",
        ),
    ],
    ids=["nothing", "a failure", "another test", "two cases"],
)
def test_of_several_cases_the_one_longest_ago_counts(results: dict[str, Any], said: str) -> None:
    assert guide.last_green("e2e/a.py::b", results) == said


def test_each_proof_that_is_run_in_turns_was_green_lately() -> None:
    committed = git("log", "-1", "--format=%cs")
    day = date.fromisoformat(committed) if committed else datetime.now(UTC).date()
    results, not_green = load_results(), load_not_green()

    reasons = {test: why_no_proof(test, results, not_green, day) for test in PROOF["in turns"]}

    assert {test: why for test, why in reasons.items() if why} == {}


def why_no_proof(test: str, results: Results, not_green: Collection[str], day: date) -> str:
    """Why a test, named as support.yaml does, proves nothing on that day; "" if it does.

    A case that was never run is not looked at: it is the first to be run.
    """
    name = test.rpartition("/")[2]
    known = [case for case in not_green if case.partition("[")[0] == name]
    cases = {case: seen for case, seen in results.items() if case.partition("[")[0] == name}
    if known:
        return f"{known[0]} is known to fail"
    for case, seen in cases.items():
        if "failed" in seen:
            return f"{case} has failed"
        if "green" in seen and (day - date.fromisoformat(seen["green"]["date"])).days > GREEN_FOR_DAYS:
            return f"{case} was last green on {seen['green']['date']}"
    return "" if any("green" in seen for seen in cases.values()) else "no case was ever seen green"


def functions_of(path: Path) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
