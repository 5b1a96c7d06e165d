"""What docstrings, comments and guide pages name is there: files, and functions and classes of our modules."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = [path for folder in ("ttprun", "tests", "scripts", "configs") for path in (ROOT / folder).rglob("*.py")]
TEXTS = {path: path.read_text(encoding="utf-8") for end in ("*.py", "*.md") for path in (ROOT / "ttprun").rglob(end)}
# A path that is not the end of a longer one, of an address or of a pattern.
FILE = re.compile(r"(?<![\w./<{*-])((?:[a-z_]\w*/)*[a-z_]\w*\.py)\b")
PLACE = re.compile(r"`([a-z_]+)\.(?!py`)([A-Za-z_]\w*)(?:\(\))?`")
USERS = {"train.py", "script.py", "run_clm.py", "fit.py", "two_tiny_ranks.py"}
NO_MODULES = {"ttprun", "session"}  # `ttprun.json`, `session.parts`


def test_each_file_that_a_text_names_is_there() -> None:
    named = {(path.name, name) for path, text in TEXTS.items() for name in FILE.findall(text)}
    ends = {str(path.relative_to(folder)) for path in FILES for folder in path.parents if folder.is_relative_to(ROOT)}

    assert [place for place in sorted(named) if place[1] not in ends | USERS] == []


def test_each_function_that_a_docstring_names_with_its_module_is_there() -> None:
    sources: defaultdict[str, str] = defaultdict(str)
    for path, text in TEXTS.items():
        sources[path.parent.name if path.stem == "__init__" else path.stem] += text
        sources[path.parent.name] += f" {path.stem} "
    ours = {path.stem for path in TEXTS if path.suffix == ".py"} - NO_MODULES
    modules = [(path, text) for path, text in TEXTS.items() if path.suffix == ".py"]
    named = {(path.name, *place) for path, text in modules for place in PLACE.findall(text) if place[0] in ours}

    assert [place for place in sorted(named) if not re.search(rf"\b{place[2]}\b", sources[place[1]])] == []
