"""What is decided does not depend on the wall clock, which may jump by an hour at any moment."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.budget import tree_of

PACKAGE = Path(__file__).resolve().parent.parent / "ttprun"
CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "time.localtime"}
# Where it is read, and why a jump does no harm.
ALLOWED = {
    "agent/between/rendezvous.py": "launchers that first meet must agree on it, and nothing runs yet",
    "agent/base/ground.py": "a date in torch's error file",
    "agent/lead/hang_detector.py": "which flight records a hang's report names",
    "cli/run.py": "the name of a run, and which old run directories are removed, beside their number",
    "cli/run_reports.py": "shown",
    "device/device_errors.py": "a device dates its memory errors by it: did one come after an update?",
    "observe/console.py": "a date in a line of the console",
    "observe/events.py": "a date in the log, and in the history",
    "observe/status.py": "whether a pid is still that of the agent: the status that is compared is half a second old",
    "capture/effects/origins.py": "the script's own question, whose answer a replacement gets again",
    "state/store.py": "a date in the manifest: checkpoints are in order by their numbers",
    "web/server.py": "shown",
}


def test_the_wall_clock_is_read_only_where_a_jump_does_no_harm() -> None:
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CLOCKS
    }

    assert found == {*ALLOWED}
