"""The run command: `ttprun [options] script.py [script args]`.

Reads the command line and the configuration, checks all that can be checked, makes the run directory, and hands over to
the agent. Read `run` first. Imports torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex

import torch
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_min_max_nnodes

from ttprun import torch_versions
from ttprun.agent.launcher.launch import ADDRESS, ONE_NODE_ENDPOINT
from ttprun.agent.launcher.outcome import Outcomes
from ttprun.agent.launcher.status_publisher import write_last_status
from ttprun.cli.command_line import (
    SCRIPT,
    asked_instead,
    build_parser,
    find_program,
    launch_words,
    parse,
    take_options,
    take_script_config,
)
from ttprun.cli.preflight import check_host, check_launch, check_options, dry_run, launch_origins, print_config
from ttprun.cli.terminal import CommandOutput
from ttprun.config import Config, LaunchValue
from ttprun.config_sources import ConfigSource, Origins, option_name, origins, read_config_file, resolve
from ttprun.early_signals import StoppedEarly
from ttprun.errors import Complaints, ConfigError, one_line
from ttprun.observe import console
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import BASE, RunDirectory, begin_trace, node_name
from ttprun.observe.status import RunStatus, read_status, write_status
from ttprun.state.store import CheckpointStore

# torchrun's default; only static rendezvous uses it.
MASTER_PORT = 29500


@dataclass(frozen=True)
class Invocation:
    """What one command line asks for.

    config    resolved, with a run id; `launch` holds torchrun's options as they are used
    torchrun  torchrun's options as its own `config_from_args` takes them
    notices   what the user must read on stderr, one line each
    is_place_named   the same command has the same save directory the next time
    is_job_named     so has the job the same name
    asked    what is asked for in place of a run: print_config, dry_run
    origins, launch_origins   where our settings, and torchrun's options, have their values from
    """

    config: Config
    torchrun: Namespace
    notices: tuple[str, ...]
    is_place_named: bool
    is_job_named: bool
    asked: tuple[str, ...]
    origins: Origins
    launch_origins: Mapping[str, str]


def run(words: Sequence[str]) -> int:
    """Run a script on all ranks; blocks until the job ends, and returns the exit code (`ttprun guide operating`).

    Raises ConfigError before anything is started.
    """
    invocation = read_command_line(words)
    if invocation.asked:
        return print_config(invocation) if "print_config" in invocation.asked else dry_run(invocation)
    CommandOutput.ends_the_command = False
    torchrun, config = check_command(invocation)
    assert config.run_id is not None
    console.use(config.log_format, config.run_id)
    name = folder_of(invocation)
    outcomes = outcomes_of(invocation, RunDirectory.of(name, config.run_dir))
    if outcomes is not None and config.resume == "auto" and (judgement := outcomes.judge()) is not None:
        code, why = judgement
        console.say(why)
        return code
    directory = RunDirectory.create(name, config.run_dir)
    save_dir = str(CheckpointStore(config.save_dir or directory.path / "checkpoints").save_dir)
    config = config.model_copy(update={"run_dir": str(directory.path), "save_dir": save_dir})
    try:
        if config.trace is not None:
            config = config.model_copy(update={"trace": begin_trace(config.trace, invocation.is_place_named)})
        launch_config, entrypoint, arguments = launch_arguments(torchrun, directory)
        check_launch(launch_config, config)
        # Escaped, since an argument may hold a line's end, or bytes that are not valid Unicode.
        command = shlex.join(["ttprun", *words]).encode("unicode_escape").decode("ascii")
        directory.config.write_text(f"# {command}\n{config.to_yaml()}", encoding="utf-8")
    except ConfigError:
        directory.discard()
        raise
    except OSError as error:
        directory.discard()
        raise ConfigError(f"'{directory.config}' cannot be written ({error.strerror})", "make room there") from None
    protection = (
        "a lost rank can be replaced once each rank has taken a step"
        if "replace" in config.rungs
        else "no rank is replaced"
    )
    started = f"run {directory.path.name}: started; {protection}; see 'ttprun status'"
    for notice in filter(None, (started, *invocation.notices, torch_versions.why_untried(torch.__version__))):
        console.say(notice)
    write_first_status(directory, config, launch_config)
    remove_old_runs(Keep(config.keep_runs, config.keep_runs_days, config.keep_runs_gib), used=config.resume)

    from ttprun.agent.launcher.launch import launch

    try:
        how = {"is_python": not torchrun.no_python, "is_place_named": invocation.is_place_named}
        with _beside(config, directory, torchrun.local_addr) as page:
            code = launch(config, launch_config, entrypoint, arguments, directory, page=page, outcomes=outcomes, **how)
            say_misplaced(torchrun, directory)
            return code
    except ConfigError:
        directory.discard()
        raise
    except StoppedEarly as stopped:
        write_last_status(directory, stopped.exit_code, stopped.reason, is_stopped=True)
        raise


def _beside(config: Config, directory: RunDirectory, name: str | None) -> contextlib.AbstractContextManager[str]:
    """What goes on beside the job, as `beside` says; nothing if ttprun.web is missing, of which nothing is asked."""
    if find_spec("ttprun.web") is None:
        return contextlib.nullcontext("")
    from ttprun.web.notifier import beside

    return beside(config, directory, name, os.environ)


def say_misplaced(torchrun: Namespace, directory: RunDirectory) -> None:
    """After an argparse error of the script: say which of its options are ttprun's, given behind the script."""
    try:
        status = read_status(directory.status)
    except (OSError, ValueError):  # a full disk costs the hint
        return
    if any(rank.step for rank in status.ranks) or all(incident.kind != "exit 2" for incident in status.incidents):
        return
    ours = build_parser()._option_string_actions
    words = dict.fromkeys(word.partition("=")[0] for word in torchrun.training_script_args)
    if misplaced := [word for word in words if word.startswith("--") and word in ours and word != "--help"]:
        script, options = os.path.basename(torchrun.training_script), ", ".join(misplaced)
        console.say(f"{script} got {options}: ttprun's own options must stand before {script}")


