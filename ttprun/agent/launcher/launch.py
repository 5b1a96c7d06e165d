"""Start the ranks under a supervisor, wait for the end, and turn it into an exit code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.launcher.api as torch_launcher
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.utils import _matches_machine_hostname as matches_machine_hostname

from ttprun import __version__, torch_versions
from ttprun.agent.between.latecomers import JobFinder, MovedStore
from ttprun.agent.between.rendezvous import Place, address_for_ranks, own_address
from ttprun.agent.launcher.elastic_agent import JobFoundError, Meeting, ReplacingAgent
from ttprun.agent.launcher.outcome import DO_NOT_RESTART, Outcomes
from ttprun.agent.launcher.signals import Signals
from ttprun.agent.launcher.status_publisher import write_last_status
from ttprun.agent.launcher.supervisor import Supervisor
from ttprun.agent.lead.membership import Discovery, Elasticity
from ttprun.agent.lead.resume import Resumption
from ttprun.agent.node.rank_processes import command_of
from ttprun.config import Config
from ttprun.early_signals import ENDED_BY_SIGNAL, StoppedEarly, exit_code_of
from ttprun.errors import ConfigError
from ttprun.observe import console
from ttprun.observe.run_directory import RunDirectory
from ttprun.protocol.reason import Reason
from ttprun.recovery.elastic_policy import Membership
from ttprun.state.store import CheckpointStore

ADDRESS = "127.0.0.1"
# What torchrun makes of one node without an address: any free port.
ONE_NODE_ENDPOINT = "localhost:0"
# Where torch's rendezvous looks up the class of the stores that it makes.
_PLACES = ("torch.distributed", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")


@contextlib.contextmanager
def stores_on_loopback() -> Iterator[None]:
    """While in it, stores that torch makes in this process listen on loopback."""
    modules = [importlib.import_module(name) for name in _PLACES]
    original: Any = getattr(modules[0], "TCPStore")  # noqa: B009 - torch does not declare it

    class LoopbackStore(original):  # type: ignore[misc]
        """A TCPStore; its server gets a socket that listens on loopback already."""

        def __init__(self, host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> None:
            if not is_master or args:
                super().__init__(host_name, port, *args, is_master=is_master, **kwargs)
                return
            try:
                listener = socket.create_server((ADDRESS, port))
            except OSError:  # a machine without loopback: torch's way may work there
                super().__init__(host_name, port, is_master=True, **kwargs)
                return
            bound_port = listener.getsockname()[1]
            kwargs |= {"is_master": True, "master_listen_fd": listener.detach()}
            if torch_versions.takes_socket(torch.__version__):
                with contextlib.suppress(NotImplementedError):  # another build than those that were tried
                    super().__init__(ADDRESS, bound_port, **kwargs)
                    return
            super().__init__(ADDRESS, bound_port, **kwargs | {"use_libuv": False})

    for module in modules:
        module.TCPStore = LoopbackStore  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.TCPStore = original  # type: ignore[attr-defined]


logger = logging.getLogger("ttprun")

SCRIPT_FAILED = 1
_TRUE = ("1", "true", "t", "yes", "y")  # as torch reads --rdzv-conf


def launch(
    config: Config,
    launch_config: torch_launcher.LaunchConfig,
    entrypoint: Callable[..., object] | str,
    args: list[str],
    run: RunDirectory,
    is_python: bool,
    is_place_named: bool,
    page: str = "",
    outcomes: Outcomes | None = None,
) -> int:
    """Run the job to its end; returns the launcher's exit code.

    is_python        False: the ranks run the user's own program (--no-python)
    is_place_named   the same command has the same save directory the next time
    page             address at which other machines see the job; "": at none
    outcomes         where the job's outcome is written; None: it has no name

    Blocks as long as the job runs. What signals do to it is said in `signals.py`. Raises ConfigError, before any rank
    is started, if there is something wrong with the checkpoints.
    """
    if config.mindio:
        from ttprun import mindio

        config = config.for_frameworks()
        os.environ.update(mindio.put_on_path(dict(os.environ)))
    console.use(config.log_format, config.run_id or "")
    is_on_several = launch_config.max_nodes > 1
    why_not = why_not_over_nodes(launch_config, is_python, config.elastic) if is_on_several else Reason()
    if why_not:
        logger.warning("ttprun is off for this run (%s): it behaves as torchrun does%s", why_not, why_not.pointer)
    if why_not or not isinstance(entrypoint, str):
        # With --run-path torch runs the script in processes of its own making: nobody supervises them but torch.
        code, reason, is_stopped = _run(launch_config, entrypoint, args)
        write_last_status(run, code, reason, is_stopped)
        _say(reason)
        if outcomes is not None and not is_on_several:  # of several nodes nobody is known to lead
            outcomes.end(code, 0, reason)
        return code
    spares = launch_config.max_nodes - launch_config.min_nodes
    policy = Membership(launch_config.min_nodes, launch_config.max_nodes) if config.elastic else None
    launch_config.max_nodes = launch_config.min_nodes  # the others wait, and take no part in torch's rendezvous
    world_size = launch_config.nproc_per_node * launch_config.max_nodes
    meeting = Meeting()
    how = ""
    leader_file = str(outcomes.path.with_name(f"leader-{config.run_id}.json")) if outcomes and is_on_several else ""
    discovery = Discovery(config.discovery, launch_config.nproc_per_node) if config.discovery is not None else None
    if discovery is not None:
        discovery.first()
    if is_on_several:
        config = config.for_several_nodes()
        finder = None
        if launch_config.rdzv_backend == "c10d":
            finder = _finder_of(launch_config, leader_file, discovery)
            _meet_at(launch_config, finder.find_at_start())
        ended = outcomes.ended_meanwhile() if outcomes is not None else None
        if ended is not None and ended.is_done:
            reason = f"job {config.run_id} was done while this launcher waited for its end"
            write_last_status(run, 0, reason, False)
            _say(reason)
            return 0
        meeting = _meeting_of(config, launch_config, args, page)
        if finder is not None:
            meeting = replace(meeting, find_job=finder.find, moved_store=_store_of(launch_config, leader_file))
        if outcomes is not None:
            meeting = replace(meeting, ended_meanwhile=outcomes.ended_meanwhile)
        how = _how_it_runs(config, launch_config, spares)

    def begin_to_lead() -> None:
        nonlocal how
        if how:
            logger.warning("%s", how)
        how = ""
        if outcomes is not None:
            outcomes.begin()

    meeting = replace(meeting, begin_to_lead=begin_to_lead)
    store = CheckpointStore(config.save_dir or run.path / "checkpoints", config.keep_checkpoints)
    if is_python and store.save_dir.parent != run.path and not is_on_several:
        # Whoever has it could add and remove checkpoints while one is chosen.
        store.lock(config.run_id or "", config.run_dir or "")
    seen = Path(store.save_dir) / f".ttprun-{secrets.token_hex(8)}" if config.elastic else None
    try:
        if seen is not None:
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.touch()
            meeting = replace(meeting, place=replace(meeting.place, seen=str(seen)))
        words = command_of({"args": args}) if is_python else []
        resumption = Resumption(config, store, world_size, words, is_place_named, is_on_several)
        supervisor = Supervisor(
            *(config, run, world_size, is_python, launch_config.max_restarts, store, resumption),
            Elasticity(policy, discovery),
        )
        return _supervise(config, supervisor, meeting, launch_config, entrypoint, args, outcomes)
    finally:
        if seen is not None:
            seen.unlink(missing_ok=True)
        store.unlock()


def _finder_of(launch_config: torch_launcher.LaunchConfig, leader_file: str, discovery: Discovery | None) -> JobFinder:
    """Finds the store of this job if it runs already."""

    def hosts() -> tuple[str, ...]:
        return () if discovery is None or discovery.named is None else tuple(discovery.named)

    endpoint, is_host = launch_config.rdzv_endpoint, launch_config.rdzv_configs.get("is_host")
    if is_host is None:
        is_host = matches_machine_hostname(endpoint.rpartition(":")[0])
    return JobFinder(endpoint, launch_config.run_id, leader_file, hosts, str(is_host).lower() in _TRUE)


def _store_of(launch_config: torch_launcher.LaunchConfig, leader_file: str) -> MovedStore:
    """The store that this launcher serves if it leads."""
    port = launch_config.rdzv_endpoint.rpartition(":")[2]
    return MovedStore(int(port) if port.isdecimal() else 0, launch_config.run_id, launch_config.max_nodes, leader_file)


def _meet_at(launch_config: torch_launcher.LaunchConfig, store: str) -> None:
    """Meet the others at the store of a job that runs; "": where the user says."""
    if store:
        given, launch_config.rdzv_endpoint = launch_config.rdzv_endpoint, store
        launch_config.rdzv_configs["is_host"] = "0"
        logger.warning("the job runs already: its launchers meet at %s (--rdzv-endpoint is %s)", store, given)


def _how_it_runs(config: Config, launch_config: torch_launcher.LaunchConfig, spares: int) -> str:
    """What a job on several nodes can expect, for the console of the launcher that leads."""
    nodes = launch_config.max_nodes
    if config.elastic:
        return (
            f"{nodes} at first, {nodes + spares} nodes at most: nodes join and leave at a boundary (--elastic), and "
            "samples are dealt out again; a lost rank is replaced on its node; tried with gloo on CPUs, never with "
            "NCCL or HCCL"
        )
    lost = (
        f"the ranks of a lost node on a spare one ({spares}) or on one that comes within {config.node_wait_s:g} s "
        "(--node-wait-s)"
    )
    if launch_config.rdzv_backend == "static":
        lost = "those of a lost node are not: a static rendezvous takes in nobody later (--rdzv-backend c10d does)"
    return (
        f"{nodes} nodes: a lost rank is replaced on its node; {lost}, else all restart (--max-restarts "
        f"{launch_config.max_restarts}); no snapshots, and checkpoints only in a --save-dir that all nodes share; "
        "tried with gloo on CPUs, never with NCCL or HCCL"
    )


def why_not_over_nodes(launch_config: torch_launcher.LaunchConfig, is_python: bool, is_elastic: bool) -> Reason:
    """Why no rank of a job on several nodes is repaired; "" if they are.

    is_python    the ranks run Python: no --no-python
    is_elastic   --elastic: their number may change
    """
    if launch_config.min_nodes == 1 and not is_elastic:
        return Reason("command-line", "with --nnodes 1:N their number is not fixed (--nnodes 2, or 2:3 for a spare)")
    if not is_python:
        return Reason("command-line", "on several nodes the ranks must run Python (not --no-python)")
    return Reason()


def _meeting_of(config: Config, launch_config: torch_launcher.LaunchConfig, args: list[str], page: str) -> Meeting:
    """What the agents of the nodes report to each other. Raises ConfigError if this node does not find its address."""
    try:
        limit_s = float(launch_config.rdzv_configs.get("read_timeout", 0.0))  # torch would wait as long
        address = own_address(launch_config.local_addr, launch_config.rdzv_endpoint, limit_s)
        address_for_ranks(address)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the address of this node is not known: {error}",
            "name it (--local-addr), and the ranks' interface if it is another one (GLOO_SOCKET_IFNAME)",
        ) from None
    words = command_of({"args": args})
    alike = {
        "ttprun": __version__,
        "--elastic": str(config.elastic),
        "--buddy node": str(config.buddy == "node"),
        "ranks (--nproc-per-node)": str(launch_config.nproc_per_node),
        "the script": hash_of(words[0]) if words else "",
    }
    place = Place(address, alike, config.save_dir or "", page=page)
    return Meeting(place, nodes=launch_config.max_nodes, is_elastic=config.elastic)


def hash_of(path: str) -> str:
    """The first digits of a file's SHA-256; "" if it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except OSError:
        return ""


