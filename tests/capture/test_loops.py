"""Followed loops: where they stand while the script runs."""

from __future__ import annotations

import gc
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ttprun.capture.position import loops, user_code
from ttprun.introspect import ownership

Loops = list[loops.Loop]


@pytest.fixture
def run_followed(tmp_path: Any) -> Callable[..., dict[str, Any]]:
    """`run_followed(source, **names)`: run a user's module with its loops followed; returns its globals."""
    ownership.add_user_directory(str(tmp_path))
    filename = str(tmp_path / "script.py")

    def run(source: str, **names: Any) -> dict[str, Any]:
        scope = {
            "__name__": "script",
            "__builtins__": dict(vars(__import__("builtins")), **user_code.BUILTINS),
        }
        scope |= names
        exec(user_code.compile_followed(source.encode(), filename), scope)
        return scope

    return run


def loops_of(depth: int) -> Loops:
    """The loops of a frame further out: 0 is the caller of the function that calls this."""
    return loops.of_frame(sys._getframe(depth + 1))


def test_a_loop_knows_its_place_and_how_many_items_it_has_handed_out(run_followed: Any) -> None:
    seen: list[Any] = []

    run_followed(
        "for epoch in range(2):\n    for name in 'ab':\n        look()\n",
        look=lambda: seen.append([(loop.site.key.split(":", 1)[1], loop.position) for loop in loops_of(1)]),
    )

    assert seen == [
        [("1:0", 1), ("2:4", 1)],
        [("1:0", 1), ("2:4", 2)],
        [("1:0", 2), ("2:4", 1)],
        [("1:0", 2), ("2:4", 2)],
    ]


@pytest.mark.parametrize(
    "body",
    [
        "for x in range(3):\n    pass\n",
        "for x in range(3):\n    break\n",
        "for x in range(3):\n    continue\n",
        "for x in range(3):\n    pass\nelse:\n    y = 1\n",
        "for x in range(3):\n    for y in range(3):\n        break\n    break\n",
        "for x in ():\n    pass\n",
        "while True:\n    for x in range(3):\n        break\n    break\n",
        "try:\n    for x in range(3):\n        raise KeyError\nexcept KeyError:\n    pass\n",
        "import contextlib\nwith contextlib.suppress(KeyError):\n    for x in range(3):\n        raise KeyError\n",
        "for x in range(2):\n    try:\n        for y in range(3):\n            raise KeyError\n    except KeyError:\n        continue\n",
    ],
    ids=[
        "end",
        "break",
        "continue",
        "else",
        "nested",
        "empty",
        "while",
        "exception",
        "suppressed",
        "exception in a loop",
    ],
)
def test_a_loop_that_has_ended_is_not_under_way(run_followed: Any, body: str) -> None:
    found: list[Any] = []

    run_followed(body + "look()\n", look=lambda: found.extend(loops_of(1)))

    assert found == []


def test_an_item_lives_no_longer_than_the_script_holds_it(run_followed: Any) -> None:
    class Batch:
        pass

    scope = run_followed(
        "alive = []\n"
        "def batches():\n    for _ in range(2):\n        yield Batch()\n"
        "for x in batches():\n    gone = weakref.ref(x)\n    del x\n    alive.append(gone() is not None)\n",
        Batch=Batch,
        weakref=weakref,
    )

    assert scope["alive"] == [False, False]


@pytest.mark.parametrize("left_by", ["break", "raise ValueError", "return"])
def test_what_a_loop_runs_over_lives_no_longer_than_the_loop(run_followed: Any, left_by: str) -> None:
    """The workers of a DataLoader, an open file: with a cycle of references they would live till some collection."""

    class Batches:
        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            return 1

    gc.collect()
    gc.disable()
    try:
        scope = run_followed(
            "def run():\n"
            "    made = Batches()\n    known.append(weakref.ref(made))\n    gone = made\n    del made\n"
            f"    for x in gone:\n        del gone\n        {left_by}\n"
            "known = []\n"
            "try:\n    run()\nexcept ValueError:\n    pass\n"
            "is_gone = known[0]() is None\n",
            Batches=Batches,
            weakref=weakref,
        )
    finally:
        gc.enable()

    assert scope["is_gone"]


def test_a_loop_without_a_step_inside_is_followed_a_few_times_only(run_followed: Any) -> None:
    counts: list[int] = []

    run_followed(
        "def work():\n    for x in [1]:\n        look()\nfor _ in range(20):\n    work()\n",
        look=lambda: counts.append(len(loops_of(1))),
    )

    assert counts == [1] * loops.TRIALS + [0] * (20 - loops.TRIALS)


def test_a_loop_with_a_step_inside_is_followed_for_ever(run_followed: Any) -> None:
    kinds: list[Loops] = []

    def step() -> None:
        active = loops_of(1)
        loops.note_steps(active, [])
        kinds.append(active)

    run_followed("def work():\n    for x in [1]:\n        step()\nfor _ in range(20):\n    work()\n", step=step)

    assert [len(active) for active in kinds] == [1] * 20


def test_a_step_in_a_loop_that_is_no_longer_followed_is_seen_and_the_loop_followed_from_then_on(
    run_followed: Any,
) -> None:
    found: list[Any] = []

    def step() -> None:
        frame = sys._getframe(1)
        followed = loops.of_frame(frame)
        not_followed = [site for site in loops.around(frame) if site not in [loop.site for loop in followed]]
        found.append((len(followed), len(not_followed)))
        loops.note_steps(followed, not_followed)

    run_followed(
        "def work(n):\n    for x in [1]:\n        if n > 10:\n            step()\nfor n in range(14):\n    work(n)\n",
        step=step,
    )

    assert found == [(0, 1), (1, 0), (1, 0)]


def test_following_a_loop_draws_no_random_numbers(run_followed: Any) -> None:
    source = "import random\nimport torch\nr = []\nfor i in range(3):\n    r.append((random.random(), torch.rand(1).item()))\n"
    random.seed(1)
    torch.manual_seed(1)
    followed = run_followed(source)["r"]
    random.seed(1)
    torch.manual_seed(1)
    scope: dict[str, Any] = {}

    exec(source, scope)

    assert followed == scope["r"]


def test_loops_of_generators_are_found_in_their_frames(run_followed: Any) -> None:
    scope = run_followed(
        "def read():\n    for x in range(5):\n        yield x\nreader = read()\nnext(reader)\nnext(reader)\n"
    )
    reader: types.GeneratorType[Any, Any, Any] = scope["reader"]

    (loop,) = loops.of_frame(reader.gi_frame)

    assert loop.position == 2
