"""When a script has nothing left to do but to end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEFORE = """
import sys, weakref
from ttprun.introspect import ownership

class Optimizer: ...

def work():
    one = Optimizer()
    seen.append(weakref.ref(one, lambda _: print(ownership.is_reached(sys._getframe(1)))))

def train():
    work()
    return 0

seen = []
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("work()", "True"),
        ("if __name__ == '__main__':\n    work()", "True"),
        ("sys.exit(work())", "True"),
        ("train()", "False"),
        ("work()\nprint('more')", "False True"),
        ("for fold in range(2):\n    work()", "False False"),
    ],
    ids=["the last statement", "in the usual guard", "by its exit code", "in a function", "more to do", "in a loop"],
)
def test_a_script_has_ended_when_its_last_statement_returns(tmp_path: Path, script: str, expected: str) -> None:
    (tmp_path / "script.py").write_text(BEFORE + script.replace("print('more')", "work()"))

    run = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=60)

    assert run.stdout.split() == expected.split(), run.stderr
