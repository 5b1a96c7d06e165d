"""What torch.compile does with our own functions."""

import builtins
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo.trace_rules as rules

from ttprun.capture import installing
from ttprun.capture.position import loops, user_code
from ttprun.rank.step import step_hooks


def test_dynamo_traces_no_function_of_ours_but_those_that_stand_in_the_middle_of_the_users_code() -> None:
    installing.leave_us_alone()

    skipped = {module: rules.check_file(module.__file__).skipped for module in (step_hooks, loops, installing)}
    assert skipped == {step_hooks: True, loops: False, installing: False}


def test_a_while_loop_of_the_users_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, user_code.PASSES, loops.Passes, raising=False)
    source = b"def double(x, n):\n    while n > 0:\n        x, n = x * 2, n - 1\n    return x\n"
    scope: dict[str, Any] = {}
    exec(user_code.compile_followed(source, "/script/doubling.py"), scope)

    assert torch.compile(scope["double"], backend="eager", fullgraph=True)(torch.ones(1), 3).item() == 8


def test_a_replacement_does_not_wait_until_dynamo_has_compiled_its_rules_anew_for_each_of_our_modules() -> None:
    pattern = rules.SKIP_DIRS_RE

    installing.leave_us_alone()

    assert rules.SKIP_DIRS_RE is pattern


def test_a_script_without_an_optimizer_does_not_wait_for_dynamo_to_be_imported() -> None:
    code = (
        "import sys, ttprun.rank.bootstrap.hooks, ttprun.agent.launcher.launch; print('torch._dynamo' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
