"""The launcher's own lines on the console, in each of their forms."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from ttprun.observe import console
from ttprun.protocol.reasons import REASONS

PROGRAM = """
import logging
from ttprun.observe import console

console.use({form!r}, "r1")
console.say("about\\nto begin", "INFO")
logging.getLogger("ttprun").warning("rank %d is gone", 1)
console.say("two\\nlines", "ERROR", prefix="")
"""


def lines_of(form: str) -> list[str]:
    program = PROGRAM.format(form=form)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_plain_lines_begin_with_the_name_of_the_program() -> None:
    assert lines_of("plain") == ["ttprun: about", "to begin", "ttprun: rank 1 is gone", "two", "lines"]


def test_lines_with_time_have_the_time_in_utc_and_the_level() -> None:
    lines = lines_of("time")

    times, texts = zip(*(line.split(" ", 1) for line in lines if " " in line and line[0] == "2"), strict=True)
    assert texts == ("INFO ttprun: about", "WARNING ttprun: rank 1 is gone", "ERROR two")
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", time) for time in times)


def test_each_message_is_one_line_of_json_however_many_lines_it_has() -> None:
    lines = [json.loads(line) for line in lines_of("json")]

    assert [(line["level"], line["message"]) for line in lines] == [
        ("INFO", "about\nto begin"),
        ("WARNING", "rank 1 is gone"),
        ("ERROR", "two\nlines"),
    ]
    assert all(line["run_id"] == "r1" and line.keys() == {"time", "level", "run_id", "message"} for line in lines)


@pytest.mark.parametrize("form", ["plain", "time"])
@pytest.mark.parametrize("text", ["x" * 500, "x" * 26_369, *(f"{row.means} {row.cure}; " * 9 for row in REASONS)])
def test_no_line_is_longer_than_400_letters_and_what_is_left_out_is_counted(
    monkeypatch: pytest.MonkeyPatch, form: console.LogFormat, text: str
) -> None:
    monkeypatch.setattr(console, "_used", form)

    lines = console.line_of(text, "CRITICAL", 0.0).splitlines()

    shown = re.sub(r"\s+", "", "".join(line.partition("ttprun: ")[2] for line in lines))
    whole, (_, cut, more) = re.sub(r"\s+", "", text), shown.rpartition("...(")
    assert max(map(len, lines)) <= 400
    assert shown == whole if not cut else whole.startswith(shown[: -len(cut + more)]) and more.endswith("ttprunstatus)")
