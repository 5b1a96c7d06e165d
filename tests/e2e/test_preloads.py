"""What the ranks have imported, a replacement has already: but for what it must import itself."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Launch, Run, assert_only_replaced, assert_same_outcome

SCRIPT = "imports_packages.py"


def test_a_replacement_imports_again_only_what_depends_on_its_rank(
    start_ttprun: Callable[..., Launch],
    undisturbed: Callable[..., Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, log = tmp_path / "site-packages", tmp_path / "imported"
    site.mkdir()
    sources = {
        "slow_package": "SCALE = {None: 1.0, 'fast': 2.0}[os.environ.get('PACKAGE_MODE')]\n",
        "which_rank": "RANK = int(os.environ['RANK'])\n",
    }
    for name, source in sources.items():
        say = f"import os\nwith open({str(log)!r}, 'a') as log:\n    log.write('{name}\\n')\n"
        (site / f"{name}.py").write_text(say + source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    reference = undisturbed(SCRIPT, 2)
    log.unlink()

    launch = start_ttprun(SCRIPT, 2, script_args=["--wait"])
    launch.wait_for_standby("modules that the ranks have imported", limit_s=180.0)
    before = Counter(log.read_text().split())
    os.kill(launch.pids[1][-1], signal.SIGKILL)
    launch.wait_for_event("rank_replayed")
    (launch.folder / "out" / "go").touch()
    result = launch.finish()

    after = Counter(log.read_text().split()) - before
    assert before["slow_package"] == 4  # two ranks, the first round of the standby, and the second
    assert after == {"which_rank": 1}
    assert_only_replaced(result)
    assert_same_outcome(result, reference)
    preloaded: list[dict[str, Any]] = [one for one in result.events if one["event"] == "standby_preloaded"]
    assert [one["is_usable"] for one in preloaded] == [False, True]
    assert preloaded[0]["refused"] == {"which_rank": "it reads RANK"}
