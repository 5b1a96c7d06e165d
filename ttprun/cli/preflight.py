"""Checks before anything starts, and what a command line comes to without starting it (`--print-config`, `--dry-run`).

Each check finds one thing that would fail later, and says it in one line with the cure.

`check_options` and `check_host` come before the run directory is made, `check_launch` after it. Imports torch.
"""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
import socket
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

from ttprun.cli.command_line import SCRIPT, RunParser, for_another_interpreter
from ttprun.cli.main import COMMANDS
from ttprun.config import Config
from ttprun.config_sources import Origins, option_name
from ttprun.errors import Complaints, ConfigError, counted, one_line, suggestion
from ttprun.observe import console
from ttprun.observe.run_directory import BASE, RunDirectory
from ttprun.state.store import CheckpointStore, last_written_first

if TYPE_CHECKING:
    from ttprun.cli.run import Invocation


# Files that the agent holds open for each rank (its line, record, stack, pidfd, two buffers of a snapshot, logs), and
# for itself.
FILES_OF_RANK = 12
FILES_OF_AGENT = 88


def check_options(torchrun: Namespace) -> None:
    """Check the values of torchrun's options by themselves. Raises ConfigError naming the option, or several."""
    wrong = Complaints()
    for name, read in _READERS.items():
        if not hasattr(torchrun, name):
            continue
        value = getattr(torchrun, name)
        try:
            read(value)
        except (ValueError, RuntimeError) as error:
            what = f"{option_name(name)}: '{value}' is not valid ({one_line(error)})"
            wrong.add(ConfigError(what, "see 'ttprun run --help'"))
    for name, minimum in (("max_restarts", 0), ("node_rank", 0), ("shutdown_timeout", 0)):
        value = getattr(torchrun, name, None)
        if value is not None and value < minimum:
            wrong.add(ConfigError(f"{option_name(name)}: {value} is below {minimum}", f"give {minimum} or more"))
    if not 0 < torchrun.monitor_interval < float("inf"):  # NaN neither
        what = f"--monitor-interval: {torchrun.monitor_interval} is not an interval"
        wrong.add(ConfigError(what, "give seconds above 0"))
    with wrong.noted():
        check_rendezvous_backend(torchrun.rdzv_backend)
    wrong.raise_any()


def check_host(torchrun: Namespace, config: Config) -> None:
    """Check what the options name on this machine: script, directories, port. Raises ConfigError; touches nothing."""
    check_script(torchrun)
    check_files(determine_local_world_size(torchrun.nproc_per_node))
    if config.mindio:
        from ttprun import mindio

        mindio.check_that_none_is_there()
    refuse(misfits(torchrun, config))
    port = hosted_port(torchrun)
    if port is not None:
        check_port(port)


def refuse(misfits: Iterable[tuple[bool, str, str]]) -> None:
    """Raise a ConfigError for the first of these that is so: (whether it is so, what is wrong, the cure)."""
    for is_so, what, cure in misfits:
        if is_so:
            raise ConfigError(what, cure)


