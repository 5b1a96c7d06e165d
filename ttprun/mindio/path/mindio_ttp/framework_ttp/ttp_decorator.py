"""The functions that a framework calls in every rank, as MindIO names them; what they do is `ttprun.mindio`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch  # noqa: F401 - a rank's hooks are installed when torch is imported

from ttprun.mindio import uses_shift
from ttprun.mindio.framework import this_rank
from ttprun.mindio.handlers import MOST_RANKS, ReportState, check_port, check_rank, value_of
from ttprun.protocol import mindio

FRAMEWORKS = ("MindSpeed", "MindSpeed-LLM")
_export_version = ""


# Start and end.


def tft_init_processor(
    rank: int,
    world_size: int,
    enable_local_copy: bool,
    enable_tls: bool = True,
    tls_info: str = "",
    enable_uce: bool = True,
    enable_arf: bool = False,
    enable_zit: bool = False,
) -> None:
    """Make this rank's processor.

    enable_uce   errors of devices are answered in the same process (retry)
    enable_arf   lost processes are replaced; here that is for `ttprun --rungs` to say
    enable_zit   the others may train on without ranks that are lost, if there is a handler for that

    Raises ValueError if this is not that rank of the job.
    """
    check_rank("tft_init_processor", rank, world_size)
    session, framework = this_rank()
    if (rank, world_size) != (session.rank, session.world_size):
        own = f"rank {session.rank} of {session.world_size}"
        raise ValueError(f"tft_init_processor: this process is {own}, and not rank {rank} of {world_size}")
    framework.errors.is_retried = enable_uce
    framework.elastic.is_on = enable_zit
    framework.elastic.report()


def tft_start_processor(master_ip: str, port: int, local_ip: str = "") -> None:
    """Connect to the controller: nothing is done, since the connection to the agent is open already.

    port   checked, and not used; nor are `master_ip` and `local_ip`

    Raises ValueError for a wrong port.
    """
    check_port("tft_start_processor", port)
    this_rank()


def tft_destroy_processor() -> None:
    """Leave the controller. The agent sees the end of the process."""


def tft_is_reboot_node() -> bool:
    """Whether this process has joined a job that was running already, in the place of a lost one."""
    return this_rank()[1].was_rebooted


def tft_get_reboot_type() -> str:
    """ "arf": this process is in the place of a lost one; "hot switch": in that of a healthy one, as was planned."""
    return this_rank()[1].reboot_type


def set_mindio_export_version(framework_type: str) -> None:
    """Say which framework this is. Raises ValueError for one that MindIO does not know."""
    global _export_version
    if framework_type not in FRAMEWORKS:
        raise ValueError(f"there is no framework '{framework_type}'; use one of {', '.join(FRAMEWORKS)}")
    _export_version = framework_type


# What the optimizer's state is, and where copies of it are.


def tft_set_optimizer_replica(rank: int, replica_info: list[dict[str, Any]]) -> None:
    """Declare the groups over which this rank's optimizer is spread, in the order of OptimizerType.

    replica_info   [{rank_list, replica_cnt, replica_shift}]: replica_cnt whole copies of the state lie in rank_list;
                   with TTP_FRAMEWORK_TYPE=1 replica_shift places from a rank to the next that holds the same

    Raises ValueError for what cannot be.
    """
    session, _ = this_rank()
    if rank != session.rank:
        raise ValueError(f"tft_set_optimizer_replica: this is rank {session.rank}, and not {rank}")
    has_shift = uses_shift(os.environ)
    groups = []
    for info in replica_info:
        ranks, copies, shift = info.get("rank_list"), info.get("replica_cnt"), info.get("replica_shift")
        is_list = isinstance(ranks, list) and all(type(member) is int for member in ranks)
        if not is_list or type(copies) is not int or type(shift) is not int:
            raise ValueError("tft_set_optimizer_replica: give a list of ranks, and two numbers")
        assert isinstance(ranks, list)
        if rank not in ranks or not 0 < copies <= len(ranks) or len(ranks) % copies:
            raise ValueError(f"tft_set_optimizer_replica: {copies} copies cannot lie in ranks {ranks}")
        groups.append(mindio.DeclaredReplicas(ranks, copies, shift if has_shift else 0))
    session.channel.send(mindio.ReplicasDeclared(groups))


def tft_set_dp_group_info(rank: int, dp_rank_list: list[int]) -> None:
    """Declare the data-parallel group: ranks at the same place of their groups leave together. Raises ValueError."""
    if not 0 <= rank < MOST_RANKS or not all(type(member) is int for member in dp_rank_list):
        raise ValueError(f"tft_set_dp_group_info: rank {rank} in {dp_rank_list} cannot be")
    this_rank()[0].channel.send(mindio.DataParallelDeclared(dp_rank_list))


def tft_set_step_args(args: Any) -> None:
    """What each callback is given as `args`; without it, the list of the train function's arguments."""
    if args is not None and _export_version not in FRAMEWORKS:
        this_rank()[1].handlers.args = args


