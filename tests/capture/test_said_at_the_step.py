"""What a replay would lack is reported at the step at which it is known, before a rank has been lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.device.test_gpus import unprotected
from tests.rank.worlds import run_world
from ttprun.capture.position import user_code
from ttprun.introspect import ownership
from ttprun.introspect.current_rank import current

BEGIN = """
import torch
import torch.distributed as dist

first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
"""
STEP = """
    second(first(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    note()
"""
GROUP = "group = dist.new_group([0, 1])"
ADDED = "optimizer.add_param_group({'params': second.parameters()})"
ANOTHER = "other = torch.optim.SGD(second.parameters(), lr=0.1)"
WHAT_IS_MADE = {
    GROUP: "a process group was made inside the training loop (",
    ADDED: "parameters were added to an optimizer (add_param_group) inside the training loop (",
    ANOTHER: "an optimizer was made inside the training loop (",
}


def in_a_for(what: str, at: int = 2) -> str:
    return BEGIN + f"for step in range(5):\n    optimizer.zero_grad()\n    if step == {at}:\n        {what}" + STEP


def in_a_while(what: str) -> str:
    return (
        BEGIN
        + f"step = 0\nwhile step < 5:\n    step += 1\n    optimizer.zero_grad()\n    if step == 3:\n        {what}{STEP}"
    )


def in_an_outer_loop(what: str) -> str:
    inner = "    for step in range(2):\n        optimizer.zero_grad()" + STEP.replace("\n    ", "\n        ")
    return BEGIN + f"for epoch in range(3):\n    if epoch == 1:\n        {what}\n{inner}"


def between_two_loops(what: str) -> str:
    loop = f"for step in range(2):\n    optimizer.zero_grad(){STEP}"
    return BEGIN + f"{loop}{what}\n{loop}"


def run(source: str) -> list[str]:
    """Run a script in two ranks; returns what hinders a replay to each of its boundaries, and what protection ends."""
    return run_world(_run, source)[0]


def _run(rank: int, source: str) -> list[str]:
    session = current()
    assert session is not None
    found: list[str] = []
    ownership.add_user_directory("/script")
    scope: dict[str, Any] = {"__name__": "script", "note": lambda: found.append(str(session.hindrance))}
    scope["__builtins__"] = vars(__import__("builtins")) | user_code.BUILTINS
    code = user_code.compile_followed(source.encode(), "/script/script.py")
    script = threading.Thread(target=exec, args=(code, scope))  # the frames of this file are not the script's
    script.start()
    script.join()
    return [*found, unprotected()]


@pytest.mark.parametrize("what", WHAT_IS_MADE)
def test_what_one_iteration_makes_is_reported_as_soon_as_the_next_one_keeps_it(what: str) -> None:
    found = run(in_a_for(what))

    assert found == ["", "", "", found[3], found[3], ""]
    assert found[3].startswith(f"{WHAT_IS_MADE[what]}/script/script.py:10), in an iteration that a replay skips: ")
    assert "before the loop" in found[3]


def test_what_is_made_at_the_first_use_is_reported_at_the_second_step() -> None:
    found = run(in_a_for(GROUP, at=0))

    assert found[:2] == ["", found[-2]]
    assert found[1].startswith(WHAT_IS_MADE[GROUP])


def test_what_one_pass_of_a_while_loop_makes_is_reported_too() -> None:
    found = run(in_a_while(ADDED))

    assert found == ["", "", "", found[3], found[3], ""]
    assert found[3].startswith(WHAT_IS_MADE[ADDED])


def test_what_an_epoch_makes_is_reported_in_the_next_epoch() -> None:
    found = run(in_an_outer_loop(ADDED))

    assert found == [*[""] * 4, found[4], found[4], ""]
    assert found[4].startswith(WHAT_IS_MADE[ADDED])


def test_what_is_made_between_two_loops_is_made_by_a_replay_too() -> None:
    assert run(between_two_loops(f"{GROUP}; {ADDED}")) == [""] * 5


def test_an_optimizer_of_each_epoch_is_made_by_a_replay_too() -> None:
    each = in_an_outer_loop("pass\n    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)")

    assert run(each) == [""] * 7


def test_gradients_that_the_next_step_adds_to_are_no_hindrance() -> None:
    assert run(in_a_for("pass").replace("    optimizer", "    if step != 1:\n        optimizer", 1)) == [""] * 6


def test_gradients_that_another_backward_adds_to_as_well_are_reported_at_the_step_that_uses_them() -> None:
    script = f"{BEGIN}{ANOTHER}\nfor step in range(5):{STEP}"
    found = run(script + STEP.replace("optimizer.step()\n    note()", "other.step()\n"))

    assert found[-1].startswith("the script carries gradients across an optimizer step")


def test_ranks_that_take_different_numbers_of_steps_are_reported_before_the_first() -> None:
    wrapped = "first = torch.nn.parallel.DistributedDataParallel(first)\nwith first.join():\n    "
    found = run(BEGIN + wrapped + "for step in range(2):" + STEP.replace("\n    ", "\n        "))

    assert found[-1].startswith("with join() the ranks take different numbers of steps: give each as many batches")


@pytest.mark.parametrize(
    "zeroed",
    [
        "optimizer.zero_grad(set_to_none=False)",
        "[parameter.grad.zero_() for parameter in first.parameters() if parameter.grad is not None]",
        "first(torch.ones(1, 2)).sum().backward(); first.zero_grad()",  # as a generator's backward, in a GAN
    ],
)
def test_gradients_that_are_zeroed_in_any_way_are_none_that_are_carried(zeroed: str) -> None:
    assert run(in_a_for("pass").replace("optimizer.zero_grad()", zeroed)) == [""] * 6
