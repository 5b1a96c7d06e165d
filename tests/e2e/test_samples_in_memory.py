"""Many samples in memory: a rank that is lost twice has those of the undisturbed run, also if it had changed some."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.harness import Run, assert_only_replaced, assert_same_outcome

SCRIPT = "samples_in_memory.py"
TWICE = ["kill:rank=1,step=13,phase=backward", "kill:rank=1,step=19,phase=in_step"]


@pytest.mark.parametrize("kind", ["pairs", "arrays", "tokens", "annotations"])
@pytest.mark.parametrize("how", ["--write", ""], ids=["two are changed", "none is changed"])
def test_a_rank_that_is_lost_twice_has_the_samples_of_the_undisturbed_run(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], kind: str, how: str
) -> None:
    arguments = [f"--kind={kind}", *filter(None, [how])]

    result = run_ttprun(SCRIPT, 2, faults=TWICE, script_args=arguments)

    assert_only_replaced(result, 2)
    assert_same_outcome(result, undisturbed(SCRIPT, 2, arguments))
