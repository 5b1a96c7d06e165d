"""A rank's hooks are there however its script comes to torch, and are installed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rank.scripts import run_under_shim
from ttprun.protocol import from_rank

LOOK = "import torch.distributed as dist\nprint(hasattr(dist.init_process_group, '__wrapped__'))\n"
WAYS = {
    "in a thread": "import importlib, threading\nt = threading.Thread(target=importlib.import_module, args=('torch',))\n"
    "t.start(); t.join()\n",
    "of a submodule, by a probe": "import importlib.util\nimportlib.util.find_spec('torch.distributed')\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_the_hooks_speak_once_whatever_way_torch_is_imported(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAYS[way] + LOOK)

    found = run_under_shim([str(tmp_path / "script.py")], tmp_path)

    assert (found.code, found.printed) == (0, "True\n")
    assert found.messages.count(from_rank.RankProtected()) == 1