def read_command_line(words: Sequence[str]) -> Invocation:
    """Parse the command line and resolve the configuration. Raises ConfigError; touches nothing."""
    parser = build_parser()
    first_look = parse(parser, list(words))
    asked = asked_instead(first_look)
    names, options = take_options(first_look)
    sections, script_arguments = take_script_config(first_look.training_script_args)
    files: list[ConfigSource] = []
    from_files: list[str] = []
    wrong = Complaints()
    for name in names:
        with wrong.noted():
            files.append(read_config_file(name))
    files += sections
    with wrong.noted():
        config = resolve(files, os.environ, options)
    for source in files:
        with wrong.noted():
            from_files += launch_words(parser, source)
    wrong.raise_any()
    setting_origins = origins(files, os.environ, options, config)
    # Once more, with what the files say in front: later words win, as the command line must.
    torchrun = parse(parser, [*from_files, *words])
    take_options(torchrun)
    torchrun.training_script_args = script_arguments
    notices = [f"using the 'ttprun:' section of {section.name}" for section in sections]
    program = find_program(torchrun)
    if program.script:
        torchrun.training_script, torchrun.no_python = program.script, False
        torchrun.training_script_args = script_arguments[program.words :]
    if program.own:
        config = config.model_copy(update={"user_paths": [*config.user_paths, *program.own]})
    for flag in ("no_python", "run_path"):
        if getattr(torchrun, flag) and "replace" in config.rungs:
            config = config.without_repair()
            why = f" ({program.why_not})" if program.why_not else ""
            notices.append(f"{option_name(flag)}: repair is off; a failure restarts the whole group{why}")
    is_job_named = config.run_id is not None
    is_place_named = is_job_named or any((config.save_dir, config.run_dir))
    new_run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{token_hex(2)}"  # sorts by time, and no other run has it
    config = config.model_copy(update={"run_id": config.run_id or new_run_id, "launch": used_launch_options(torchrun)})
    of_launch = launch_origins(parser, list(words), torchrun, setting_origins, os.environ)
    return Invocation(config, torchrun, tuple(notices), is_place_named, is_job_named, asked, setting_origins, of_launch)


def check_command(invocation: Invocation) -> tuple[Namespace, Config]:
    """Check what can be checked before anything is made, and fill in the rendezvous. Raises ConfigError.

    returns  torchrun's options, and ours
    """
    check_options(invocation.torchrun)
    fill_rendezvous(invocation.torchrun, invocation.launch_origins)
    check_host(invocation.torchrun, invocation.config)
    return invocation.torchrun, invocation.config


