"""Followed loops: where they stand, and how a replay begins in the middle of them."""

from __future__ import annotations

import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from ttprun.rank import frames, loops, random_state, rewrite

Loops = list[loops.Loop]


@pytest.fixture
def run_followed(tmp_path: Any) -> Callable[..., dict[str, Any]]:
    """`run_followed(source, **names)`: run a user's module with its loops followed; returns its globals."""
    frames.add_user_directory(str(tmp_path))
    filename = str(tmp_path / "script.py")

    def run(source: str, **names: Any) -> dict[str, Any]:
        scope = {
            "__name__": "script",
            "__builtins__": dict(
                vars(__import__("builtins")), **{rewrite.ENTER: loops.enter, rewrite.LOOP: loops.loop}
            ),
        }
        scope |= names
        exec(rewrite.compile_followed(source.encode(), filename), scope)
        return scope

    return run


def loops_of(depth: int) -> Loops:
    """The loops of a frame further out: 0 is the caller of the function that calls this."""
    return loops.of_frame(sys._getframe(depth + 1))


def new_site(key: str = "script:1:0") -> loops.Site:
    return loops.Site(key, range(1, 3))


# Following.


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


def test_a_loop_without_a_step_inside_is_followed_a_few_times_only(run_followed: Any) -> None:
    kinds: list[type] = []

    run_followed(
        "def work():\n    for x in [1]:\n        look()\nfor _ in range(20):\n    work()\n",
        look=lambda: kinds.append(
            type(next(v for k, v in sys._getframe(1).f_locals.items() if k.startswith(loops.VARIABLE_PREFIX)))
        ),
    )

    assert kinds == [loops.Loop] * loops.TRIALS + [list] * (20 - loops.TRIALS)


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
        followed, not_followed = loops.under_way(frame.f_code, frame.f_locals, frame.f_lineno)
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


# Jumping.


def begin_at(iterable: Iterable[Any], stop_at: int) -> tuple[dict[str, Any], list[Any]]:
    """The record of a loop in its `stop_at`th item, with the boundary's step seen in each; and the items left over."""
    site = new_site()
    loop = loops.Loop(site, random_state.capture(), iterable)
    items = iter(loop)
    for _ in range(stop_at):
        item = next(items)
        loops.note_steps([loop], [])
    return loop.record(), [item, *items]


