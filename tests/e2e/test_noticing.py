"""A script does not notice that it is watched: with every hook in and no fault, it sees what it sees under torchrun."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Run, assert_same_outcome, start_torchrun
from ttprun.device.device_errors import VARIABLES

# What stands in the guide ("What a script can notice").
NOTICED = re.compile(
    r"""noticed\ (
        dataset:\ __len__
        | .*\.(array|bytearray|datetime|decimal|partial|property)_kind:
            \ (__getattribute__\ )?__(reduce|reduce_ex|getstate)__
        | .*\.array_kind:\ __getattribute__\ __dict__
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


# What differs, by the names in surroundings.py; all of it stands in the guide ("What a script can notice").
DIFFERENT = {
    *("stack in step", "stack in hook", "stack after", "stack in closure", "stack in backward", "stack in forward"),
    *("stack in the dataset", "traceback of open", "modules", "all modules", "modules at the start", "meta_path"),
    *("path_hooks", "builtins", "loader of main", "cached", "environment", "environment of a child", "threads"),
    *("active threads", "descriptors", "status", "wakeup fd", "faulthandler", "global optimizer hooks", "group"),
    *("references", "referrers", "dead after the training", "dead after a collection", "attributes of the loader"),
    *("attributes of an iterator", "generation 2"),
}


def found_by(run: Run, rank: int) -> dict[str, list[Any]]:
    """What the script has found out in a rank."""
    found: dict[str, list[Any]] = json.loads((run.folder / "out" / f"found-{rank}.json").read_text())
    return found


@pytest.mark.usefixtures("new_pythons")
def test_a_script_that_asks_about_itself_finds_what_it_finds_under_torchrun(
    run_ttprun: Callable[..., Run], tmp_path: Path
) -> None:
    """References, the collector, modules, threads, handlers, limits, stacks, wrapped functions, and much more."""
    result = run_ttprun("noticing/surroundings.py", 2)

    reference = start_torchrun("noticing/surroundings.py", 2, tmp_path / "reference").finish()
    assert result.exit_code == reference.exit_code == 0, result.story()
    for rank in (0, 1):
        here, there = found_by(result, rank), found_by(reference, rank)
        differing = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
        assert {name for name in differing - DIFFERENT if not name.startswith("function ")} == set(), result.story()
        theirs = set(there["environment"][0])
        ours = {"_TTPRUN_AGENT_PID", "_TTPRUN_RUN_DIR", *VARIABLES}
        assert set(here["environment"][0]) - theirs == ours - theirs
        assert set(here["threads"][0]) - set(there["threads"][0]) == {
            *("ttprun-channel", "ttprun-heartbeat", "ttprun-recovery", "ttprun-signals"),
        }
        for name in (name for name in here if name.startswith("function ")):
            _, *reported = here[name][
                0
            ]  # after its type: names, documentation, signature, whether pickle finds it again
            assert reported[:6] == there[name][0][1:7], name
