"""`ttprun guide capture`: what it shows is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from tests.capture.alone import ROOT, run


def test_the_programs_of_the_page_come_to_the_result_of_the_undisturbed_script(tmp_path: Path) -> None:
    page = (ROOT / "ttprun" / "guide" / "capture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    for name, text in blocks:
        (tmp_path / name).write_text(text)

    results = []
    for program in ("train.py", "record.py", "go_on.py"):
        run(tmp_path, program)
        results.append((tmp_path / "result.pt").read_bytes())
        (tmp_path / "result.pt").unlink()

    assert [name for name, _ in blocks] == ["train.py", "record.py", "go_on.py"]
    assert results[1:] == [results[0], results[0]]
