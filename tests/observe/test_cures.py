"""What is said to help against a reason is something that can be done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ttprun.observe import cures
from ttprun.observe.cures import cure_of, says_cure, split_cure, with_cure

GUIDE = Path(cures.__file__).parent.parent / "guide"
ALL = [cure for _, cure in cures._CURES if cure]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("no other rank holds what rank 1 held: up.weight", "--buddy"),
        ("no other rank holds what rank 1 held: up.weight", "--snapshot-every 10steps"),
        ("the replay is not at the place of boundary 12: a DataLoader has yielded another batch", "let dataset and"),
        ("main: net is a Net in the lost rank, and the replacement has nothing", "let the set-up make it before"),
        ("a loop around the optimizer step is not followed", "user_paths"),
    ],
)
def test_what_helps_is_of_the_reason(reason: str, words: str) -> None:
    assert words in cure_of(reason)
    assert split_cure(with_cure(reason)) == (reason, cure_of(reason))


def test_what_helps_is_said_once() -> None:
    reason = "main: lines cannot be recorded: it is read by next(): read it by a `for` loop"

    assert says_cure(reason)
    assert with_cure(reason) == reason
    assert with_cure(with_cure("another batch")) == with_cure("another batch")


def test_the_sections_of_the_guide_that_are_named_are_there() -> None:
    named = [
        (section, page) for cure in ALL for section, page in re.findall(r"'([^']+)' in 'ttprun guide (\w+)'", cure)
    ]
    pages = [page for cure in ALL for page in re.findall(r"'ttprun guide (\w+)'", cure)]

    assert named
    assert all(f"\n## {section}" in (GUIDE / f"{page}.md").read_text() for section, page in named)
    assert all((GUIDE / f"{page}.md").exists() for page in pages)
