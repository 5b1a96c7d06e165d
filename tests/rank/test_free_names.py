"""What a framework's set-up finds on the disk: a replacement's finds what its rank's had found."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from tests.rank.fakes import become, make_session
from tests.rank.processes import run_alone
from ttprun.rank.effects import free_names, origins
from ttprun.rank.position import whose


def found_by(checkpoints: list[str], known: list[Any] | None, kept: list[Any]) -> Any:
    """What the set-up of a rank finds; of a replacement's if `known` is what the rank's had drawn."""
    session = make_session()
    if known is not None:
        session.replay = SimpleNamespace(is_alone=True)  # type: ignore[assignment]
    become(session)
    origins.listen()
    origins.begin(known or [], kept.append if known is None else None)
    find = free_names.wrap_last_checkpoint(lambda folder: f"{folder}/{checkpoints[-1]}")
    try:
        return find("out")
    finally:
        origins.end()


def look_again() -> list[Any]:
    whose.add_user_directory(os.path.dirname(__file__))
    kept: list[Any] = []
    nothing: list[Any] = []
    lives = ((["checkpoint-4"], None), (["checkpoint-4", "checkpoint-8"], kept), (["checkpoint-8"], nothing))
    return [found_by(checkpoints, known, kept) for checkpoints, known in lives]


def test_a_replacement_resumes_from_the_checkpoint_that_its_rank_had_found_or_from_none() -> None:
    assert run_alone(look_again) == ["out/checkpoint-4", "out/checkpoint-4", None]