def _supervise(
    config: Config,
    supervisor: Supervisor,
    meeting: Meeting,
    launch_config: torch_launcher.LaunchConfig,
    entrypoint: str,
    args: list[str],
    outcomes: Outcomes | None,
) -> int:
    handled = torch_versions.launch_option(launch_config, "signals_to_handle")
    signals = Signals(handled, config.grace_s, supervisor.note_end_asked, supervisor.end_ranks_at_once)
    module: Any = torch_launcher
    # There is no other way to name one.
    torchs_own, module.LocalElasticAgent = (
        module.LocalElasticAgent,
        partial(ReplacingAgent, supervisor, signals, meeting),
    )
    code, reason, is_stopped = 1, "the launcher failed", False
    is_by_itself = launch_config.rdzv_endpoint == ONE_NODE_ENDPOINT and launch_config.local_addr == ADDRESS
    try:
        supervisor.start()
        with stores_on_loopback() if is_by_itself else contextlib.nullcontext():
            code, reason, is_stopped = _run(launch_config, entrypoint, args, supervisor, signals, meeting.find_job)
    except StoppedEarly as error:
        code, reason, is_stopped = error.exit_code, error.reason, True
    finally:
        module.LocalElasticAgent = torchs_own
        signals.is_over = True
        reason = supervisor.stop(code, reason, signals.left_s(), is_stopped)
    node = supervisor.node
    goes_on = node.verdict is not None and node.verdict.kind == "leave"
    if goes_on or not node.is_concluded_elsewhere:  # once a job, not once a node
        _say(reason, goes_on, node.verdict.reason_kind if node.verdict is not None else "")
    is_leader = not node.peers.is_follower and not node.is_deposed
    if outcomes is not None and is_leader and ReplacingAgent.has_started_ranks and not goes_on:
        outcomes.end(code, supervisor.run.status.step, reason)
        if meeting.moved_store is not None:
            meeting.moved_store.withdraw()
    return code


