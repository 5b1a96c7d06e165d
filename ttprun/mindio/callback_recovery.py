"""The recovery thread of a rank with --mindio: the agent's orders, carried out by callbacks.

The orders (`protocol/to_rank.py`) arrive in this order:

    Freeze    survivors reach the same step; stop handler; the main thread leaves its train function
    Prepare   to a rank whose device has failed: stop and clean handlers. A replacement runs the script, up to that
              function
    Repair    to all: clean handler, groups are connected, rebuild and repair handlers
    Save      save_ckpt handler; `Rename` follows to one rank, when all have written
    Rollback  rollback handler, and the train function is called again

A newer generation interrupts an older one: it cuts the connections on which a callback waits. Begin with
`CallbackRecovery`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec.structs import asdict

from ttprun.device import accelerator
from ttprun.device.interface import DeviceFailedError
from ttprun.groups import generations
from ttprun.groups.journal import Journal
from ttprun.groups.links import cut_all
from ttprun.groups.process_group import groups_of
from ttprun.introspect import stages
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.fail_open import NotRepairableError
from ttprun.mindio import framework, handlers
from ttprun.mindio.framework import Framework, MainThread
from ttprun.mindio.handlers import FORCE_STOP, RET_NO_REBUILD, SAVE, ReportState, Size
from ttprun.protocol import from_rank, mindio, to_rank
from ttprun.protocol.board import Field
from ttprun.protocol.channel import Message
from ttprun.protocol.from_rank import GroupJournal
from ttprun.protocol.mindio import RepairType
from ttprun.protocol.reason import Reason
from ttprun.rank.replay import recovery_orders
from ttprun.rank.replay.order_thread import JoinsTraining, Ordered, Recovery
from ttprun.tensors import state_transfer

LOADS = (RepairType.RT_LOAD_CKPT, RepairType.RT_LOAD_REBUILD)
REBUILDS = (RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_LOAD_REBUILD)
RECEIVES = (RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_RECV_REPAIR)


class CallbackRecovery(Recovery):
    """Carries out the agent's orders by the callbacks of `framework`."""

    def __init__(self, session: Rank, framework: Framework) -> None:
        super().__init__(session)
        self._framework = framework
        self._rebuilt_in = -1
        self._is_calling = False

    def take(self, message: Message) -> None:
        """As for any rank; but a newer recovery interrupts a callback that waits for another rank."""
        match message:
            case to_rank.Heard():
                pass
            case mindio.SchedulerCall(action=action, arguments=arguments):
                framework.call(action, arguments)
            case mindio.FailMemory():
                self._framework.fail_memory()
            case to_rank.Freeze(repair_type=repair_type):
                super().take(message)
                self._framework.order_stop(repair_type)
                if self._is_calling:
                    self._cut_links()
            case mindio.Prepare() | mindio.Repair() | mindio.Rollback() | mindio.Save() | mindio.Rename():
                self.leave_to_thread(message)
            case _:
                super().take(message)

    def _cut_links(self) -> None:
        """On a thread of its own: an abort of a device's communicator may last, and this one hears the agent."""
        groups = [group.links for group in groups_of(self._session)]

        def cut() -> None:
            with contextlib.suppress(DeviceFailedError):  # the next order meets it again
                cut_all(groups)

        threading.Thread(target=cut, name="ttprun-freeing", daemon=True).start()

    def _carry_out(self, order: Ordered) -> None:
        accelerator.use(self._framework.device_index)
        acts: dict[type, Callable[[Any], None]] = {
            to_rank.Freeze: self._freeze,
            mindio.Prepare: self._prepare,
            JoinsTraining: self._report_joined,
            mindio.Repair: self._repair,
            mindio.Save: self._save,
            mindio.Rename: self._rename,
            mindio.Rollback: self._rollback,
        }
        if type(order) not in acts:
            raise RuntimeError(f"a rank with a framework's callbacks cannot carry out {order}")
        acts[type(order)](order)

    def _work(self) -> None:
        self._framework.serve_callbacks(self._check_overtaken)
        super()._work()

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """A callback runs inside the `with`; a newer recovery interrupts its waits for other ranks."""
        self._check_overtaken()
        self._is_calling = True
        try:
            yield
        finally:
            self._is_calling = False
        self._check_overtaken()

    # Stop.

    def _freeze(self, order: to_rank.Freeze) -> None:
        session, framework = self._session, self._framework
        stages.reached("freeze")
        framework.order_stop(order.repair_type)  # again, as the previous repair may just have released it
        session.board.announce(session.rank, Field.LEAVING, 0)
        session.hold(order.generation)
        recovery_orders.let_step_end(session, self._check_overtaken)
        recovery_orders.settle(session, order, self._check_overtaken)
        framework.settled_in = session.generation
        why_not = self._why_not()
        if why_not:
            raise NotRepairableError(why_not)
        with self._calling():
            framework.handlers.stop()
        self._leave_collectives()
        framework.wait_until_stopped(self._check_overtaken)
        if framework.is_torn:
            raise NotRepairableError(
                Reason("recovery-failed", "its train function was interrupted during an update of the optimizer")
            )
        framework.repair_step = session.applied
        session.board.set(session.rank, Field.RECORDED, session.applied)
        has_group = torch.distributed.is_initialized()
        frozen = from_rank.RankFrozen(
            session.generation, session.applied, has_group=has_group, journal=self._signatures()
        )
        session.channel.send(frozen)

    def _why_not(self) -> str:
        """Why this rank cannot take part in a repair; "" if it can."""
        if self._framework.place is MainThread.OUTSIDE:
            return "it is not in the function that tft_exception_handler decorates"
        return "" if self._session.applied else "it has not completed an update of the optimizer yet"

    def _leave_collectives(self) -> None:
        """Fail all waits for collectives, and start the names of new groups again."""
        session = self._session
        unfinished = session[Journal].unfinished()
        generations.break_connections(session)
        for entry in unfinished:
            if not entry.is_done:
                entry.settle(RuntimeError(f"{FORCE_STOP}. A recovery has begun (ttprun)"))
        session[Journal].clear()
        session.made.by_ranks.clear()

    def _signatures(self) -> dict[str, GroupJournal]:
        """By group: its ranks. What was issued is not issued again."""
        return {
            group.group_name: GroupJournal(list(group.ranks), []) for group in generations.all_groups(self._session)
        }

    def _prepare(self, order: mindio.Prepare) -> None:
        """Memory of this rank's device has failed, and all others are frozen."""
        session, framework = self._session, self._framework
        session.begin_generation(order.generation)
        framework.repair_type = order.repair_type
        is_behind = session.applied != order.boundary or framework.is_torn
        with self._calling():
            framework.handlers.stop()
        self._leave_collectives()
        with self._calling():
            code = framework.handlers.clean(framework.fault is ReportState.RS_UCE)
        framework.note_cleaned()
        has_lost_nothing = code == RET_NO_REBUILD and not is_behind
        self._report_ready(
            order.boundary, RepairType.RT_UCE_LOWLEVEL if has_lost_nothing else RepairType.RT_UCE_HIGHLEVEL
        )

    def _report_joined(self, _: JoinsTraining) -> None:
        """A replacement has reached its train function."""
        framework = self._framework
        assert framework.joins_at is not None
        framework.note_cleaned()
        self._report_ready(framework.joins_at, RepairType.RT_RECV_REPAIR)

    def _report_ready(self, boundary: int, part: mindio.RepairType) -> None:
        session = self._session
        session.channel.send(mindio.Prepared(session.generation, boundary, part, self._signatures()))

    # Rebuild and repair.

    def _repair(self, order: mindio.Repair) -> None:
        session, framework = self._session, self._framework
        step = order.boundary
        framework.repair_step = step
        framework.repair_type = order.repair_type
        self._rebuild(order, fault_ranks=order.lost)
        size = _size_of(order.size)
        stages.reached("transfer")
        for part in order.parts:
            needs_rebuild = part.repair_type in REBUILDS
            info = asdict(part) | {"repair_type": part.repair_type.value}
            with self._calling():
                if not framework.handlers.repair(step, needs_rebuild, part.dst, info, size):
                    self._repair_by_ourselves(part, order.limit_s)
        if session.rank in order.lost:
            session.channel.send(
                from_rank.RankRepaired(session.generation, digest="", boundary=framework.loaded_step or None)
            )
        else:
            session.channel.send(from_rank.StateSent(session.generation, digest=""))

    def _rebuild(self, order: mindio.Repair | mindio.Rollback, fault_ranks: list[int]) -> None:
        """Clean, connect the groups that all members have, and call the framework's rebuild handler."""
        session, framework = self._session, self._framework
        stages.reached("rebuild")
        session.away = frozenset(order.size.away)
        if not framework.was_cleaned:
            with self._calling():
                framework.handlers.clean(False)
            framework.note_cleaned()
        for name in order.groups:
            if (group := session.made.living.get(name)) is not None:
                group.links.connect_in(session.generation)
                group.links.is_joined = True
        with self._calling():
            framework.handlers.rebuild_group(fault_ranks, _size_of(order.size))
        self._rebuilt_in = session.generation

    def _repair_by_ourselves(self, part: mindio.RepairPart, limit_s: float) -> None:
        """Send or receive the optimizers' state, as between replicas without a framework."""
        session, kind = self._session, part.repair_type
        if kind is RepairType.RT_SEND:
            name = f"state-{session.generation}-{session.rank}.sock"
            state_transfer.serve(
                state_transfer.InDirectory(session.run_dir, name), len(part.dst), limit_s, self._check_overtaken
            )
        elif kind in RECEIVES:
            for source in part.src:
                place = state_transfer.InDirectory(session.run_dir, f"state-{session.generation}-{source}.sock")
                state_transfer.fetch(place, limit_s, self._check_overtaken)
        elif kind in LOADS:
            raise NotRepairableError(
                Reason("handler-missing", "a checkpoint must be loaded, and no repair handler is registered")
            )

    # Dump.

    def _save(self, order: mindio.Save) -> None:
        framework = self._framework
        stages.reached("persist")
        if not framework.handlers.has(SAVE):
            raise NotRepairableError(
                Reason("handler-missing", "no save_ckpt handler is registered, so nothing can be saved")
            )
        if not framework.was_cleaned:
            with self._calling():
                framework.handlers.clean(False)
            framework.note_cleaned()
        with self._calling():
            framework.handlers.save(order.step, [asdict(saving) for saving in order.saves])
        self._session.channel.send(mindio.SavedByFramework(order.generation))

    def _rename(self, order: mindio.Rename) -> None:
        with self._calling():
            self._framework.handlers.rename(order.step)
        self._session.channel.send(mindio.Renamed(order.generation))

    # Rollback and release.

    def _rollback(self, order: mindio.Rollback) -> None:
        session, framework = self._session, self._framework
        if framework.loaded_step != order.loaded:
            raise NotRepairableError(
                Reason(
                    "recovery-failed",
                    f"it has loaded a checkpoint of step {framework.loaded_step}, others one of step {order.loaded}",
                )
            )
        step = order.boundary
        framework.repair_step = step
        if self._rebuilt_in != session.generation:
            self._rebuild(order, fault_ranks=[])
        with self._calling():
            framework.handlers.rollback(step, _size_of(order.size))
        handlers.restore(session, step)
        session.channel.send(from_rank.RankRebuilt(session.generation))
        framework.release(step)
        session.channel.send(from_rank.RankReissued(session.generation))


def _size_of(size: mindio.Size) -> Size:
    """The agent's order of the new size, for the handlers."""
    return Size(tuple(size.ranks), tuple(size.data_parallel), size.params)
