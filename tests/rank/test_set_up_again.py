"""A replay runs the script's set-up again, and must not take longer over it than the run did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capture.records import record_of
from tests.rank.fakes import make_session
from ttprun.capture.position import loops, user_code
from ttprun.capture.records.packing import Record
from ttprun.groups.results import Answers
from ttprun.rank.replay.replay_run import ReplayRun

SCRIPT = """
for number in range(100):
    for word in "ab":
        pass
"""


def followed_loops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the script; the keys of the loops that are followed, each time one begins."""
    made: list[str] = []

    class Noted(loops.Loop):
        def _begin(self, iterable: Iterable[Any]) -> Iterator[Any]:
            made.append(self.site.key)
            return super()._begin(iterable)

    with monkeypatch.context() as patch:
        patch.setattr(loops, "Loop", Noted)
        exec(user_code.compile_followed(SCRIPT.encode(), "script.py"), dict(user_code.BUILTINS))
    return made


def test_a_replay_follows_the_loops_of_a_set_up_no_longer_than_a_run_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(str(tmp_path))
    before = Record(record_of(1), [])
    replay = ReplayRun(session, before, before, Answers((), ()))
    replay.begin()

    in_replay = followed_loops(monkeypatch)
    loops.give_back()
    replay.output.end()
    session.channel.close()

    assert in_replay.count("script.py:3:4") == loops.TRIALS
    assert in_replay == followed_loops(monkeypatch)
