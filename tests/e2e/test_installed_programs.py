"""Programs that are installed: run by -m, or by the command that pip has made for them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, TRAINER, Run, assert_only_replaced, assert_same_outcome

KILL = "kill:rank=1,step=20,phase=backward"
COMMAND = """\
#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from trainer.cli import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""
CLI = "from trainer import loop\n\n\ndef main():\n    return loop.main()\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `trainer` in a site-packages of its own, with a command `train-it`; returns the command's path."""
    site, binaries = tmp_path / "site-packages", tmp_path / "bin"
    package = site / "trainer"
    package.mkdir(parents=True)
    binaries.mkdir()
    (package / "__init__.py").write_text("")
    shutil.copy(SCRIPTS / TRAINER, package / "loop.py")
    shutil.copy(SCRIPTS / "around_the_loop.py", site)
    (package / "cli.py").write_text(CLI)
    command = binaries / "train-it"
    command.write_text(COMMAND.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("PATH", f"{binaries}{os.pathsep}{os.environ['PATH']}")
    return command


def test_a_rank_of_an_installed_command_is_replaced_and_nothing_differs(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], installed: Path
) -> None:
    result = run_ttprun("train-it", 2, faults=[KILL], options=["--no-python"])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(TRAINER, 2))
    assert "repair is off" not in result.output