def folder_of(invocation: Invocation) -> str:
    """Name of the run's directory: of a job on several nodes that has a name, a folder for each node."""
    run_id = invocation.config.run_id or ""
    is_on_several = parse_min_max_nnodes(invocation.torchrun.nnodes)[1] > 1
    return f"{run_id}/{node_name()}" if is_on_several and invocation.is_job_named else run_id


def outcomes_of(invocation: Invocation, directory: RunDirectory) -> Outcomes | None:
    """Where the job's outcome is written, and that of its last start is found; None: the job has no name."""
    config, torchrun = invocation.config, invocation.torchrun
    if not invocation.is_job_named or config.run_id is None:
        return None
    save_dir = config.save_dir or directory.path / "checkpoints"
    command = [torchrun.training_script, *torchrun.training_script_args]
    return Outcomes(save_dir, config.run_id, command, os.environ)


def used_launch_options(torchrun: Namespace) -> dict[str, LaunchValue]:
    """torchrun's options as a `launch` mapping that gives the same again; empty ones are left out."""
    options = vars(torchrun).items()
    return {name: value for name, value in options if name not in SCRIPT and value not in (None, "", [])}


def fill_rendezvous(torchrun: Namespace, launch_origins: Mapping[str, str]) -> None:
    """Fill in what `torch.distributed.run.run` does before `config_from_args`: one node finds a free port by itself.

    Of several nodes whose scheduler sets the variables of a static rendezvous, as Kubeflow does, the first one serves
    a c10d store there: a static rendezvous takes in nobody later, so that no lost node could be replaced.

    launch_origins   where the options have their values from; `--rdzv-backend static` stays what it is
    """
    _, max_nodes = parse_min_max_nnodes(torchrun.nnodes)
    has_no_address = torchrun.rdzv_backend == "static" and not torchrun.rdzv_endpoint and torchrun.master_port is None
    if torchrun.standalone or (has_no_address and max_nodes == 1):
        torchrun.rdzv_backend = "c10d"
        torchrun.rdzv_endpoint = ONE_NODE_ENDPOINT
        # Where the ranks find the store, which listens there alone.
        torchrun.local_addr = torchrun.local_addr or ADDRESS
        torchrun.rdzv_id = str(uuid.uuid4())
    if torchrun.master_port is None:
        torchrun.master_port = MASTER_PORT
    is_of_scheduler = launch_origins.get("master_addr") == "PET_MASTER_ADDR" and "rdzv_backend" not in launch_origins
    if is_of_scheduler and torchrun.rdzv_backend == "static" and not torchrun.rdzv_endpoint and max_nodes > 1:
        torchrun.rdzv_backend = "c10d"
        torchrun.rdzv_endpoint = f"{torchrun.master_addr}:{torchrun.master_port}"
        host = f"is_host={int(torchrun.node_rank == 0)}," if "node_rank" in launch_origins else ""
        # Nodes wait for the first one as long as in a static rendezvous, not c10d's minute. What the user names comes
        # later, and wins.
        torchrun.rdzv_conf = f"{host}read_timeout=600,{torchrun.rdzv_conf}".rstrip(",")
        torchrun.node_rank = 0  # torch warns that c10d does not use it


def launch_arguments(
    torchrun: Namespace, directory: RunDirectory
) -> tuple[LaunchConfig, Callable[..., object] | str, list[str]]:
    """torch's own reading of its options: (LaunchConfig, program or function, its arguments).

    Without --log-dir the ranks' logs go to the run directory, where torchrun makes a directory in /tmp for each run.

    Raises ConfigError if torch does not accept them.
    """
    if torchrun.log_dir is None:
        torchrun.log_dir = str(directory.logs)
    try:
        return config_from_args(torchrun)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        raise ConfigError(one_line(error), "see 'ttprun run --help'") from None


def write_first_status(directory: RunDirectory, config: Config, launch: LaunchConfig) -> None:
    """Say that the run is starting, so that `ttprun status` knows it while its nodes still look for each other.

    launch   torch's reading of its options, for nodes, ranks and restarts
    """
    now = timestamp()
    is_known = launch.min_nodes > 1 or config.elastic
    nodes = launch.min_nodes if is_known else launch.max_nodes  # the others are spares, or join later
    is_repaired = "replace" in config.rungs and (is_known or nodes == 1)
    status = RunStatus(
        run_id=config.run_id or directory.path.name,
        state="starting",
        generation=0,
        world_size=launch.nproc_per_node * nodes,
        agent_pid=os.getpid(),
        started_at=now,
        updated_at=now,
        restarts_left=launch.max_restarts,
        standbys=0,
        protection="not yet: the ranks are being started" if is_repaired else "off: a failure restarts the whole group",
    )
    write_status(directory.status, status)


