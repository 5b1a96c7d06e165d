"""Whole incidents, one text file each: see `scenario_text` for the form."""

from pathlib import Path

import pytest

from tests.recovery.scenario_text import FOLDER, run_scenario


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_the_incident_goes_as_its_text_says(path: Path) -> None:
    text = path.read_text()

    answered = run_scenario(text)

    assert answered == text
