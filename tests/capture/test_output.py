"""The streams in the place of sys.stdout and sys.stderr: to a script they are what Python has made."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rank.processes import run_alone
from ttprun.capture.effects import output

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
        output.note_lines()
    return found


def test_a_descriptor_that_the_script_has_turned_to_another_file_is_noticed(tmp_path: Path) -> None:
    """The lines that come out there are not those that are counted, and a replay would write over them."""
    before, after, behind = run_alone(turned, str(tmp_path / "log"))

    assert before == ""
    assert after == "the script has redirected stdout (os.dup2 to descriptor 1)"
    assert behind == ""


def turned(path: str) -> list[str]:
    output.note_lines()
    found = [output.why_not_noted().text]
    kept = os.dup(1)
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 1)
    found.append(output.why_not_noted().text)
    os.dup2(kept, 1)
    return [*found, output.why_not_noted().text]


def answer_of(thing: Any, asked: str) -> Any:
    answer = getattr(thing, asked.removesuffix("()"))
    return answer() if asked.endswith("()") else answer
