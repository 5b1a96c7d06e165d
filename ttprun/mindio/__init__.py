"""Recovery of a framework that owns its train function, by its own callbacks (MindIO's interface, `--mindio`).

The phases and the agent's orders are the same as without it, but nothing of the script is recorded or replayed. A
survivor's main thread leaves its collective by an error, which the decorator of the train function catches; a
replacement runs the script up to that function. Each phase then calls a handler: the framework's own, or our default.
A companion: a job without `--mindio` imports nothing of it.

Files: `agent_side` (the machine's orders) and `schedulers` in the agent; in a rank `handlers` (the interface's values,
callbacks and their defaults), `framework` (the main thread's side), `callback_recovery` (the recovery thread's side).
`path/` holds a package `mindio_ttp` of our own, a thin face of these. With `--mindio` it gets onto the ranks'
PYTHONPATH, as the last entry, and only if there is no package of that name: ours would not be MindIO's, nor work beside
it. Read `callback_recovery.CallbackRecovery` first. Here: that path, and MindIO's environment variables.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
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


# MindIO's environment variables: those that `--mindio` heeds, those that it refuses, and those that it does not need.


ACTION_LIMIT = "TTP_NORMAL_ACTION_TIME_LIMIT"
FRAMEWORK_TYPE = "TTP_FRAMEWORK_TYPE"
_LIMITED = ("freeze_timeout_s", "transfer_timeout_s", "resume_timeout_s")


@dataclass(frozen=True)
class Variable:
    """One that is heeded, as far as its values go.

    pattern   of the values that will do
    values    the same for people
    means     what it does
    cure      if another value is set
    """

    pattern: str
    values: str
    means: str
    cure: str = ""


VARIABLES = {
    ACTION_LIMIT: Variable(
        r"[3-9]\d|[1-9]\d\d|1[0-7]\d\d|1800",
        "30 to 1800 seconds",
        "limit for stop, for rebuild and repair, and for rollback, unless freeze_timeout_s, transfer_timeout_s and "
        "resume_timeout_s say otherwise",
    ),
    FRAMEWORK_TYPE: Variable("0|1", "0 or 1", "1: replica_shift says who holds the same shard"),
    "TTP_STOP_CLEAN_BEFORE_DUMP": Variable(
        "1", "1", "stop and clean handlers run before each dump", "unset it: this cannot be switched off here"
    ),
    "MINDIO_FOR_MINDSPORE": Variable(
        r"(?!(?i:true)$|1$).*", "false", "training runs on torch", "unset it: MindSpore does not run under ttprun"
    ),
}

_LOGS = "ttprun's logs and events are in the run directory (--run-dir, --log-dir)"
_TLS = "nothing is encrypted, since nothing leaves the machine"
# Name -> why it does nothing here.
NOT_NEEDED = {
    **dict.fromkeys(("TTP_LOG_PATH", "TTP_LOG_LEVEL", "TTP_LOG_MODE", "TTP_LOG_STDOUT", "TTP_LOG_SIZE"), _LOGS),
    **dict.fromkeys(("TTP_ACCLINK_CHECK_PERIOD_HOURS", "TTP_ACCLINK_CERT_CHECK_AHEAD_DAYS"), _TLS),
    "TTP_RETRY_TIMES": "ranks are connected to the agent from their start, and open no other connection",
    "MINDIO_WAIT_MINDX_TIME": "recovery waits for no scheduler",
}


def why_not(name: str, value: str) -> ConfigError | None:
    """What is wrong with a value of one of VARIABLES; None if it will do."""
    variable = VARIABLES[name]
    if re.fullmatch(variable.pattern, value):
        return None
    return ConfigError(f"--mindio: {name} is '{value}'", variable.cure or f"give {variable.values}, or unset it")


def limits(environment: Mapping[str, str]) -> dict[str, float]:
    """The time limits that follow from the environment, by the name of our setting; {} if it says nothing.

    Raises ConfigError for a value that is not valid; an empty one counts as not set.
    """
    for name in VARIABLES:
        wrong = why_not(name, environment[name]) if environment.get(name) else None
        if wrong is not None:
            raise wrong
    limit = environment.get(ACTION_LIMIT)
    return dict.fromkeys(_LIMITED, float(limit)) if limit else {}


def uses_shift(environment: Mapping[str, str]) -> bool:
    """Whether replica_shift says who holds the same shard; else it is whole copies apart."""
    return environment.get(FRAMEWORK_TYPE) == "1"
