"""The programs of others: what counts as exact, and the guide's table of the results."""

from __future__ import annotations

import json

import pytest

from scripts import strangers

RESULTS = json.loads(strangers.RESULTS.read_text(encoding="utf-8"))


def test_the_guides_table_is_that_of_the_results() -> None:
    page = strangers.PAGE.read_text(encoding="utf-8")

    assert strangers.renewed(page, RESULTS) == page


def test_each_result_is_of_a_program_that_can_be_run_again() -> None:
    assert RESULTS.keys() <= strangers.table()["programs"].keys()


@pytest.mark.parametrize(
    ("trace", "is_exact"),
    [
        ("1a 1b 1c", True),
        ("1a 1b 2b 2c", True),  # the replacement takes the step again in which its predecessor was lost
        ("1a 2x 2b 2c", True),  # begins with a line of its replay
        ("1a 2c", False),
        ("1a 2b 2x", False),
        ("1a 1b", False),
    ],
)
def test_a_rank_is_exact_if_its_processes_have_taken_all_steps_and_no_other(trace: str, is_exact: bool) -> None:
    lines = [(word[0], word[1:]) for word in trace.split()]

    assert strangers.is_covered(["a", "b", "c"], lines) is is_exact