def misfits(torchrun: Namespace, config: Config) -> Iterator[tuple[bool, str, str]]:
    """What does not go together, as for `refuse`. Callbacks (--mindio) need ranks in Python that can be repaired."""
    (least, most), without, elastic = parse_min_max_nnodes(torchrun.nnodes), "leave one of them out", config.elastic
    yield (
        config.discovery is not None and not elastic,
        "--discovery is for jobs whose nodes join and leave",
        "add --elastic",
    )
    backend = torchrun.rdzv_backend
    yield (
        elastic and most == 1,
        "--elastic needs more than one node",
        "name how few and how many may train (--nnodes 1:4)",
    )
    yield (
        elastic and backend != "c10d",
        f"--elastic does not work with --rdzv-backend {backend}",
        "use c10d: --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
    )
    shared = "--elastic needs a directory that all nodes share: nodes that join resume from there"
    yield elastic and config.save_dir is None, shared, "name it (--save-dir)"
    for rung in ("persist", "restart"):
        yield elastic and rung not in config.rungs, f"--elastic needs the rung '{rung}' (rungs)", "leave it in"
    yield bool(config.trace) and config.mindio, "--trace cannot be combined with --mindio", without
    yield elastic and config.mindio, "--elastic cannot be combined with --mindio", without
    yield elastic and torchrun.no_python, "--elastic cannot be combined with --no-python", without
    for flag in ("no_python", "run_path"):
        both = config.mindio and getattr(torchrun, flag)
        yield both, f"--mindio cannot be combined with {option_name(flag)}", without
    yield (
        config.mindio and most > 1,
        "--mindio on several nodes is not supported yet",
        "use one node, or start without --mindio",
    )
    is_alone = config.buddy == "node" and (most if elastic else least) < 2
    yield is_alone, "--buddy node keeps mirrors on the next node, and there is one only", "use --buddy auto, or on"
    is_verified, what = config.verified_every > 0, "--verify-steps"
    is_spread = is_verified and most > 1
    late = f"{what} on several nodes compares a step before it is used: there is no snapshot to go back to"
    yield is_spread and not config.verifies_before, late, f"add ',before': 1/{config.verified_every},before"
    shared = f"{what} on several nodes needs a directory that all share: if a rank is suspect, all resume there"
    yield is_spread and config.save_dir is None, shared, "name it (--save-dir)"
    for name, is_asked in ((what, is_verified), ("--standby-context", config.standby_context)):
        yield is_asked and not config.standbys, f"{name} needs a standby", "start it with --standbys 1"
    yield is_verified and config.mindio, f"{what} cannot be combined with --mindio", without
    for rung in ("replace", "persist", "restart") if is_spread else ("replace", "rewind"):
        yield is_verified and rung not in config.rungs, f"{what} needs the rung '{rung}' (rungs)", "leave it in"
    for path in config.user_paths:
        yield not Path(path).exists(), f"user_paths: there is no directory '{path}'", "correct the path"


def check_files(ranks: int) -> None:
    """The agent must be able to hold open what belongs to so many ranks; else raises ConfigError."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ranks * FILES_OF_RANK + FILES_OF_AGENT
    if limit != resource.RLIM_INFINITY and needed > limit:
        most = max(0, (limit - FILES_OF_AGENT) // FILES_OF_RANK)
        raise ConfigError(
            f"--nproc-per-node: {ranks} ranks need {needed} open files, and {limit} are allowed",
            f"start at most {most}, or raise 'ulimit -n'",
        )


def check_script(torchrun: Namespace) -> None:
    """The script, or with --no-python the program, must be there; a module is left for Python to find.

    Raises ConfigError.
    """
    script = torchrun.training_script
    if not script:
        raise ConfigError("the name of the script is empty", "name a script, or -m and a module")
    if torchrun.module and not torchrun.run_path:
        return
    if torchrun.no_python and not torchrun.run_path:
        if shutil.which(script) is None:
            raise ConfigError(f"there is no program '{script}'", "name one on PATH, or a file that may be executed")
        return
    path = Path(script)
    if not path.exists():
        beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = get_close_matches(path.name, beside, n=1, cutoff=0.75)
        command = get_close_matches(script, COMMANDS, n=1, cutoff=0.75)
        meant = [f"'{path.parent / name}'" for name in close] + [f"the command '{name}'" for name in command]
        cure = f"did you mean {meant[0]}?" if meant else f"it was looked for in {Path.cwd()}"
        raise ConfigError(f"there is no script '{script}'", cure)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"'{script}' is a directory", "name a script; a directory needs a __main__.py to be run")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script '{script}' cannot be read (permission denied)", "make it readable for you")
    interpreter = for_another_interpreter(script) if path.is_file() else ""
    if interpreter:
        raise ConfigError(
            f"'{script}' is no Python script, but one for {interpreter}",
            f"--no-python runs it as it is: ttprun --no-python {script}",
        )


def check_rendezvous_backend(backend: str) -> None:
    """The backend must be one of torch's, or one that an installed package offers; else raises ConfigError."""
    names = ["static", "c10d", "etcd", "etcd-v2", *(entry.name for entry in entry_points(group="torchrun.handlers"))]
    if backend not in names:
        raise ConfigError(
            f"--rdzv-backend: there is no '{backend}'", suggestion(backend, names, f"use one of {', '.join(names)}")
        )