KINDS: dict[str, Callable[[], Iterable[Any]]] = {
    "range": lambda: range(10),
    "range backwards": lambda: range(20, 0, -2),
    "list": lambda: ["a", "b", "c", "d", "e", "f"],
    "list with equal items": lambda: ["train", "val", "train", "val", "train", "val"],
    "list of equal numbers": lambda: [0.1, 0.1, 0.1, 0.01, 0.01, 0.01],
    "list with None": lambda: [None, 1, None, 2, None, 3],
    "list of lists": lambda: [[1], [2], [3], [4], [5]],
    "tuple": lambda: (5, 6, 7, 8, 9),
    "text": lambda: "abcdef",
    "text with equal letters": lambda: "abcabcabc",
    "bytes": lambda: b"abcabc",
    "dict": lambda: {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
    "items of a dict": lambda: {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}.items(),
    "enumerate": lambda: enumerate("abcdef"),
    "enumerate from 1": lambda: enumerate(["x", "y", "z", "u", "v"], start=1),
    "enumerate of enumerate": lambda: enumerate(enumerate("abcdef")),
    "enumerate that is under way": lambda: begun(enumerate("abcdef")),
    "zip": lambda: zip("abcdef", range(6), strict=True),
    "enumerate of zip": lambda: enumerate(zip("abcdef", range(6), strict=True)),
    "map": lambda: map(str, range(8)),
    "filter": lambda: filter(None, [1, 0, 2, 0, 3, 4, 5]),
    "iterator": lambda: iter([1, 2, 3, 4, 5, 6]),
    "generator": lambda: (x * x for x in range(9)),
    "generator of enumerate": lambda: (pair for pair in enumerate("abcdef")),
    "count": lambda: itertools.islice(itertools.count(5), 9),
    "reversed": lambda: reversed([1, 2, 3, 4, 5]),
    "tensor": lambda: torch.arange(6),
}


def begun(iterator: Any) -> Any:
    next(iterator)
    return iterator


def plain(items: Iterable[Any]) -> list[Any]:
    return [item.item() if isinstance(item, torch.Tensor) else item for item in items]


@pytest.mark.parametrize("stop_at", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_goes_on_with_the_item_in_which_the_lost_rank_stood(kind: str, stop_at: int) -> None:
    recorded, left = begin_at(KINDS[kind](), stop_at)

    jump = loops.Jump(new_site(), recorded, KINDS[kind](), lambda: 0)

    assert plain(jump) == plain(left)


@pytest.mark.parametrize("kind", ["range", "list", "enumerate", "generator", "zip"])
def test_after_a_jump_a_loop_counts_on(kind: str) -> None:
    recorded, _ = begin_at(KINDS[kind](), 3)
    jump = loops.Jump(new_site(), recorded, KINDS[kind](), lambda: 0)
    items = iter(jump)

    positions = [jump.position for _ in itertools.islice(items, 2)]

    assert positions == [recorded["position"], recorded["position"] + 1]


def test_a_script_that_resumes_by_itself_goes_on_with_the_same_value() -> None:
    """The lost rank ran range(10) and stood at 6; the replacement has found a checkpoint of 4, and runs range(4, 10)."""
    recorded, left = begin_at(range(10), 7)

    jump = loops.Jump(new_site(), recorded, range(4, 10), lambda: 0)

    assert list(jump) == left == [6, 7, 8, 9]


def test_a_script_that_resumes_behind_the_lost_ranks_item_goes_on_with_that_all_the_same() -> None:
    """The checkpoint of epoch 6 was written after the lost rank's record: the replacement runs range(7, 10)."""
    recorded, left = begin_at(range(10), 7)

    jump = loops.Jump(new_site(), recorded, range(7, 10), lambda: 0)

    assert list(jump) == left == [6, 7, 8, 9]
    assert jump.record()["bounds"] == [0, 10, 1]


@pytest.mark.parametrize("item", ["train", ("train", 3)])
def test_a_script_that_resumes_behind_the_lost_ranks_item_of_a_list_does_not_come_by_the_place(item: Any) -> None:
    recorded, _ = begin_at([item, "val", "test"], 1)

    jump = loops.Jump(new_site(), recorded, ["val", "test"], lambda: 0)

    assert list(jump) == []


def test_pairs_that_differ_are_seen_in_what_the_loop_tells_of_itself() -> None:
    recorded, _ = begin_at(enumerate(range(5, 10)), 2)

    other, _ = begin_at(enumerate(range(6, 10)), 2)

    assert (recorded["position"], recorded["current"]) == (2, [1, 6])
    assert (other["position"], other["current"]) == (2, [1, 7])


def test_a_script_that_resumes_by_itself_among_equal_values_does_not_come_by_the_place() -> None:
    """Nobody knows which of the equal values it was, so the replay must be refused."""
    recorded, _ = begin_at([0.1, 0.1, 0.1, 0.2, 0.1, 0.2], 4)

    jump = loops.Jump(new_site(), recorded, [0.2, 0.1, 0.2], lambda: 0)

    assert list(jump) == []


def test_a_loop_that_fetches_ahead_hands_out_again_what_it_had_fetched() -> None:
    """Two items were out when the first boundary was reached, so a replay begins two items before the newest."""
    site = new_site()
    loop = loops.Loop(site, random_state.capture(), range(10))
    items = iter(loop)
    next(items)
    for _ in range(4):
        next(items)
        loops.note_steps([loop], [])

    jump = loops.Jump(site, loop.record(), range(10), lambda: 0)

    assert list(jump) == [3, 4, 5, 6, 7, 8, 9]


def test_an_iterable_that_positions_itself_is_not_advanced_again() -> None:
    """A DataLoader in a replay begins at the right batch, also under a wrapper such as tqdm that is none itself."""
    made = 0

    class Wrapped:
        def __iter__(self) -> Iterator[int]:
            nonlocal made
            made += 1
            yield from range(3, 10)

    recorded, left = begin_at(range(10), 4)

    jump = loops.Jump(new_site(), dict(recorded, current=None), Wrapped(), lambda: made)

    assert list(jump) == left


def test_a_jump_behind_the_end_ends_the_loop() -> None:
    recorded, _ = begin_at(range(10), 8)

    assert list(loops.Jump(new_site(), dict(recorded, current=None), range(3), lambda: 0)) == []


def test_an_outer_loop_restores_the_random_states_of_its_item() -> None:
    site = new_site()
    site.is_outer = site.has_steps = True
    torch.manual_seed(0)
    loop = loops.Loop(site, random_state.capture(), range(5))
    drawn = []
    for _ in itertools.islice(loop, 3):
        drawn.append(torch.rand(1).item())
    record = loop.record() | {"lead": 1}
    torch.manual_seed(99)

    items = iter(loops.Jump(site, record, range(5), lambda: 0))
    next(items)

    assert torch.rand(1).item() == drawn[2]


def test_a_record_of_a_loop_holds_plain_values() -> None:
    import msgpack

    recorded, _ = begin_at(["a", "b"], 1)

    assert msgpack.unpackb(msgpack.packb(recorded))["current"] == "a"


def test_loops_of_generators_are_found_in_their_frames(run_followed: Any) -> None:
    scope = run_followed(
        "def read():\n    for x in range(5):\n        yield x\nreader = read()\nnext(reader)\nnext(reader)\n"
    )
    reader: types.GeneratorType[Any, Any, Any] = scope["reader"]

    (loop,) = loops.of_frame(reader.gi_frame)

    assert loop.position == 2


@pytest.mark.parametrize(("now", "expected"), [(range(12), [6, 7, 8, 9, 10, 11]), (range(8), [6, 7]), (range(6), [])])
def test_with_other_arguments_a_range_goes_on_behind_its_item_up_to_the_new_end(now: range, expected: Any) -> None:
    recorded, _ = begin_at(range(10), 7)

    jump = loops.JumpToNewEnd(new_site(), recorded, now, lambda: 0)

    assert list(jump) == expected
    assert jump.record()["bounds"] == [0, now.stop, 1]


def test_with_other_arguments_a_range_of_another_step_does_not_come_by_the_place() -> None:
    recorded, _ = begin_at(range(10), 7)

    assert list(loops.JumpToNewEnd(new_site(), recorded, range(0, 20, 2), lambda: 0)) == []
