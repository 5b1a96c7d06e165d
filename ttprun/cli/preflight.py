"""Checks before anything starts: each finds one thing that would fail later, and says it in one line with the cure.

`check_options` and `check_host` come before the run directory is made, `check_launch` after it. Imports torch.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
from argparse import Namespace
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path

from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import determine_local_world_size, parse_min_max_nnodes

from ttprun import mindio
from ttprun.chaos.faults import parse_fault
from ttprun.cli import programs
from ttprun.cli.commands import COMMANDS
from ttprun.config import Config
from ttprun.config_sources import option_name
from ttprun.errors import Complaints, ConfigError, one_line, suggestion

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
    if config.discovery is not None and not config.elastic:
        raise ConfigError("--discovery is for jobs whose nodes join and leave", "add --elastic")
    if config.elastic:
        check_elastic(torchrun, config)
    if config.mindio:
        check_mindio(torchrun)
    min_nodes, max_nodes = parse_min_max_nnodes(torchrun.nnodes)
    if config.buddy == "node" and (max_nodes if config.elastic else min_nodes) < 2:
        raise ConfigError(
            "--buddy node keeps mirrors on the next node, and there is one only", "use --buddy auto, or on"
        )
    for path in config.user_paths:
        if not Path(path).exists():
            raise ConfigError(f"user_paths: there is no directory '{path}'", "correct the path")
    port = hosted_port(torchrun)
    if port is not None:
        check_port(port)


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


def check_elastic(torchrun: Namespace, config: Config) -> None:
    """What a job whose nodes join and leave needs. Raises ConfigError."""
    _, max_nodes = parse_min_max_nnodes(torchrun.nnodes)
    if max_nodes == 1:
        raise ConfigError("--elastic needs more than one node", "name how few and how many may train (--nnodes 1:4)")
    if torchrun.rdzv_backend != "c10d":
        raise ConfigError(
            f"--elastic does not work with --rdzv-backend {torchrun.rdzv_backend}",
            "use c10d: --rdzv-backend c10d --rdzv-endpoint HOST:PORT",
        )
    if config.save_dir is None:
        raise ConfigError(
            "--elastic needs a directory that all nodes share: nodes that join resume from there",
            "name it (--save-dir)",
        )
    missing = [rung for rung in ("persist", "restart") if rung not in config.rungs]
    if missing:
        raise ConfigError(f"--elastic needs the rung '{missing[0]}' (rungs)", "leave it in")
    for name, is_on in (("mindio", config.mindio), ("no_python", torchrun.no_python)):
        if is_on:
            raise ConfigError(f"--elastic cannot be combined with {option_name(name)}", "leave one of them out")


def check_mindio(torchrun: Namespace) -> None:
    """Callbacks need ranks that run Python and can be repaired, and no other package of that name.

    Raises ConfigError.
    """
    mindio.check_that_none_is_there()
    for flag in ("no_python", "run_path"):
        if getattr(torchrun, flag):
            raise ConfigError(f"--mindio cannot be combined with {option_name(flag)}", "leave one of them out")
    _, max_nodes = parse_min_max_nnodes(torchrun.nnodes)
    if max_nodes > 1:
        raise ConfigError("--mindio on several nodes is not supported yet", "use one node, or start without --mindio")


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
        if close:
            cure = f"did you mean '{path.parent / close[0]}'?"
        elif command:
            cure = f"did you mean the command '{command[0]}'?"
        else:
            cure = f"it was looked for in {Path.cwd()}"
        raise ConfigError(f"there is no script '{script}'", cure)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise ConfigError(f"'{script}' is a directory", "name a script; a directory needs a __main__.py to be run")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"script '{script}' cannot be read (permission denied)", "make it readable for you")
    interpreter = programs.for_another_interpreter(script) if path.is_file() else ""
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
