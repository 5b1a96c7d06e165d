"""What a rank holds of its collectives, how long, and what is left of calls that are wrong."""

from __future__ import annotations

import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rank.collectives import FLOAT, SUMS, ours, plain
from tests.rank.worlds import run_world
from ttprun.groups.journal import Journal
from ttprun.groups.results import Results
from ttprun.introspect.current_rank import current
from ttprun.protocol.reason import Reason


def misuse(rank: int) -> list[Any]:
    from ttprun.groups import journal

    journal.PATIENCE_S = 0.3
    session = current()
    held = (lambda: None) if session is None else lambda: (len(session[Journal].entries), session[Journal].held_bytes)
    mistakes: dict[str, Callable[[], Any]] = {
        "layout": lambda: dist.all_reduce(torch.eye(2).to_mkldnn()),
        "number": lambda: dist.all_gather([torch.zeros(3)], ours(rank)),
        "size": lambda: dist.all_gather_into_tensor(torch.zeros(5), ours(rank)),
        "type": lambda: dist.all_gather([torch.zeros(3).int()] * 2, ours(rank)),
        "not a tensor": lambda: dist.all_reduce([1, 2]),  # type: ignore[arg-type]
        "root": lambda: dist.broadcast(ours(rank), 5),
        "splits": lambda: dist.all_to_all_single(torch.zeros(4), ours(rank, 4), [1, 1], [1, 1]),
    }
    found: list[Any] = []
    for name, mistake in mistakes.items():
        before = held()
        try:
            mistake()
            found.append((name, "no error", held() == before))
        except Exception as error:
            found.append((name, type(error).__name__, held() == before))
    x = ours(rank)
    dist.all_reduce(x)
    return [found, x.tolist()]


HABITS: dict[str, Callable[[int], Any]] = {}


def habit(function: Callable[[int], Any]) -> Callable[[int], Any]:
    """One of the things that are tried in one world, one after the other."""
    HABITS[function.__name__] = function
    return function


def what_is_held(rank: int, shapes: int = 1) -> dict[str, Any]:
    """Sixty steps with one operation each, and what the hooks still hold in the end."""
    session = current()
    assert session is not None
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    gone = []
    for step in range(60):
        x = torch.zeros(1000 + step % shapes)
        gone.append(weakref.ref(x))
        dist.all_reduce(x)
        weight.grad = torch.ones(2)
        optimizer.step()
    del x
    journal = session[Journal]
    return {
        "tensors alive": sum(ref() is not None for ref in gone),
        "entries": len(journal.entries),
        "copies": sum(len(spare) for spare in journal._spare.values())
        + sum(len(e.input.tensors) for e in journal.entries),
        "results": len(session[Results]._newest),
    }


@habit
def sixty_steps(rank: int) -> Any:
    return what_is_held(rank)


@habit
def sixty_shapes(rank: int) -> Any:
    return what_is_held(rank, shapes=60)


@habit
def keep_a_work(rank: int) -> Any:
    x = ours(rank)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    optimizer.step()
    return plain([work.is_completed(), work.result(), work.get_future().wait()])


@habit
def wrong_calls(rank: int) -> Any:
    return misuse(rank)


def evaluate_for_ever(rank: int) -> dict[str, Any]:
    """Gathers of 240 KB each, without a step, against a journal of 64 MiB."""
    session = current()
    assert session is not None
    gone = []
    for _ in range(300):
        parts = [torch.zeros(20_000) for _ in range(2)]
        dist.all_gather(parts, torch.zeros(20_000))
        gone.append(weakref.ref(parts[0]))
    held = len(session[Journal].entries)
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()
    del parts
    return {
        "held": held,
        "unprotected": session.unprotected.text,
        "alive after a step": sum(ref() is not None for ref in gone),
    }


def try_habits(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found = {}
    for name, function in HABITS.items():
        try:
            found[name] = function(rank)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def habits() -> dict[str, Any]:
    """What rank 0 has seen."""
    found: dict[str, Any] = run_world(try_habits)[0]
    return found


def test_a_wrong_call_raises_what_gloo_raises_and_leaves_nothing_in_the_journal(habits: dict[str, Any]) -> None:
    gloo = run_world(misuse, is_managed=False)

    assert habits["wrong_calls"] == gloo[0]


def test_a_protected_rank_holds_one_step(habits: dict[str, Any]) -> None:
    found = habits["sixty_steps"]

    assert found["entries"] <= 1
    assert found["copies"] <= 2
    assert found["results"] <= 2
    assert found["tensors alive"] <= 1


def test_copies_of_tensors_of_ever_new_shapes_do_not_pile_up(habits: dict[str, Any]) -> None:
    assert habits["sixty_shapes"]["copies"] <= 2 * 16  # those that no step has used for a while are given up


def test_a_work_still_gives_its_result_after_the_step(habits: dict[str, Any]) -> None:
    assert habits["keep_a_work"] == [True, [[FLOAT, SUMS]], [[FLOAT, SUMS]]]


def test_a_script_that_takes_no_step_does_not_fill_the_memory_with_its_results() -> None:
    """The journal's limit counts inputs and outputs: those of a gather are as many times larger as there are ranks."""
    (found, _) = run_world(evaluate_for_ever)

    assert found["held"] <= (64 << 20) / 240_000
    assert "journal_limit_mib" in found["unprotected"]
    assert found["alive after a step"] == 0


def hold_without_protection(rank: int) -> dict[str, Any]:
    session = current()
    assert session is not None
    session.give_up_protection(Reason(text="the test says so"))
    return what_is_held(rank)


def test_a_rank_that_is_no_longer_protected_holds_nothing_for_a_recovery() -> None:
    (found, _) = run_world(hold_without_protection)

    assert max(found.values()) <= 2, found


def test_a_rank_alone_in_its_world_holds_nothing_for_a_recovery() -> None:
    (found,) = run_world(what_is_held, size=1)

    assert max(found.values()) <= 2, found