def hosted_port(torchrun: Namespace) -> int | None:
    """The TCP port that this agent alone would listen on; None if another may, or if the system will choose it.

    With c10d and several nodes another agent of the same job may hold the port rightly, so only one node is judged.

    Raises ConfigError if the endpoint names no port.
    """
    if torchrun.rdzv_backend not in ("static", "c10d"):
        return None
    endpoint = torchrun.rdzv_endpoint
    if torchrun.rdzv_backend == "static" and not endpoint:
        endpoint = f"{torchrun.master_addr}:{torchrun.master_port}"
    try:
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT if torchrun.rdzv_backend == "c10d" else -1)
    except ValueError as error:
        raise ConfigError(f"rendezvous endpoint '{endpoint}': {one_line(error)}", "give HOST:PORT") from None
    if port < 0:
        raise ConfigError(f"rendezvous endpoint '{endpoint}' has no port", "give HOST:PORT, or --master-port")
    if torchrun.rdzv_backend == "static":
        is_ours = torchrun.node_rank == 0
    else:
        _, max_nodes = parse_min_max_nnodes(torchrun.nnodes)
        is_named_local = host in ("localhost", "127.0.0.1", "::1", socket.gethostname())
        is_ours = max_nodes == 1 and is_named_local and "is_host" not in torchrun.rdzv_conf
    return port if is_ours and port != 0 else None


def check_port(port: int) -> None:
    """Listen for an instant where torch's store will; a listener on any address of this machine is in its way.

    Raises ConfigError if it cannot.
    """
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # this machine's network is not as we think, which is no reason to refuse
        raise ConfigError(
            f"rendezvous port {port} cannot be used ({os.strerror(error.errno)})",
            "choose another with --master-port or --rdzv-endpoint, or let --standalone find a free one",
        ) from None


def check_launch(launch: LaunchConfig, config: Config) -> None:
    """Check what is known only after torch has worked out the numbers. Raises ConfigError."""
    if launch.nproc_per_node < 1:
        raise ConfigError(f"--nproc-per-node: {launch.nproc_per_node} ranks", "give 1 or more")
    world_size = launch.nproc_per_node * launch.max_nodes
    for text in config.faults:
        from ttprun.chaos.injected_faults import parse_fault  # a companion

        fault = parse_fault(text)
        if any(rank is not None and rank >= world_size for rank in (fault.rank, fault.peer)):
            raise ConfigError(f"fault '{text}': there is no such rank", f"use ranks 0 to {world_size - 1}")


def _read_signals(names: str) -> None:
    for name in map(str.strip, names.split(",")):  # torch warns of one that does not exist, and continues
        if name in ("SIGKILL", "SIGSTOP"):
            raise ValueError(f"no process can handle {name}")


def _read_event_log_handler(name: str) -> None:
    try:
        get_logging_handler(name)
    except KeyError:
        raise ValueError("torch has no such handler") from None


# torch reads these values late, and then without the option's name in its error; so they are read once before.
_READERS: dict[str, Callable[[str], object]] = {
    "nnodes": parse_min_max_nnodes,
    "nproc_per_node": determine_local_world_size,
    "redirects": Std.from_str,
    "tee": Std.from_str,
    "event_log_handler": _read_event_log_handler,
    "signals_to_handle": _read_signals,
}


# `--print-config` and `--dry-run`: what a command line comes to, without starting anything.


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
        from ttprun.web.companion import listen

        listen(config.http)[1].close()


def _checkpoints(config: Config) -> str:
    """Where checkpoints go, and which one the run would try first."""
    if config.save_dir is None:
        return "in the run directory; without --save-dir another run does not find them"
    if config.resume != "auto":
        return f"{config.save_dir}; --resume {config.resume}"
    from ttprun.agent.lead.resume import ENDED_NAME

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
