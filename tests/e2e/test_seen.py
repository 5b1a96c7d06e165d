"""Ranks that were once unhooked without a word: hooked whatever comes before the import of torch, or said not to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import PLAIN, SCRIPTS, Run, assert_only_replaced, assert_same_outcome

KILL = "kill:rank=1,step=20,phase=backward"


def test_a_probe_for_torch_before_its_import_leaves_the_ranks_hooked(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], tmp_path: Path
) -> None:
    probe = "import importlib.util\nassert importlib.util.find_spec('torch')\n"
    script = tmp_path / "probes.py"
    script.write_text(probe + (SCRIPTS / PLAIN).read_text())

    result = run_ttprun(str(script), 2, faults=[KILL])

    assert_only_replaced(result)
    assert result.incidents[0]["boundary"] == 20, result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2))


def test_ranks_are_hooked_if_torch_and_its_functions_were_imported_before_us(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a .pth file in site-packages does it, and only in ranks: the standby must do the same."""
    early = tmp_path / "early"
    early.mkdir()
    (early / "first.pth").write_text("import os; 'RANK' in os.environ and __import__('held')\n")
    (early / "held.py").write_text("import torch\nfrom torch.distributed import init_process_group as begin\n")
    (early / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(early)!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(early))
    script = tmp_path / "held_by_others.py"
    script.write_text(
        (SCRIPTS / PLAIN).read_text().replace('dist.init_process_group("', 'import sys; sys.modules["held"].begin("')
    )

    result = run_ttprun(str(script), 2, faults=[KILL])

    assert_only_replaced(result)
    assert result.incidents[0]["boundary"] == 20, result.story()
    assert_same_outcome(result, undisturbed(PLAIN, 2))
