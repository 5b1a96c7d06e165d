"""`init_process_group` and `new_group` as the script calls them: they make managed groups if the backend is gloo.

Another backend (nccl, mpi, ucc, a device map) is passed to torch, and protection is off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ttprun.protocol.board import FINISHED, Field, Phase
from ttprun.rank import fail_open, moments
from ttprun.rank.comm import torch_groups
from ttprun.rank.comm.connection import GivenUpError
from ttprun.rank.comm.journal import PATIENCE_S
from ttprun.rank.comm.process_group import INTERNAL_NAME, ManagedGroup
from ttprun.rank.session import CONNECT, Session, current

_LOOK_AGAIN_S = 1.0
MANAGED = ("gloo", "cpu:gloo")


def _make(options: Any, _: Any) -> ManagedGroup:
    """Called by torch to make a group of our internal backend name."""
    session = current()
    assert session is not None
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ManagedGroup(session, session.exchange, options.group_id, ranks, options.group_rank, options.timeout)


def register() -> None:
    """Make the internal backend name known to torch."""
    dist.Backend.register_backend(INTERNAL_NAME, _make, extended_api=True, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "gloo"


def _is_managed(backend: Any) -> bool:
    import torch

    if backend is None:
        return not torch.accelerator.is_available()
    return str(backend).lower() in MANAGED


def _show_as_gloo(group: Any) -> None:
    """Have `get_backend()` return what the script asked for."""
    if isinstance(group, ManagedGroup):
        group.is_made = True
        _, store = c10d._world.pg_map[group]
        c10d._world.pg_map[group] = ("gloo", store)
        c10d._world.pg_backend_config[group] = "cpu:gloo"


def wrap_init_process_group(original: Any) -> Any:
    """init_process_group: the default group is a managed one."""

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is None:
            return original(backend, *args, **kwargs)
        moments.reached("init")
        session.touch(Phase.SETUP)
        session.join()
        if not _is_managed(backend):
            if session.framework is None:  # else its callbacks stop and rebuild the group
                session.give_up_protection(f"backend {backend!r} is not repaired yet, only gloo")
            return original(backend, *args, **kwargs)
        if kwargs.get("world_size", -1) not in (-1, session.world_size):
            session.give_up_protection("the script's world_size differs from the one that ttprun started")
            return original(backend, *args, **kwargs)
        return _make_managed(
            session,
            lambda: (original(INTERNAL_NAME, *args, **kwargs), dist.group.WORLD),
            lambda: original(backend, *args, **kwargs),
        )

    return init_process_group


def wrap_new_group(original: Any) -> Any:
    """new_group: further groups are managed too."""

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = current()
        is_default_managed = isinstance(dist.group.WORLD, ManagedGroup)
        if session is None or not is_default_managed or not (backend is None or _is_managed(backend)):
            if session is not None and session.framework is None and is_default_managed:
                session.give_up_protection(f"backend {backend!r} of a group is not repaired yet, only gloo")
            return original(ranks, timeout, backend, *args, **kwargs)
        if session.exchange.is_given_up:
            return original(ranks, timeout, backend, *args, **kwargs)
        return _make_managed(
            session,
            lambda: (group := original(ranks, timeout, INTERNAL_NAME, *args, **kwargs), group),
            lambda: original(ranks, timeout, backend, *args, **kwargs),
        )

    return new_group


def _make_managed(session: Session, make: Callable[[], tuple[Any, Any]], make_as_given: Callable[[], Any]) -> Any:
    """Make a managed group; if that fails here or in another rank, make torch's own.

    make            returns (what torch returns, the group)
    make_as_given   makes torch's own, with the script's arguments
    """
    before = torch_groups.Known()
    try:
        result, group = make()
        _show_as_gloo(group)
        _connect(group)
        return result
    except GivenUpError:
        pass
    except Exception as error:
        if fail_open.is_meant(error):
            raise
        session.exchange.give_up(session.generation)
        fail_open.give_up("making a process group", error)
    before.restore()
    return make_as_given()


def _connect(group: Any) -> None:
    """Connect to the group's other members; not in a replay."""
    session = current()
    if isinstance(group, ManagedGroup) and session is not None and not session.is_without_others():
        session.meet(CONNECT, group.size())
        group.connect()
        session.touch(Phase.COMPUTING if session.applied else Phase.SETUP)


def wrap_destroy_process_group(original: Any) -> Any:
    """destroy_process_group: forget our groups too."""

    def destroy_process_group(group: Any = None) -> Any:
        moments.reached("exit")
        session = current()
        if session is not None:
            if session.framework is None and (group is None or group is dist.group.WORLD):
                leave_together(session)
            if group is None or group is dist.group.WORLD:
                session.groups.clear()
            elif isinstance(group, ManagedGroup):
                session.groups.pop(group.group_name, None)
        return original(group)

    return destroy_process_group


def leave_together(session: Session) -> None:
    """Wait until every rank destroys its process group: until then each may be needed to repair another.

    Ends after PATIENCE_S if a rank waits in a collective meanwhile: it may wait for this rank, and must fail as under
    torchrun.
    """
    if not session.groups:
        return
    session.verifier.stop_if_divergent()
    session.times_left += 1
    board, times = session.board, session.times_left
    board.announce(session.local_rank, Field.LEAVING, times)
    if not session.is_repairable() or session.replay is not None:
        return
    session.touch(Phase.FINISHED)
    stuck_since_s = time.monotonic()
    for row in range(board.n_ranks):
        while (
            (left := board.get(row, Field.LEAVING)) < times
            and board.get(row, Field.RECORDED) != FINISHED
            and not session.unprotected
        ):
            before = board.get(row, Field.COLLECTIVES)
            board.wait_for_change(row, Field.LEAVING, left, _LOOK_AGAIN_S)
            is_there = board.get(row, Field.PHASE) in (Phase.COLLECTIVE, Phase.WAITING)
            is_stuck = is_there and board.get(row, Field.COLLECTIVES) == before
            if not is_stuck or session.is_holding:
                stuck_since_s = time.monotonic()
            elif time.monotonic() - stuck_since_s > PATIENCE_S:
                return
