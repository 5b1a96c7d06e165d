"""torch's functions as the script calls them: `init_process_group` and `new_group` make managed groups.

A backend without a transport of ours (mpi, ucc, xccl) is passed to torch, and protection is off. So is a sub-group over
torch's `fake` backend, but that costs no protection: nothing is communicated over it, so nothing of it must be issued
again. Below are the functions of a device that concern collectives: graphs, `synchronize`, batches of messages.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ttprun.device import accelerator
from ttprun.device.device_errors import DEBUG_NOTE, is_debugging
from ttprun.groups import device_link, torch_calls
from ttprun.groups.connection import Exchange, GivenUpError
from ttprun.groups.departure import leave_together
from ttprun.groups.journal import Journal
from ttprun.groups.links import TRANSPORTS
from ttprun.groups.process_group import GLOO_ALONE, ManagedGroup
from ttprun.groups.torch_calls import INTERNAL_NAME
from ttprun.introspect import fail_open, stages
from ttprun.introspect.current_rank import CONNECT, Rank, current
from ttprun.protocol import from_rank
from ttprun.protocol.board import LEADER, Phase
from ttprun.protocol.reason import Reason

_FAKE = "fake"  # torch's name; DeviceMesh may have such groups along dimensions of one rank, as torchtitan does
LITTLE_TRIED = {
    "nccl": "repairs over NCCL have been seen on one GPU (H100), not on several: 'ttprun guide devices'",
    "hccl": "repairs over HCCL were tried on a simulated NPU only: 'ttprun guide devices'",
}
_to_make: tuple[dict[str, str], Any] = (dict(GLOO_ALONE), None)  # backends and device of the group being made


def _make(options: Any, of_backend: Any) -> ManagedGroup:
    """Called by torch to make a group of our internal backend name.

    of_backend   what the script gave as `pg_options`; it is the backend's own
    """
    session = current()
    assert session is not None
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return ManagedGroup(
        session,
        session[Exchange],
        options.group_id,
        ranks,
        options.group_rank,
        options.timeout,
        dict(_to_make[0]),
        of_backend,
        _to_make[1],
    )


def register() -> None:
    """Make the internal backend name known to torch."""
    dist.Backend.register_backend(INTERNAL_NAME, _make, extended_api=True, devices=["cpu"])
    dist.Backend.default_device_backend_map["cpu"] = "gloo"


def _backends(backend: Any, device_id: Any = None) -> dict[str, str]:
    """Type of device -> name of the backend that torch would make for it. Raises ValueError for an unknown one."""
    if backend is None and isinstance(device_id, torch.device):
        backend = dist.Backend.default_device_backend_map.get(device_id.type)
    if str(backend).lower() == "gloo" or (backend is None and not has_accelerator()):
        return dict(GLOO_ALONE)
    config = c10d.BackendConfig(dist.Backend("undefined" if backend is None else str(backend)))
    return {device_type: str(name) for device_type, name in config.get_device_backend_map().items()}


def device_of(device_id: torch.device | int | None) -> torch.device | None:
    """The device that `device_id` of a group's names; None if it names none."""
    if isinstance(device_id, int):
        device = torch.accelerator.current_accelerator()
        return None if device is None else torch.device(device.type, device_id)
    return device_id if isinstance(device_id, torch.device) else None


def has_accelerator() -> bool:
    """Whether torch sees a device beside the processor."""
    return torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()


def _why_not(backends: dict[str, str]) -> Reason:
    """Why groups with these backends cannot be managed; "" if they can."""
    for device_type, name in backends.items():
        if name not in TRANSPORTS or device_type not in TRANSPORTS[name].device_types:
            return Reason("backend", f"backend {name!r} of {device_type} is not repaired, only {', '.join(TRANSPORTS)}")
        if name == "nccl" and not dist.is_nccl_available():
            return Reason("backend", "this build of torch has no NCCL")
        if missing := accelerator.missing_of(device_type):
            return Reason(
                "device", f"torch.{device_type} has no {missing}, without which nothing on such a device is repaired"
            )
    return Reason()


