"""What happens at each optimizer step: the record, the commit, the step.

Before `Optimizer.step` number N runs, the rank writes its record of boundary N and then waits until every rank of the
node has written its own. This commit makes replacing a rank simple: no rank changes its weights before all have written
the record that a replacement would need, so when a rank is lost all survivors are at one boundary, and the lost rank
has a record of it. All ranks have just finished the step's last all-reduce, so the wait is short.

Boundary N is passed when the step has ended; survivors in the middle of it end it first. If an optimizer communicates
inside step(), they could not without the lost rank. Then the boundary is passed before the step: the journal keeps the
step's collectives, too, and a replacement takes the step with the others, from its mirror.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from types import FrameType
from typing import Any

import torch

from ttprun.capture import values
from ttprun.capture.effects.effects import Effects
from ttprun.capture.position import user_code
from ttprun.capture.position.liveness import are_read_after
from ttprun.device import accelerator
from ttprun.groups import device_link
from ttprun.groups.journal import Journal
from ttprun.groups.process_group import groups_of
from ttprun.introspect import costs as costs_of
from ttprun.introspect import fail_open, signal_handlers, stages
from ttprun.introspect.current_rank import Rank, current
from ttprun.introspect.ownership import variables_of
from ttprun.introspect.stages import Stage
from ttprun.introspect.tensor_bytes import unseen
from ttprun.protocol import from_rank, standby_messages
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.rank.proof import Alignment, report_mismatch
from ttprun.rank.step import special_steps
from ttprun.rank.step.commit_barrier import commit, wait_for_all
from ttprun.rank.step.record import look_without_group, write_record
from ttprun.rank.verification import Verifier
from ttprun.tensors import gradients, optimizer_registry, replicated
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.own_state import OwnState
from ttprun.tensors.replicated import PostStepWeights
from ttprun.tensors.shares import SnapshotPart

_running: torch.optim.Optimizer | None = None
_boundary = 0  # to which the running step leads
_closure: special_steps.ClosureWatch | None = None  # of the running step
_AROUND_STEPS = torch.optim.Optimizer.profile_hook_step(len).__code__  # torch's wrapper of `step`: it calls the hooks
signal_handlers.Now.around_steps = _AROUND_STEPS
_NOTES_LIMIT_S = 1.0


def forget() -> None:
    """The run of the script is over."""
    global _running, _closure
    _running = _closure = None
    signal_handlers.Now.is_stepping = False


def before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> special_steps.Arguments | None:
    """The last pre-hook of Optimizer.step; its result, if any, replaces the arguments.

    args, kwargs   of the call, the optimizer first
    returns        both with the closure watched; None if there is none, or nothing of this step is followed
    """
    global _running, _closure
    session = current()
    if session is None or _is_inside_another(optimizer):
        return None  # a step inside another optimizer's step belongs to that one
    _running = optimizer
    signal_handlers.Now.is_stepping = False  # the step before may have failed
    frame = fail_open.caller()
    _closure = special_steps.ClosureWatch(
        partial(_end_closure, session, optimizer), partial(_refuse_second_call, session)
    )
    watched = special_steps.watch(optimizer, args, kwargs, _closure)
    if watched is None:
        _closure = None
        _begin_step(session, optimizer, frame)
    return watched


def _is_inside_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step runs inside another optimizer's step."""
    if _running is None or _running is optimizer:
        return False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _AROUND_STEPS and variables_of(frame).get("self") is _running:
            return True
        frame = frame.f_back
    return False


def _end_closure(session: Rank, optimizer: torch.optim.Optimizer, returned: Any) -> Any:
    """The closure has ended for the first time: the weights change from here on. Returns the closure's result."""
    return _begin_step(session, optimizer, sys._getframe(2), returned)


def _refuse_second_call(session: Rank) -> None:
    session.give_up_protection(
        Reason(
            "closure-called-twice",
            "the optimizer calls its closure several times per step (LBFGS with max_iter > 1) and changes the weights "
            "in between; only one call per step can be repaired: use torch.optim.LBFGS(max_iter=1) in a loop",
        )
    )