def _run(
    launch_config: torch_launcher.LaunchConfig,
    entrypoint: Any,
    args: list[str],
    supervisor: Supervisor | None = None,
    signals: Signals | None = None,
    find_job: Callable[[], str] | None = None,
) -> tuple[int, str, bool]:
    """Exit code, reason, and whether it was a signal to a launcher that has ended the job.

    find_job   as in `Meeting`
    """
    run = record(torch_launcher.elastic_launch(launch_config, entrypoint))
    tried: set[str] = set()
    try:
        if signals is not None:
            signals.install()
        while True:
            try:
                run(*args)
                break
            except JobFoundError as job:
                store = job.store
            except (RendezvousError, DistError):
                store = "" if find_job is None or ReplacingAgent.has_started_ranks else find_job()
                if not store or store in tried:
                    raise
            tried.add(store)
            _meet_at(launch_config, store)
    except ChildFailedError as error:
        verdict = supervisor.node.verdict if supervisor is not None else None
        reason = verdict.reason if verdict is not None else "a rank has failed"
        if supervisor is not None and supervisor.node.ended_by:  # the launcher of another node has got a signal
            return exit_code_of(supervisor.node.ended_by), reason, True
        if any(failure.pid for failure in error.failures.values()):
            # Else no rank of this node has failed: torch's summary would name one that the launcher has ended itself.
            console.say(str(error), "ERROR", prefix="")
        is_of_script = supervisor is not None and supervisor.node.first_failure.is_of_script
        return _code_of(error, has_progress=verdict is None or verdict.has_progress or is_of_script), reason, False
    except (RendezvousError, DistError) as error:
        where, why = launch_config.rdzv_endpoint, str(error.__cause__ or error).partition("\n")[0]
        reason = f"the agents cannot meet: the rendezvous ({launch_config.rdzv_backend} at {where}) has failed: {why}"
        return exit_code_of(signal.SIGTERM), reason, False  # the script has not failed: it may be started again
    except OSError as error:
        if supervisor is None or ReplacingAgent.has_started_ranks:
            raise
        why = f"the ranks cannot be started ({error.strerror or error})"
        raise ConfigError(
            why, "start fewer (--nproc-per-node), or raise the limits of your shell (ulimit -a)"
        ) from None
    except SignalException as error:
        if supervisor is not None and supervisor.had_finished:
            return 0, "", False  # the signal has come too late to end anything: a restart would train it all again
        ended = supervisor.node.verdict if supervisor is not None else None
        reason = ended.reason if ended is not None else f"ended by {signal.Signals(error.sigval).name}"
        return exit_code_of(error.sigval), reason, True
    except KeyboardInterrupt:
        return exit_code_of(signal.SIGINT), "ended by SIGINT", True
    return 0, "", False


def _say(reason: str, goes_on: bool = False, kind: str = "") -> None:
    """Say why the job has ended: once, and as its last word.

    goes_on   it has not, but this node has left it
    kind      of the reason
    """
    if reason:
        what = "this node has left the job, which goes on" if goes_on else "the job has ended"
        console.say(f"{what}: {reason}{Reason(kind).pointer}", "WARNING" if goes_on else "ERROR")


def _code_of(error: ChildFailedError, has_progress: bool) -> int:
    """1 if the script failed by itself, 128+N if the infrastructure ended it, 93 if a restart would not help."""
    if not has_progress:
        return DO_NOT_RESTART
    if not error.failures:
        return SCRIPT_FAILED
    _, failure = error.get_first_failure()
    return ENDED_BY_SIGNAL - failure.exitcode if failure.exitcode < 0 else SCRIPT_FAILED