def _show_as(group: Any, backend: Any) -> None:
    """Have `get_backend()` return what the script asked for.

    backend   as the script named it; None: torch's choice
    """
    if isinstance(group, ManagedGroup):
        group.is_made = True
        _, store = c10d._world.pg_map[group]
        shown = "undefined" if backend is None else str(backend).lower()
        c10d._world.pg_map[group] = (shown if group.backends != GLOO_ALONE else "gloo", store)
        c10d._world.pg_backend_config[group] = ",".join(f"{kind}:{name}" for kind, name in group.backends.items())


def wrap_init_process_group(original: Any) -> Any:
    """init_process_group: the default group is a managed one."""

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is None:
            return original(backend, *args, **kwargs)
        stages.reached("init")
        session.touch(Phase.SETUP)
        session.join()
        backends, why_not = _chosen(backend, kwargs.get("device_id"))
        if why_not or (session.framework is not None and backends != GLOO_ALONE):
            if session.framework is None:  # else its callbacks stop and rebuild the group
                session.give_up_protection(why_not)
            return original(backend, *args, **kwargs)
        if kwargs.get("world_size", -1) not in (-1, session.world_size):
            session.give_up_protection(
                Reason("unequal-steps", "the script's world_size differs from the one that ttprun started")
            )
            return original(backend, *args, **kwargs)
        if session.rank == LEADER and not session.generation:
            for name in sorted({*backends.values()} & LITTLE_TRIED.keys()):
                session.channel.send(from_rank.Note(LITTLE_TRIED[name]))
            if "nccl" in backends.values() and is_debugging(os.environ):
                session.channel.send(from_rank.Note(DEBUG_NOTE))
        # torch would make a native communicator of the device at once.
        others = {name: value for name, value in kwargs.items() if name != "device_id"}
        return _make_managed(
            session,
            backend,
            backends,
            kwargs.get("device_id"),
            lambda: (original(INTERNAL_NAME, *args, **others), dist.group.WORLD),
            lambda: original(backend, *args, **kwargs),
        )

    return init_process_group


def wrap_new_group(original: Any) -> Any:
    """new_group: further groups are managed too."""

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        session = current()
        world = dist.group.WORLD
        if session is None or not isinstance(world, ManagedGroup):
            return original(ranks, timeout, backend, *args, **kwargs)
        with ManagedGroup.making():
            return make(session, world, ranks, timeout, backend, *args, **kwargs)

    def make(
        session: Rank, world: ManagedGroup, ranks: Any, timeout: Any, backend: Any, *args: Any, **kwargs: Any
    ) -> Any:
        backends, why_not = (dict(world.backends), Reason()) if backend is None else _chosen(backend, None)
        if set(backends.values()) == {_FAKE}:
            _note_made(session, fail_open.caller(), world)
            return original(ranks, timeout, backend, *args, **kwargs)
        if why_not or (session.framework is not None and backends != GLOO_ALONE):
            if session.framework is None:
                session.give_up_protection(why_not.within(f"{why_not} (of a group)"))
            return original(ranks, timeout, backend, *args, **kwargs)
        if session[Exchange].is_given_up:
            return original(ranks, timeout, backend, *args, **kwargs)
        _note_made(session, fail_open.caller(), world)
        shown = c10d._world.pg_map[world][0] if backend is None else backend
        others = {name: value for name, value in kwargs.items() if name != "device_id"}
        return _make_managed(
            session,
            shown,
            backends,
            kwargs.get("device_id") or world.links.member.device,
            lambda: (group := original(ranks, timeout, INTERNAL_NAME, *args, **others), group),
            lambda: original(ranks, timeout, backend, *args, **kwargs),
        )

    return new_group


