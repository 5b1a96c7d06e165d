"""A script does not notice that it is watched: with every hook in and no fault, it sees what it sees under torchrun."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.e2e.harness import Run, assert_same_outcome

# What stands in the guide ("What a script can notice").
NOTICED = re.compile(
    r"""noticed\ (
        dataset:\ __len__
        | .*\.(bytearray|datetime|decimal|partial|property)_kind:\ (__getattribute__\ )?__(reduce|reduce_ex|getstate)__
        | .*\.path_kind:\ __getattribute__\ _(str|drv|root|parts|format_parsed_parts)
    ):""",
    re.VERBOSE,
)


def without_noted(run: Run) -> Run:
    """The run, without the looks that the guide names."""
    for rank, lines in run.stdout.items():
        run.stdout[rank] = [line for line in lines if not NOTICED.search(line)]
    run.status["not_proved"] = []  # a dictionary that holds its values weakly
    return run


def test_no_object_of_the_script_notices_that_its_state_is_recorded(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    result = run_ttprun("noticing/train.py", 2)

    assert [event["event"] for event in result.events].count("rank_unprotected") == 0, result.story()
    assert_same_outcome(without_noted(result), without_noted(undisturbed("noticing/train.py", 2)))
