"""MindIO's interface, for frameworks that were written for it: `path/` holds a package `mindio_ttp` of our own.

It is a thin face of `ttprun.rank.framework`. `path/` gets onto the ranks' PYTHONPATH with `--mindio` only, as its last
entry, and only if there is no package of that name: ours would not be MindIO's, nor work beside it.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ttprun.errors import ConfigError

PATH = str(Path(__file__).resolve().parent / "path")
PACKAGE = "mindio_ttp"


def check_that_none_is_there() -> None:
    """Raise ConfigError if ranks would find another package of that name."""
    spec = importlib.util.find_spec(PACKAGE)
    where = "" if spec is None else next(iter(spec.submodule_search_locations or ()), spec.origin or "")
    if spec is not None and not where.startswith(PATH + os.sep):
        raise ConfigError(
            f"--mindio: a package {PACKAGE} is installed in '{where}', and ttprun's own must not replace it",
            f"uninstall it ({PACKAGE}), or start without --mindio",
        )


def put_on_path(environment: dict[str, str]) -> dict[str, str]:
    """The environment of processes that are to find our package, after all others on their path."""
    before = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != PATH]
    return environment | {"PYTHONPATH": os.pathsep.join([*before, PATH])}
