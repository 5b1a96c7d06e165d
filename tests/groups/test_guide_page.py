"""`ttprun guide groups`: what it shows is run as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from tests.groups.members import LIMIT_S, ROOT

STRIKE = """
import os, signal
from ttprun.introspect import moments

class Strike:
    issued = 0

    def reached(self, moment):
        if moment == "collective":
            self.issued += 1
            if rank == 1 and groups.state is None and self.issued == 40:
                open("struck", "x").close()
                os.kill(os.getpid(), signal.SIGKILL)

    def reached_collective(self, op, inputs):
        return False

    def connected(self, *of_group): ...

moments.listener = Strike()
"""


def test_the_programs_of_the_page_come_to_the_same_result_if_a_member_is_killed(tmp_path: Path) -> None:
    page = (ROOT / "ttprun" / "guide" / "groups.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL))
    member, run = blocks.pop("member.py"), blocks.pop("run.py")
    struck = member.replace("dist.init_process_group", f"{STRIKE}\ndist.init_process_group")

    results = []
    for program in (member, struck):
        (tmp_path / "member.py").write_text(program)
        (tmp_path / "run.py").write_text(run)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "run.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        for rank in range(3):
            results.append(torch.load(tmp_path / f"result_{rank}.pt").tolist())
            (tmp_path / f"result_{rank}.pt").unlink()

    assert not blocks
    assert (tmp_path / "struck").exists()
    assert results == [results[0]] * 6
