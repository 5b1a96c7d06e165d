"""What is known of the commit that is checked out: whose turn it is, and with what its tests were run.

`python -m tests.commits` prints the turn, from 0. Standard library alone.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "tests" / "results"
TURNS = 8


def turn_of(count: int, commit: str, is_shallow: bool) -> int:
    """Whose turn it is: successive commits are numbered; where their number is not known, drawn from the hash."""
    return (int(commit, 16) if is_shallow else count) % TURNS


def git(*words: str) -> str:
    """What git answers; "" where this is no repository."""
    done = subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def turn_of_head() -> int:
    """The turn of the commit that is checked out; without a repository, of the day."""
    commit = git("rev-parse", "HEAD")
    if not commit:
        return datetime.now(UTC).toordinal() % TURNS
    return turn_of(
        int(git("rev-list", "--count", "HEAD")), commit, git("rev-parse", "--is-shallow-repository") == "true"
    )


def with_what() -> dict[str, str]:
    """The circumstances of a result: commit ("+" if files differ from it), day, torch, Python."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "ttprun", "tests/e2e/*.py", "tests/scripts")
    return {
        "commit": git("rev-parse", "--short=9", "HEAD") + ("+" if changed else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a file of results anew, a case a line, so that a difference is read case by case."""
    lines = (f"{json.dumps(case)}: {json.dumps(results[case], sort_keys=True)}" for case in sorted(results))
    fresh = path.with_suffix(".new")
    fresh.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    print(turn_of_head())