@unseen
def _begin_step(session: Rank, optimizer: torch.optim.Optimizer, frame: FrameType, returned: Any = None) -> Any:
    """The optimizer is about to change weights: record the boundary, and commit it.

    frame      the innermost frame of the script, or one called by it
    returned   the result of this step's closure
    returns    the same; in a replay, the lost rank's
    """
    global _boundary
    if not session.mode.is_live:
        returned = session.mode.before_step(frame, returned, optimizer)
        if session.mode.begin_step(optimizer):
            _boundary = session.applied
            session.updates.begin()
            session.touch(Phase.STEPPING)
        else:
            special_steps.call_before_others(optimizer, fail_open.hook("the hook after Optimizer.step", after_step))
        signal_handlers.Now.is_stepping = True
        return returned
    costs = session.costs
    costs.begin(session.applied + 1, lambda: accelerator.in_use() is not None)
    since = costs.now() if costs.is_on else 0
    step = _Step(session, optimizer, frame, returned)
    for _, act, _ in BEGIN:
        act(step)
    if session.is_recorded():
        for _, act, _ in RECORD:
            act(step)
    for _, act, _ in TAKE:
        act(step)
    if since:
        costs.add_rest(costs_of.CHECKS, since, (costs_of.RECORD, costs_of.COMMIT))
    stages.reached("in_step")
    return returned


class _Step:
    """A step of a live rank, for its stages.

    frame      the innermost frame of the script, or one called by it
    returned   the result of the step's closure
    boundary   to which it leads
    is_recorded   of one that begins: its record is complete, and lets the others step; that ends: records are useful
    has_looked whether a stage has found what the optimizers update now
    """

    __slots__ = ("boundary", "frame", "has_looked", "is_recorded", "optimizer", "returned", "session")

    def __init__(self, session: Rank, optimizer: torch.optim.Optimizer, frame: FrameType, returned: Any = None) -> None:
        self.session = session
        self.optimizer = optimizer
        self.frame = frame
        self.returned = returned
        self.boundary = session.applied + 1
        self.is_recorded = False
        self.has_looked = False


def _strike(_: _Step) -> None:
    if stages.listeners:  # a fault at a random moment hardly ever comes just before the notes have
        device_link.stop_looking(_NOTES_LIMIT_S)
    stages.reached("before_step")


def _refuse(step: _Step) -> None:
    session, optimizer = step.session, step.optimizer
    if accelerator.is_capturing():
        session.give_up_protection(
            Reason("device-graph", "the script captures its optimizer's step in a graph of the device: use it outside")
        )
    if session.expected is not None and gradients.are_carried_over(optimizer):
        report_mismatch(session.channel, session.generation, gradients.CARRIED)
    if gradients.were_carried(optimizer):
        session.give_up_protection(gradients.CARRIED)


def _look_for_group(step: _Step) -> None:
    if not step.session.made.living:
        look_without_group(step.session)


def _wait_for_operations(step: _Step) -> None:
    wait_for_all(step.session, step.boundary)


def _check_given_results(step: _Step) -> None:
    """Refuse the step if DDP has overwritten a result while a recovery broadcast it."""
    session = step.session
    journal = session.parts[Journal]
    if not journal.sources:
        return
    for entry in journal.entries:
        if entry.result is None and not entry.input.is_kept and journal.source_of(entry) == session.rank:
            report_mismatch(
                session.channel,
                session.generation,
                Reason(
                    "other-weights",
                    f"the result of {entry.signature} was overwritten while it was sent to the other ranks",
                ),
            )


def _end_proof(step: _Step) -> None:
    if step.session.proof is not None:
        step.session.proof.end_step()


def _align(step: _Step) -> None:
    step.session.parts[Alignment].arrive(step.session, step.boundary, step.optimizer)


def _compare(step: _Step) -> None:
    session = step.session
    if session.trains_alone:
        return
    stepped = optimizer_registry.stepped(optimizer_registry.optimizers())
    are_new = session.parts[Holdings].are_new(stepped, step.optimizer, session.made.count)
    if are_new and len(stepped.counts) > 1:
        _collect_dropped()
        session.parts[Holdings].note(optimizer_registry.stepped(optimizer_registry.optimizers()))
    step.has_looked = True
    session.parts[Verifier].look(step.boundary, step.optimizer, step.frame, are_new)


def _record(step: _Step) -> None:
    step.is_recorded = write_record(
        step.session, step.boundary, step.frame, step.optimizer, step.returned, step.has_looked
    )


def _commit(step: _Step) -> None:
    if step.is_recorded:
        commit(step.session, step.boundary)


