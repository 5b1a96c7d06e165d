"""The guide says of devices what was seen, row by row: tests/results/devices.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ttprun.device.device_errors import VARIABLES

TESTS = Path(__file__).resolve().parent
GUIDE = (TESTS.parent / "ttprun" / "guide" / "devices.md").read_text(encoding="utf-8")
SEEN = json.loads((TESTS / "results" / "devices.json").read_text(encoding="utf-8"))
SAME = {True: "identical", None: "not compared"}


@pytest.mark.parametrize("row", SEEN["repairs"], ids=lambda row: f"{row['what']}: {row['fault']}, {row['commit']}")
def test_the_guide_has_each_repair_that_was_seen_on_a_device(row: dict[str, Any]) -> None:
    answer = row["rung"] + (", the standby was ready" if row["standby_ready"] else "")
    cells = [row["what"], str(row["ranks"]), row["fault"], answer, f"{row['total_s']:.1f} s", SAME[row["identical"]]]

    assert f"| {' | '.join(cells)} |" in GUIDE.splitlines()


def test_the_guide_names_the_device_and_all_variables() -> None:
    assert "H100" in SEEN["device"]
    assert "H100" in GUIDE
    assert all(f"| `{name}` | {value} |" in GUIDE for name, value in VARIABLES.items())
