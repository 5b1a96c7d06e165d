"""`--print-config` and `--dry-run`: what a command line comes to, without starting anything.

Begin with `print_config` and `dry_run`. Imports torch.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

from ttprun.cli.preflight import check_launch, check_options
from ttprun.cli.torchrun_parser import SCRIPT, RunParser
from ttprun.config import Config
from ttprun.config_sources import Origins, option_name
from ttprun.errors import ConfigError, counted
from ttprun.observe import console
from ttprun.observe.run_directory import BASE, RunDirectory
from ttprun.state.store import CheckpointStore, last_written_first
from ttprun.web.companion import listen

if TYPE_CHECKING:
    from ttprun.cli.run import Invocation

DEFAULT = "default"
_WIDTH = 44  # of a value; what it comes from stands behind it


@dataclass(frozen=True)
class Setting:
    """One effective value, and where it comes from."""

    key: str
    value: object
    origin: str


def print_config(invocation: Invocation) -> int:
    """Print every setting with its value and its source, as a file for `--config`. Returns the exit code."""
    check_options(invocation.torchrun)
    for notice in invocation.notices:
        console.say(notice)
    print("# What this command line comes to. Later sources win: files, then variables, then options.")
    for setting in settings_of(invocation):
        print(_line(setting))
    print("launch:")
    for name, value in invocation.config.launch.items():
        print("  " + _line(Setting(name, value, invocation.launch_origins.get(name, DEFAULT))))
    return 0


def settings_of(invocation: Invocation) -> Iterator[Setting]:
    """Every key of ours with the value that the job would use."""
    given, (used, why) = invocation.config, as_used(invocation.config, invocation.torchrun)
    for key in Config.model_fields:
        value, origin = getattr(used, key), invocation.origins.keys.get(key, DEFAULT)
        if key == "launch":
            continue
        if key == "run_id" and key not in invocation.origins.keys:
            value = None  # each run makes one of its own
        elif value != getattr(given, key):
            origin = f"{origin}, limited: {why}"
        elif key == "rungs" and given.rungs == ["restart"] and origin == DEFAULT:
            origin = "--no-python or --run-path: no rank can be replaced"
        yield Setting(key, value, origin)


def as_used(config: Config, torchrun: Namespace) -> tuple[Config, str]:
    """The configuration as the launcher narrows it for this kind of job, and why; see `launch`."""
    _, max_nodes = parse_min_max_nnodes(torchrun.nnodes)
    if config.mindio:
        return config.for_frameworks(), "--mindio"
    if max_nodes > 1:
        return config.for_several_nodes(), "several nodes"
    if determine_local_world_size(torchrun.nproc_per_node) == 1 and not config.elastic:
        return config.for_one_rank(), "one rank alone"
    return config, ""


def launch_origins(
    parser: RunParser, words: list[str], torchrun: Namespace, origins: Origins, environment: Mapping[str, str]
) -> dict[str, str]:
    """Where each of torchrun's options that is not at its default comes from."""
    names = [name for name in vars(torchrun) if name not in SCRIPT]
    unset = object()
    given, _ = parser.parse_known_args(words, Namespace(**dict.fromkeys(names, unset)))
    sources = dict(origins.launch)
    sources |= {name: f"PET_{name.upper()}" for name in names if f"PET_{name.upper()}" in environment}
    return sources | {name: option_name(name) for name in names if getattr(given, name) is not unset}


def dry_run(invocation: Invocation) -> int:
    """Check all that a launch checks before it starts, and say what it would start. Returns the exit code.

    Raises ConfigError as the launch would. Nothing is written; a rendezvous port is listened to for an instant.
    """
    from ttprun.cli.run import check_command, launch_arguments

    torchrun, config = check_command(invocation)
    check_places(config)
    logs, torchrun.log_dir = torchrun.log_dir, tempfile.mkdtemp(prefix="ttprun-dry-run-")  # torch makes the directory
    try:
        launch, entrypoint, arguments = launch_arguments(torchrun, RunDirectory(torchrun.log_dir))
        check_launch(launch, config)
    finally:
        shutil.rmtree(torchrun.log_dir, ignore_errors=True)
    for notice in invocation.notices:
        console.say(notice)
    spares = launch.max_nodes - launch.min_nodes
    more = f", up to {launch.max_nodes}" if config.elastic else f", {spares} spare" if spares else ""
    nodes = launch.min_nodes
    command = shlex.join([entrypoint if isinstance(entrypoint, str) else torchrun.training_script, *arguments])
    run_id = (config.run_id if "run_id" in invocation.origins.keys else None) or "RUN_ID"
    run_dir = config.run_dir or BASE / run_id
    lines = {
        "ranks": f"{launch.nproc_per_node * nodes}: {launch.nproc_per_node} per node, {counted(nodes, 'node')}{more}",
        "each runs": command,
        "rendezvous": f"{torchrun.rdzv_backend} at {torchrun.rdzv_endpoint or torchrun.master_addr}",
        "methods": f"{', '.join(as_used(config, torchrun)[0].rungs)}; --max-restarts {launch.max_restarts}",
        "run": f"{run_dir}/",
        "logs": logs or f"{run_dir}/logs",
        "checkpoints": _checkpoints(config),
    }
    print("dry run: nothing was started", *(f"  {name:12} {text}" for name, text in lines.items()), sep="\n")
    return 0


def check_places(config: Config) -> None:
    """Check that the run could write its directories, and serve its page. Raises ConfigError; writes nothing."""
    for option, place in (("--run-dir", config.run_dir or BASE), ("--save-dir", config.save_dir)):
        path = Path(os.path.expanduser(place or BASE)).absolute()
        nearest = next(folder for folder in (path, *path.parents) if folder.exists())
        if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
            why = f"'{nearest}' is not a directory that you may write"
            raise ConfigError(f"{option}: '{path}' cannot be written ({why})", "name another directory")
    if config.http is not None:
        listen(config.http)[1].close()


def _checkpoints(config: Config) -> str:
    """Where checkpoints go, and which one the run would try first."""
    if config.save_dir is None:
        return "in the run directory; without --save-dir another run does not find them"
    if config.resume != "auto":
        return f"{config.save_dir}; --resume {config.resume}"
    from ttprun.agent.launcher.resume import ENDED_NAME

    place = Path(os.path.expanduser(config.save_dir))
    valid = [saved for saved in CheckpointStore(place).checkpoints() if saved.is_valid] if place.is_dir() else []
    if not valid:
        return f"{config.save_dir}; none there that could be resumed from"
    if (place / ENDED_NAME).exists():
        return f"{config.save_dir}; not resumed from: the run that wrote them has reached its end"
    return f"{config.save_dir}; resumes from {last_written_first(valid)[0].path.name} if the script accepts it"


def _line(setting: Setting) -> str:
    value = yaml.safe_dump(setting.value, default_flow_style=True, width=10_000, allow_unicode=True)
    text = f"{setting.key}: {value.removesuffix(chr(10)).removesuffix('...').rstrip()}"
    return f"{text:{_WIDTH}}  # {setting.origin}"
