"""The streams in the place of sys.stdout and sys.stderr: to a script they are what Python has made."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.rank.processes import run_alone
from ttprun.rank import output

ASKED = ["name", "mode", "encoding", "errors", "newlines", "closed", "fileno()", "isatty()", "readable()", "writable()"]
OF_BUFFER = ["name", "mode", "closed", "fileno()"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_counted_stream_says_of_itself_what_pythons_own_does(stream: str) -> None:
    before, after = run_alone(described, stream)

    assert after == before


def described(stream: str) -> list[dict[str, Any]]:
    """What the stream says of itself before and after it is replaced."""
    found = []
    for _ in range(2):
        live = getattr(sys, stream)
        own = {asked: answer_of(live, asked) for asked in ASKED}
        found.append(own | {f"buffer.{asked}": answer_of(live.buffer, asked) for asked in OF_BUFFER})
        output.count_lines()
    return found


def answer_of(thing: Any, asked: str) -> Any:
    answer = getattr(thing, asked.removesuffix("()"))
    return answer() if asked.endswith("()") else answer