def tft_start_copy_os() -> None:
    """The optimizer's state is about to be copied, in local-copy mode: it can be used as it is meanwhile."""
    this_rank()[1].admit()


def tft_start_updating_os(backup_step: int = -1) -> None:
    """The optimizer's state is about to change: waits for all ranks. Raises RuntimeError (FORCE STOP)."""
    this_rank()[1].start_updating()


def tft_end_updating_os(step: int) -> None:
    """The optimizer's state is that of `step`, from 1 on. Raises ValueError."""
    if step < 1:
        raise ValueError(f"tft_end_updating_os: step is {step}; give 1 or more")
    this_rank()[1].end_updating(step)


def tft_reset_limit_step() -> None:
    """Take back the step up to which ranks may go; it ends with the recovery anyhow."""


def tft_set_update_start_time(start_time: int | None = None) -> None:
    """When the newest update of the optimizer began, in microseconds of the device's clock; None: now."""
    times = this_rank()[1].times
    times.start_us = times.clock_us() if start_time is None else start_time


def tft_set_update_end_time(end_time: int | None = None) -> None:
    """When it ended."""
    times = this_rank()[1].times
    times.end_us = times.clock_us() if end_time is None else end_time


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int | None = None, end_time: int | None = None) -> bool:
    """Whether memory that failed at that time can be repaired: no kept state can be corrupted.

    hbm_error_time         microseconds, by the clock of the device's error message
    start_time, end_time   of the newest optimizer step, likewise; None: as this process has noted them
    """
    return this_rank()[1].times.can_repair(hbm_error_time, start_time, end_time)


# The train function.