# Run directories of earlier runs in `ttprun-runs/`: by number, age and size, old ones are removed when a run starts.


_DOOMED = ".removing-"
_DAY_S = 24 * 3600.0


@dataclass(frozen=True)
class Keep:
    """Which run directories stay: those within all limits.

    runs   how many, the one of the run that starts among them
    days   since they were started; None: no limit
    gib    on the disk, all together; None: no limit. The newest always stays.
    """

    runs: int
    days: float | None = None
    gib: float | None = None


def remove_old_runs(keep: Keep, used: str, base: Path = BASE) -> list[str]:
    """Remove the runs that `keep` does not keep; returns their names.

    used   a path that the run that starts reads from, which stays: what --resume names

    Never raises: what cannot be removed stays, and is tried again by the next run.
    """
    removed = []
    with contextlib.suppress(OSError):
        for leftover in base.glob(f"{_DOOMED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        jobs = sorted(_jobs_in(base), key=lambda job: job.started_at_s, reverse=True)
        old = _beyond(keep, jobs)
        needed = _with_newest_checkpoints(jobs) if old else set()
        for job in old:
            is_used = Path(os.path.expanduser(used)).absolute().is_relative_to(job.path)
            if job.path not in needed and not is_used and all(map(_has_ended, job.runs)) and _remove(job.path):
                removed.append(job.path.name)
    return removed


def _beyond(keep: Keep, jobs: list[_Job]) -> list[_Job]:
    """Those of `jobs`, the newest first, that pass one of the limits."""
    oldest_s = 0.0 if keep.days is None else time.time() - keep.days * _DAY_S
    left_bytes = None if keep.gib is None else keep.gib * 2**30
    old = []
    for number, job in enumerate(jobs):
        is_old = number >= keep.runs or job.started_at_s < oldest_s
        if left_bytes is not None and not is_old:  # a directory is measured only if a limit asks for it
            left_bytes -= _bytes_in(job.path)
            is_old = left_bytes < 0
        if is_old and number > 0:
            old.append(job)
    return old


def _bytes_in(folder: Path) -> int:
    """What the files below a folder take on the disk."""
    taken = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                taken += os.lstat(os.path.join(where, name)).st_blocks * 512
    return taken


@dataclass(frozen=True)
class _Job:
    """A directory in `ttprun-runs/`.

    runs   it alone, or the folders of the nodes in it
    """

    path: Path
    runs: list[RunDirectory]

    @property
    def started_at_s(self) -> float:
        return max(run.started_at_s for run in self.runs)


def _jobs_in(base: Path) -> Iterator[_Job]:
    """Directories that this user's runs have made here."""
    for path in base.iterdir():
        if path.is_symlink() or path.lstat().st_uid != os.geteuid() or path.name[0] == ".":
            continue
        run = RunDirectory(path)
        runs = [run] if run.is_run else run.nodes
        if runs:
            yield _Job(path.absolute(), runs)


def _with_newest_checkpoints(jobs: list[_Job]) -> set[Path]:
    """For each script, the directory of the job that has written its newest valid checkpoint."""
    newest: dict[str, tuple[str, Path]] = {}
    for place, run in ((job.path, run) for job in jobs for run in job.runs):
        for checkpoint in CheckpointStore(run.path / "checkpoints").checkpoints():
            if checkpoint.manifest is not None and checkpoint.is_valid:
                candidate = (checkpoint.manifest.created_at, place)
                newest[checkpoint.manifest.script] = max(newest.get(checkpoint.manifest.script, candidate), candidate)
    return {path for _, path in newest.values()}


def _has_ended(run: RunDirectory) -> bool:
    """No process holds its lock, and it says so, or was killed before it had a status."""
    try:
        fd = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    try:
        return read_status(run.status).has_ended
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False


def _remove(path: Path) -> bool:
    """Renamed first, so that one that is half removed is not taken for a run."""
    doomed = path.with_name(_DOOMED + path.name)
    try:
        path.rename(doomed)
    except OSError:
        return False
    shutil.rmtree(doomed, ignore_errors=True)
    return True