def _empty_journal(step: _Step) -> None:
    for group in groups_of(step.session):
        group.end_step()
    step.session.parts[Journal].clear()


def _begin_applying(step: _Step) -> None:
    global _boundary
    session = step.session
    if not session.is_applying:  # there was no commit
        with session.lock:
            session.begin_update()
    _boundary = session.applied + 1


def _pass_before(step: _Step) -> None:
    if step.session.has_collective_steps:
        step.session.pass_boundary()


def _let_go(step: _Step) -> None:
    step.session.updates.begin()
    step.session.touch(Phase.STEPPING)
    signal_handlers.Now.is_stepping = True


BEGIN: tuple[Stage[_Step], ...] = (
    Stage("strike", _strike, "first: an injected fault meets a rank that has done nothing for this step yet"),
    Stage("refuse", _refuse, "before the record: a step that no replacement can take is not to be recorded"),
    Stage("group", _look_for_group, "before it is asked whether records are useful: a rank alone is recorded, too"),
)
RECORD: tuple[Stage[_Step], ...] = (
    Stage(
        "operations",
        _wait_for_operations,
        "before all that reads gradients or results: what is under way still writes to them",
    ),
    Stage(
        "results",
        _check_given_results,
        "after the operations: a result may be overwritten as long as it is sent; before the record, see proof",
    ),
    Stage("proof", _end_proof, "before the record: it lets the others step, and a replacement that differs must not"),
    Stage(
        "align", _align, "after the operations, whose sums it replaces; before the comparison: those gradients count"
    ),
    Stage(
        "compare",
        _compare,
        "before the record: the others wait for it, so none steps while a NaN is saved; and the agent knows the hashes",
    ),
    Stage("record", _record, "last before the commit: what the script has left for the step is as it will begin"),
    Stage("commit", _commit, "after the record: no rank changes weights before a replacement of each has its record"),
)
TAKE: tuple[Stage[_Step], ...] = (
    Stage(
        "journal",
        _empty_journal,
        "after the commit: until then a rank may be lost that needs the step's collectives once more",
    ),
    Stage("applying", _begin_applying, "before the boundary is passed, which ends it: a recovery waits for its end"),
    Stage(
        "pass",
        _pass_before,
        "after the journal, which keeps nothing from before a passed boundary, but what a collective step issues",
    ),
    Stage("update", _let_go, "last: what follows is the optimizer's own, and signal handlers wait for its end"),
)


def _collect_dropped() -> None:
    """Collect optimizers that the script has dropped: what is left of them differs between ranks.

    A scheduler and its optimizer hold each other, so they live until a garbage collection.
    """
    values.let_go()
    gc.collect()