def wrap_split_group(original: Any) -> Any:
    """split_group: the parts of a managed group are managed too, and connect by themselves; see torch's own."""

    def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        world: Any = dist.group.WORLD
        parent: Any = parent_pg or world
        are_ours = isinstance(world, ManagedGroup) and isinstance(parent, ManagedGroup)
        if not are_ours or not world.bound_device_id or not split_ranks:  # torch says why not
            return original(parent_pg, split_ranks, *args, **kwargs)
        mine = next((part for part in split_ranks if parent.rank() in part), None)
        if mine is None:
            return None
        given = dict(zip(("timeout", "pg_options", "group_desc", "backend"), args, strict=False)) | kwargs
        members = [parent.ranks[place] for place in sorted(mine)]
        return c10d.new_group(members, use_local_synchronization=True, **given)

    return split_group


def _note_made(session: Rank, frame: FrameType, world: ManagedGroup) -> None:
    """A group was made. While the group of all ranks exists, the names of later ones count it, destroyed or not."""
    of_all = weakref.ref(world)

    def is_counted() -> bool:
        return of_all() is not None and of_all() is dist.group.WORLD

    session.observers.made("a process group was made", "make all groups before the loop", is_counted, frame)


def _chosen(backend: Any, device_id: Any) -> tuple[dict[str, str], Reason]:
    """(the backends that the script asks for, why they cannot be managed)."""
    try:
        backends = _backends(backend, device_id)
    except (ValueError, KeyError) as error:  # torch will say so
        return {}, Reason("backend", f"backend {backend!r} is unknown ({error})")
    return backends, _why_not(backends)


def _make_managed(
    session: Rank,
    backend: Any,
    backends: dict[str, str],
    device_id: Any,
    make: Callable[[], tuple[Any, Any]],
    make_as_given: Callable[[], Any],
) -> Any:
    """Make a managed group; if that fails here or in another rank, make torch's own.

    backend         as the script named it
    backends        type of device -> name of the backend
    device_id       as the script has given it
    make            returns (what torch returns, the group)
    make_as_given   makes torch's own, with the script's arguments
    """
    global _to_make
    before = torch_calls.GroupRegistry()
    try:
        _to_make = backends, device_of(device_id)
        result, group = make()
        _show_as(group, backend)
        _connect(group)
        return result
    except GivenUpError:
        pass
    except Exception as error:
        if fail_open.is_meant(error):
            raise
        session[Exchange].give_up(session.generation)
        fail_open.give_up("making a process group", error)
    before.restore()
    return make_as_given()


def _connect(group: Any) -> None:
    """Connect to the group's other members; not in a replay."""
    session = current()
    if isinstance(group, ManagedGroup) and session is not None and not session.mode.is_alone:
        session.meet(CONNECT, group.size())
        group.links.connect()
        session.touch(Phase.COMPUTING if session.applied else Phase.SETUP)


def wrap_ddp_logging_data(original: Any) -> Any:
    """DistributedDataParallel._get_ddp_logging_data: the backend is the one that the script has asked for."""

    def get_ddp_logging_data(self: Any) -> Any:
        data = original(self)
        group = getattr(self, "process_group", None)
        if isinstance(group, ManagedGroup):
            data["backend_name"] = group.backend_name
        return data

    return get_ddp_logging_data


def wrap_destroy_process_group(original: Any) -> Any:
    """destroy_process_group: forget our groups too."""

    def destroy_process_group(group: Any = None) -> Any:
        stages.reached("exit")
        session = current()
        if session is not None:
            if session.framework is None and (group is None or group is dist.group.WORLD):
                leave_together(session)
            if group is None or group is dist.group.WORLD:
                session.made.forget(list(session.made.living))
            elif isinstance(group, ManagedGroup):
                session.made.forget([group.group_name])
        return original(group)

    return destroy_process_group