def tft_exception_handler(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the train function: an error that a recovery answers is waited out, and the function called again.

    It is called with the same arguments, in the list that callbacks are given: what they put there it gets.

    Raises TypeError if it is given something else than a function.
    """
    if not callable(func):
        raise TypeError("tft_exception_handler: func must be a callable")

    @wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return this_rank()[1].run(func, list(args), kwargs)

    return wrapper


def tft_report_error(error_type: ReportState | int, error_code: str = "") -> None:
    """Report what has happened to this rank. Raises RuntimeError if that is answered by no recovery."""
    this_rank()[1].report(ReportState(value_of(error_type)), error_code)


def tft_wait_next_action() -> int:
    """Block until stop and clean are over; returns Action.RETRY's value, or Action.EXIT's."""
    return int(this_rank()[1].wait_next_action().value)


def tft_wait_repair_action() -> int:
    """Block until repair and rollback are over."""
    return int(this_rank()[1].wait_repair_action().value)


def tft_get_repair_step() -> int:
    """The step from which all go on; 0: not known."""
    return this_rank()[1].repair_step


def tft_get_repair_type() -> str:
    """ "retry", "recover", "dump", or "unknow"."""
    return this_rank()[1].repair_type


def tft_report_load_ckpt_step(step: int) -> None:
    """A repair handler has loaded a checkpoint of that step, from which all go on then. Raises ValueError below 1."""
    if step < 1:
        raise ValueError(f"tft_report_load_ckpt_step: step is {step}; give 1 or more")
    this_rank()[1].loaded_step = step


def tft_pause_train(cur_step: int) -> None:
    """Once an iteration: waits if a scheduler has asked for it. Raises RuntimeError: STEP FINISH if a recovery begins.

    cur_step   steps that are complete; which step that is, all ranks know from tft_end_updating_os
    """
    if cur_step < 0:
        raise ValueError(f"tft_pause_train: step is {cur_step}; give 0 or more")
    this_rank()[1].pause_if_asked()


def tft_register_exception_handler(fault_pattern: str, fault_type: str, fault_handle: Callable[[str], str]) -> None:
    """Add a row to the table of errors.

    fault_type     name of a ReportState, for the kind of fault that is called like the pattern
    fault_handle   given the error's text; returns a kind of fault
    """
    this_rank()[1].errors.add(fault_pattern, fault_type, fault_handle)


# Callbacks: args is what tft_set_step_args or the train function was given, ctx what is given here.


def _registers(name: str, called: str) -> Callable[..., None]:
    """A function that registers the callback of this name, which is `called` so."""

    def register(func: Callable[..., Any], ctx: Any = None) -> None:
        this_rank()[1].handlers.register(name, func, ctx)

    register.__doc__ = called
    return register


tft_register_stop_handler = _registers("stop", "func(args, ctx)")
tft_register_clean_handler = _registers(
    "clean", "func(is_uce_error, args, ctx) -> 0, 1 (failed), or 2 (nothing that is kept was lost)"
)
tft_register_rebuild_group_handler = _registers("rebuild_group", "func(fault_ranks, args, ctx)")
tft_register_repair_handler = _registers("repair", "func(step, need_rebuild, error_ranks, repair_info, args, ctx)")
tft_register_rollback_handler = _registers("rollback", "func(step, args, ctx)")
tft_register_save_ckpt_handler = _registers(
    "save_ckpt", "func(step, save_info, args, ctx), save_info = [{type, ranks}]"
)
tft_register_rename_handler = _registers("rename", "func(step, args), in one rank")
tft_register_exit_handler = _registers("exit", "func(ctx); kept, and never called: the agent ends the processes.")
tft_register_stream_sync_handler = _registers("stream_sync", "func(), before a pause")

# Ranks that leave, and others that train on without them. These get no ctx, but params: a text in JSON, such as
# {"scale-in-strategy": "DP"}. Where one of an upgrade is not registered, the one of an ordinary recovery is called.
tft_register_zit_upgrade_rollback_handler = _registers("zit_upgrade_rollback", "func(step, args, params)")
tft_register_zit_upgrade_repair_handler = _registers(
    "zit_upgrade_repair", "func(step, need_rebuild, error_ranks, repair_info, args, params)"
)
tft_register_zit_upgrade_rebuild_handler = _registers(
    "zit_upgrade_rebuild", "func(rank_list, args, params): in all ranks; rank_list are those that have come back"
)


def tft_register_zit_downgrade_rebuild_handler(func: Callable[..., Any], ctx: Any = None) -> None:
    """func(dp_ranks, world_ranks, args, params): in the ranks that are left, which these are

    In each recovery of a smaller group, so that it must not count on being called for a whole one. Then the rollback
    handler is called, as in every recovery; MindIO leaves it out.
    """
    _, framework = this_rank()
    framework.handlers.register("zit_downgrade_rebuild", func, ctx)
    framework.elastic.report()


def tft_register_decrypt_handler(decryptor: Callable[..., Any]) -> None:
    """The password of a TLS key; nothing here is encrypted, since nothing leaves the machine.

    Raises TypeError if it is given something else than a function.
    """
    if not callable(decryptor):
        raise TypeError("tft_register_decrypt_handler: give a function")