@unseen
def after_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Global post-hook of Optimizer.step: it has run to its end.

    args, kwargs   of the call, as torch's hooks get them; not used
    """
    global _running, _boundary
    session = current()
    if session is None or _running is not optimizer:
        return
    _running = None
    signal_handlers.Now.is_stepping = False
    if _closure is not None and not _closure.calls:
        session.give_up_protection(
            Reason("closure-not-called", "the optimizer has taken a step without calling its closure")
        )
        _boundary = session.applied + 1  # nothing has begun the step
    if not session.mode.is_live:
        session.mode.after_step()
        return
    costs = session.costs
    since = costs.now() if costs.is_on else 0
    step = _Step(session, optimizer, fail_open.caller())
    step.boundary, step.is_recorded = _boundary, session.is_recorded()
    for _, act, _ in END:
        act(step)
    if since:
        costs.add(costs_of.COPIES, since)
        _report_cost(session)
    stages.reached("after_step")


def _report_cost(session: Rank) -> None:
    """Say once, for the rank that speaks for all, that protection takes more than its budget."""
    if session.rank or session.is_over_budget:
        return
    if over := session.costs.over(session.options.overhead_budget):
        session.is_over_budget = True
        session.channel.send(from_rank.Note(over))


def _end_update(step: _Step) -> None:
    stages.reached_step_end()
    step.session.updates.end()


def _watch_gradients(step: _Step) -> None:
    gradients.watch(step.optimizer, partial(are_read_after, step.frame))


def _note_weights(step: _Step) -> None:
    if not step.is_recorded:
        return
    try:
        step.session.parts[PostStepWeights].note(step.boundary)
        optimizer_registry.note_remains()
    except Exception as error:  # e.g. no memory for copies: fail open
        fail_open.raise_if_meant(error)
        why = f"the weights after step {step.boundary} cannot be noted: {error!r}"
        step.session.give_up_protection(Reason("state-unreadable", why))


def _keep_own_state(step: _Step) -> None:
    if step.is_recorded and step.session.is_alone():
        step.session.parts[OwnState].keep(step.session, step.boundary)


def _await_answer(step: _Step) -> None:
    if step.is_recorded:
        step.session.parts[Verifier].await_answer()


def _mirror(step: _Step) -> None:
    if step.is_recorded:
        step.session.parts[Mirror].begin(step.session, step.boundary)
    else:  # there is nothing to read back
        step.session.row[Field.REHEARSED] = step.boundary


def _take_snapshot(step: _Step) -> None:
    session = step.session
    if not session.trains_alone and session.parts[SnapshotPart].is_due(step.boundary):
        with gradients.kept_if_unknown(step.optimizer):
            session.parts[SnapshotPart].take(session, step.boundary, step.frame)
    if session.keeper is not None and step.is_recorded:
        session.keeper.keep(step.boundary, step.frame, step.optimizer)


def _pass_after(step: _Step) -> None:
    if step.session.applied < step.boundary:
        step.session.pass_boundary()


def _end_step(step: _Step) -> None:
    session = step.session
    session.row[Field.STEPPED] = step.boundary
    session.touch(Phase.COMPUTING)
    if not session.has_stepped:
        session.has_stepped = True
        Effects.end_set_up()
        _look_at_state(session)
        report_imports(session)
        if not session.unprotected:
            session.parts[SnapshotPart].report_size(session.channel)


def _stop_if_divergent(step: _Step) -> None:
    session = step.session
    session.parts[Verifier].stop_if_divergent()


END: tuple[Stage[_Step], ...] = (
    Stage(
        "update", _end_update, "first: an error from here on is not one of the update, which may have left half of it"
    ),
    Stage(
        "gradients", _watch_gradients, "before a snapshot, which has gradients if it is unknown what becomes of them"
    ),
    Stage("weights", _note_weights, "before the boundary is passed: from then on a recovery may load other weights"),
    Stage("own state", _keep_own_state, "after the weights are noted, for the same reason"),
    Stage("answer", _await_answer, "before mirror and snapshot: by the answer a rank knows what it alone holds"),
    Stage("mirror", _mirror, "before the boundary is passed: from then on a recovery may load other weights"),
    Stage("snapshot", _take_snapshot, "the same"),
    Stage("pass", _pass_after, "after all that reads what the step has made: a recovery waits for its end"),
    Stage(
        "end", _end_step, "after the boundary is passed: nobody is to see a step that has ended and a boundary before"
    ),
    Stage(
        "divergent", _stop_if_divergent, "last: a rank that is killed here is replaced from the boundary that is passed"
    ),
)


def _look_at_state(session: Rank) -> None:
    """After the first step, in which optimizers make their state: check that another rank could load it."""
    if session.is_recorded():
        try:
            replicated.describe()
        except fail_open.NotRepairableError as error:
            reason = Reason.of(error, "state-unreadable")
            session.give_up_protection(reason.within(f"{reason}, and another rank cannot load that"))
        if accelerator.in_use() is not None:
            _look_beside(session)


def _look_beside(session: Rank) -> None:
    """After the first step: what runs on the device that no abort ends, or that a rank's end takes with it."""
    if pipe := accelerator.mps_control():
        session.give_up_protection(Reason("mps", f"CUDA's MPS serves this machine's GPUs ({pipe})"))
    if accelerator.has_loaded("libnvshmem"):
        session.give_up_protection(
            Reason("symmetric-memory", "the script has loaded NVSHMEM, whose kernels use other ranks' memory directly")
        )


def report_imports(session: Rank) -> None:
    """Report once, after the first step, what this rank has imported."""
    if session.local_rank == 0:
        modules = [name for name in sys.modules if name.startswith("torch.")]
        session.channel.send(standby_messages.WarmUp(modules, list(user_code.followed)))
    if session.framework is None:
        session.channel.send(standby_messages.Imported(user_code.modules(), os.getcwd(), accelerator.current_index()))