# Graphs of a device: `torch.cuda.graph`, `make_graphed_callables`, `torch.compile(mode="reduce-overhead")`.
#
# A graph runs what was captured once, without the Python code, at the addresses of then. Its random numbers come from
# the device's generator, so a record has them. One that the set-up captures is captured by a replacement, too, whose
# tensors keep their addresses. But none of our hooks is called when it runs: nothing in it may be a collective or a
# step, and version counters say nothing of what it has written (`accelerator.has_graphs`). While work is captured,
# nothing may be copied to the CPU, nor an event of the device be looked at: the capture would fail.

REASON = Reason(
    "device-graph",
    "the script captures its work in graphs of the device (torch.cuda.graph, make_graphed_callables, or torch.compile "
    'with mode="reduce-overhead" or "max-autotune") after its first step, so a replacement would not have them',
)

_LIMIT_S = 5.0  # for operations that were issued before the capture


def wrap_capture_begin(original: Any) -> Any:
    """capture_begin of CUDA's graphs and of torch_npu's, by which all of them begin."""

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None:
            of = weakref.ref(self)
            if session.applied or threading.current_thread() is not threading.main_thread():
                session.give_up_protection(REASON)
            session.observers.made(
                "a graph of the device was captured",
                "capture it before the loop",
                lambda: of() is not None,
                fail_open.caller(),
            )
            accelerator.has_graphs = True
            device_link.stop_looking(_LIMIT_S)
        return original(self, *args, **kwargs)

    return capture_begin


def wrap_rendezvous(original: Any) -> Any:
    """torch.distributed._symmetric_memory.rendezvous: ranks map each other's memory, and kernels use it directly."""

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None:
            session.give_up_protection(
                Reason(
                    "symmetric-memory",
                    "the script maps other ranks' memory (symmetric memory), which kernels use without a collective",
                )
            )
        return original(*args, **kwargs)

    return rendezvous


# torch.cuda.synchronize() as a wait for operations: the script may then use a result without having called `wait()`.
#
# The device has no work left then; but a collective that was aborted has ended as well, and left garbage. So the
# operations are waited for first. An event's `synchronize` says nothing of an operation that the script has not
# waited for: its stream does not know of it.


def wrap_synchronize(original: Any) -> Any:
    """synchronize() of a device's module."""

    def synchronize(*args: Any, **kwargs: Any) -> Any:
        _wait_for_operations()
        return original(*args, **kwargs)

    return synchronize


def _wait_for_operations() -> None:
    """Wait for what the script has issued on a device, through any number of recoveries."""
    session = current()
    if session is None or session.unprotected or threading.current_thread() is not threading.main_thread():
        return
    journal = session.get(Journal)
    if journal is None or accelerator.in_use() is None or not session.mode.is_live:
        return
    for entry in journal.unfinished():
        if entry.outputs and not entry.outputs[0].is_cpu:
            journal.wait(entry)


# batch_isend_irecv over a device's backend, which starts the operations of a batch together.
#
# torch asks only groups of its own type whether they can, and starts those of all others one after the other: over
# NCCL two ranks that send to each other would then wait for ever.


def wrap_batch_isend_irecv(original: Any) -> Any:
    """torch.distributed.batch_isend_irecv: as torch does for a group of its own."""

    def batch_isend_irecv(p2p_op_list: Any) -> Any:
        first = p2p_op_list[0] if type(p2p_op_list) is list and p2p_op_list else None
        group = getattr(first, "group", None) or dist.group.WORLD
        if not isinstance(first, dist.P2POp) or not isinstance(group, ManagedGroup):
            return original(p2p_op_list)
        device = first.tensor.device
        if not group.can_batch(device):
            return original(p2p_op_list)
        c10d._check_p2p_op_list(p2p_op_list)
        orders = [
            ("send" if one.op is dist.isend else "recv", ([one.tensor], one.group_peer, one.tag)) for one in p2p_op_list
        ]
        return [
            fail_open.run(
                "batch_isend_irecv", torch_calls.issue_batch, torch_calls.issue_batch_plainly, (group, orders), {}
            )
        ]

    return batch_isend_irecv
