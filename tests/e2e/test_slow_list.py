"""The list of slow tests names tests that there are: a renamed one would else run unseen, or never."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_test_that_is_listed_as_slow_is_there() -> None:
    here = Path(__file__).parent
    listed = {line for line in (here / "slow.txt").read_text().splitlines() if not line.startswith("#")}
    text = "".join(path.read_text() for path in here.glob("test_*.py"))
    functions = set(re.findall(r"^def (test_\w+)", text, re.MULTILINE))

    assert {name.split("::")[1].split("[")[0] for name in listed} <= functions
