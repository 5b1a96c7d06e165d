"""A loop around the optimizer's step in code that is not the user's is reported; code that only hands a step through is not."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from typing import Any

import pytest
import torch

from tests.rank.processes import run_alone
from ttprun.capture.position import call_site

LOOPS = {
    "for": "def fit(look):\n    for _ in range(1):\n        found = look()\n    return found\n",
    "while": "def fit(look):\n    n = 0\n    while n < 2:\n        found = look()\n        n += 1\n    return found\n",
}
NO_LOOPS = {
    "call": "def fit(look):\n    return look()\n",
    "behind a loop": "def fit(look):\n    for _ in range(3):\n        pass\n    return look()\n",
}


def look() -> tuple[str, list[str]]:
    found, modules = call_site.loop_around(sys._getframe(1))
    return found, list(modules)


def seen_from(source: str, filename: str, module: str = "framework.trainer") -> str:
    """What is reported of a step that is taken in a function of such a file."""
    return all_seen_from(source, filename, module)[0]


def all_seen_from(source: str, filename: str, module: str) -> tuple[str, list[str]]:
    """The same, and the modules to follow."""
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(source, filename, "exec"), scope)
    found: tuple[str, list[str]] = scope["fit"](look)
    return found


def _seen_in_a_trainer_that_has_its_loop_in_another_file() -> tuple[str, list[str]]:
    trainer: dict[str, Any] = {"__name__": "framework.trainer"}
    exec(compile("def fit(run, look):\n    return run(look)\n", "/lib/framework/trainer.py", "exec"), trainer)
    loop: dict[str, Any] = {"__name__": "framework.loops.fit_loop"}
    exec(compile(LOOPS["while"], "/lib/framework/loops/fit_loop.py", "exec"), loop)
    wrapped: dict[str, Any] = {"__name__": "other.optimizer"}
    exec(compile(NO_LOOPS["call"], "/lib/other/optimizer.py", "exec"), wrapped)
    found: tuple[str, list[str]] = trainer["fit"](loop["fit"], lambda: wrapped["fit"](look))
    return found


# pytest itself has loops around its tests: each is run in a process of its own.
@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize(
    "where", ["/opt/lib/framework/trainer.py", "/x/lib/site-packages/framework/trainer.py", "<string>"]
)
def test_a_loop_in_a_frameworks_code_is_reported_with_its_function_and_file(kind: str, where: str) -> None:
    assert run_alone(seen_from, LOOPS[kind], where) == f"fit ({where})"


@pytest.mark.parametrize("kind", NO_LOOPS)
def test_code_that_hands_a_step_through_is_none(kind: str) -> None:
    assert run_alone(seen_from, NO_LOOPS[kind], "/opt/lib/framework/trainer.py") == ""


def test_the_modules_to_follow_are_those_of_the_package_with_the_loop_outermost_first() -> None:
    found, modules = run_alone(_seen_in_a_trainer_that_has_its_loop_in_another_file)

    assert found == "fit (/lib/framework/loops/fit_loop.py)"
    assert modules == ["framework.trainer", "framework.loops.fit_loop"]


# Functions that stand on the stack at a step, outermost first; those with a loop around it are marked.
COMPOSER = ("composer.trainer.trainer", "composer.trainer.trainer*", "composer.trainer.trainer")
MMENGINE = (
    "mmengine.runner.runner", "mmengine.runner.loops*", "mmengine.runner.loops*", "mmengine.model.wrappers.distributed",
    "mmengine.optim.optimizer.optimizer_wrapper",
)  # fmt: skip
DEEPSPEED = ("deepspeed.runtime.engine", "deepspeed.runtime.engine")  # engine.step() in a loop of the script's


def _seen_on_a_stack(names: tuple[str, ...]) -> tuple[str, list[str]]:
    call = look
    for name in reversed(names):
        scope: dict[str, Any] = {"__name__": name.rstrip("*")}
        source = LOOPS["while"] if name.endswith("*") else NO_LOOPS["call"]
        exec(compile(source, f"/x/site-packages/{name.rstrip('*').replace('.', '/')}.py", "exec"), scope)
        call = functools.partial(scope["fit"], call)
    return call()


@pytest.mark.parametrize("names", [COMPOSER, MMENGINE, DEEPSPEED], ids=["composer", "mmengine", "deepspeed"])
def test_a_stack_like_that_of_a_framework_that_was_not_tried_names_the_modules_of_its_loop(
    names: tuple[str, ...],
) -> None:
    found, modules = run_alone(_seen_on_a_stack, names)

    has_loop = any(name.endswith("*") for name in names)
    assert bool(found) == has_loop
    assert modules == (list(dict.fromkeys(name.rstrip("*") for name in names)) if has_loop else [])


def test_a_library_that_calls_the_scripts_main_function_is_none() -> None:
    assert run_alone(seen_from, LOOPS["while"], "/x/lib/site-packages/fire/core.py", "fire.core") == ""


def _seen_from_libraries() -> list[str]:
    found = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: found.append(look()[0]))
    thread = threading.Thread(target=lambda: found.append(look()[0]))
    thread.start()
    thread.join(60)
    inside_torch = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "container.py")
    return [*found, seen_from(LOOPS["for"], inside_torch)]


def test_the_standard_librarys_and_torchs_own_loops_are_none() -> None:
    assert run_alone(_seen_from_libraries) == ["", "", ""]


KEEPS = "import torch\ndef fit(look):\n    loss = torch.ones(1, requires_grad=True).sum()\n    found = look()\n    return found\n"


def _keeper_seen_from(source: str, module: str) -> str:
    scope: dict[str, Any] = {"__name__": module}
    exec(compile(source, "/opt/lib/framework/trainer.py", "exec"), scope)
    found: dict[str, str] = scope["fit"](lambda: call_site.keeper_of_a_loss(sys._getframe(1)))
    return "".join(found)


@pytest.mark.parametrize(
    ("source", "module", "keeper"),
    [
        (KEEPS, "framework.trainer", "framework.trainer"),
        (NO_LOOPS["call"], "framework.trainer", ""),
        (KEEPS, "transformers.training_args", ""),
    ],
    ids=["holds a loss", "hands the step through", "known"],
)
def test_code_that_is_not_followed_and_holds_the_loss_of_a_step_is_named(source: str, module: str, keeper: str) -> None:
    assert run_alone(_keeper_seen_from, source, module) == keeper
