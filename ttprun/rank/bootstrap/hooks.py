"""The hooks that need torch: what is installed once per process, and what is new for each run of the script.

A process runs its script once, unless a transient error or a device error ends it (`rerun.py`). Begin with `begin_run`.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ttprun.capture import installing
from ttprun.capture.effects.effects import Effects
from ttprun.capture.position import made_inside
from ttprun.capture.recording import Rehearsal
from ttprun.capture.records.recorder import Recorder
from ttprun.groups import group_making
from ttprun.groups.connection import Exchange
from ttprun.groups.journal import Journal
from ttprun.groups.results import Results
from ttprun.introspect import fail_open, stages
from ttprun.introspect.current_rank import Observers, Rank, begin, current, leave_in_children
from ttprun.protocol import from_rank, mindio, patience, to_rank
from ttprun.protocol.board import Board, Phase
from ttprun.protocol.reason import Reason
from ttprun.rank import heartbeat, proof
from ttprun.rank.bootstrap import patch_table, reset
from ttprun.rank.bootstrap.presence import Presence
from ttprun.rank.proof import Alignment, Proof
from ttprun.rank.replay import recovery_orders
from ttprun.rank.replay.kept_steps import Keeper
from ttprun.rank.replay.order_thread import Recovery
from ttprun.rank.replay.replay_run import ReplayRun, StepProof
from ttprun.rank.step import record, step_hooks
from ttprun.rank.step.commit_barrier import InterNodeCommit
from ttprun.rank.verification import Verifier
from ttprun.tensors import optimizer_registry
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.own_state import OwnState
from ttprun.tensors.replicated import PostStepWeights
from ttprun.tensors.shares import SnapshotPart

_JOURNAL_LIMIT_MIB = 4096  # unless the user says otherwise, and until a device is in use


def install(presence: Presence) -> None:
    """Install what lasts as long as the process; with --mindio what process groups need, and little else."""
    options, why_not = presence.welcome.options, ""
    group_making.register()
    if options.mindio:
        installing.leave_us_alone()
        missing = patch_table.apply_for_frameworks()
    else:
        why_not = installing.install(record.steps_now)
        missing = patch_table.apply_all(with_replay=False)
        before_step = fail_open.hook("the hook before Optimizer.step", step_hooks.before_step)
        register_optimizer_step_pre_hook(optimizer_registry.after_all_others(before_step))
        register_optimizer_step_post_hook(fail_open.hook("the hook after Optimizer.step", step_hooks.after_step))
        if options.may_rerun:
            reset.note_beginning()
    named = f"not protected on this torch version: {', '.join(missing)}" if missing else ""
    for note in filter(None, (named, why_not)):
        presence.channel.send(from_rank.Note(note))
    leave_in_children()
    if options.allow_faults:
        from ttprun.chaos import strikes  # a companion, as the next one

        stages.listeners.append(strikes.observer_for(presence.welcome.rank) or strikes)
        strikes.begin(presence.welcome.faults, presence.channel)
    if options.trace:
        from ttprun.chaos import step_digests

        stages.listeners.insert(0, step_digests.trace(options.trace, presence.welcome.rank))


def begin_run(presence: Presence, is_replacement: bool) -> None:
    """A run of the script begins, or has just imported torch.

    is_replacement   it replaces a lost run, at the boundary that the agent's order names
    """
    session = make_session(presence)
    order = presence.order if is_replacement else None
    if presence.welcome.options.mindio:
        _begin_framework(presence, session, order)
        return
    if is_replacement:
        patch_table.apply_all(with_replay=True)
    begin(session)
    effects = Effects(session[Recorder])
    adapt = order.adapt if isinstance(order, to_rank.Replay) else None
    is_replay = isinstance(order, to_rank.Replay) and adapt is None
    if adapt is not None:
        from ttprun.elastic_resume import adapted
    effects.begin(is_replay, None if adapt is None else adapted.log_of(adapt, session.rank))
    match order:
        case to_rank.Replay(adapt=None):
            session.stand_in(replay := _replay_of(session, order))
            replay.begin()
        case to_rank.Replay(boundary=boundary, adapt=to_rank.Adapt() as adapt):
            session.stand_in(position := adapted.Adapted(session, boundary, adapt))
            position.begin()
        case to_rank.Resume(boundary=boundary):
            effects.resume_at(boundary)
            recovery_orders.expect(session, order)
            recovery_orders.note_agreed(session, order)  # before it issues anything
            Proof.begin(session, boundary)
    if session.options.trace:
        from ttprun.chaos import step_digests

        step_digests.begin_run()
    listen(presence, session, Recovery(session))


def _begin_framework(presence: Presence, session: Rank, order: object) -> None:
    """With --mindio, where the framework owns the train function; what other ranks never need is imported here."""
    from ttprun.mindio.callback_recovery import CallbackRecovery
    from ttprun.mindio.framework import Framework

    boundary, reboot_type = (order.boundary, order.reboot_type) if isinstance(order, mindio.Prepare) else (None, "arf")
    session.framework = framework = Framework(session, boundary, reboot_type)
    session[Journal].admit = framework.admit
    begin(session)
    listen(presence, session, CallbackRecovery(session, framework))


def wrap_process_group_name(original: Any) -> Any:
    """_process_group_name: give a group that is made during a repair the same name in all its members.

    torch derives the name from the number of groups that a process has made; a replacement has made fewer than the
    other ranks. Groups of the script's setup, which all ranks make alike, keep their names.
    """
    made: Counter[tuple[int, str]] = Counter()

    def process_group_name(ranks: Any, use_hashed_name: Any) -> Any:
        session = current()
        if session is None or session.framework is None or not session.framework.is_past_setup:
            return original(ranks, use_hashed_name)
        of = "_".join(map(str, ranks)) if use_hashed_name else "all"
        made[session.generation, of] += 1
        return f"repair {session.generation} of {of}, {made[session.generation, of]}"

    return process_group_name


def _replay_of(session: Rank, order: to_rank.Replay) -> ReplayRun:
    replay = ReplayRun.of_lost(session, order.boundary)
    replay.step_from, replay.is_joining = order.step_from, order.is_joining
    replay.is_contradicted, replay.given, replay.debug = order.is_contradicted, order.given, order.debug
    if order.from_mirror or not order.is_joining:
        replay.step_proof = StepProof(order.proof_from, order.result)
    return replay


def listen(presence: Presence, session: Rank, recovery: Recovery) -> None:
    """The agent's messages are for this run from now on."""
    session.recovery = recovery
    recovery.start()
    take: Any = recovery.take
    if session.options.allow_faults:
        from ttprun.chaos import strikes

        take = strikes.taken_from(take, presence.channel)
    presence.hand_over(take, recovery.begin_in)
    session.touch(Phase.SETUP)
    presence.channel.send(from_rank.RankProtected())


def make_session(presence: Presence) -> Rank:
    """A new session for a new run of the script."""
    welcome, options = presence.welcome, presence.welcome.options
    recorder = Recorder(presence.fds[1], options.record_limit_mib << 20)
    board = Board(presence.fds[0], welcome.world_size)
    every = options.verified_every

    def note(text: str) -> None:
        presence.channel.send(from_rank.Note(text))

    session = Rank(
        rank=welcome.rank,
        local_rank=welcome.local_rank,
        world_size=welcome.world_size,
        run_dir=welcome.run_dir,
        options=options,
        channel=presence.channel,
        board=board,
        ranks_here=welcome.local_world_size,
        address=welcome.address,
        generation=presence.generation,
    )
    journal = Journal(
        (options.journal_limit_mib or _JOURNAL_LIMIT_MIB) << 20,
        partial(patience.is_agent_awake, board),
        session.diagnose,
        lambda entry, after_s: session.report_broken(
            session.generation, f"{entry.op}: {entry.error}", after_s, entry.group.links.device_fault_of(entry.error)
        ),
        may_follow_device=not options.journal_limit_mib,
    )
    heartbeat.has_in_flight = journal.has_in_flight
    session.parts.update(
        {
            Recorder: recorder,
            Journal: journal,
            Verifier: Verifier(
                presence.channel,
                journal,
                options.verify_every,
                options.nan_limit_s,
                is_compared=welcome.world_size > 1 and not options.mindio,
            ),
            Alignment: Alignment(),
            Holdings: Holdings(),
            Rehearsal: Rehearsal(),
            SnapshotPart: SnapshotPart(
                *(board, welcome.local_rank, options.buffers, options.snapshot_every_steps, recorder),
                range(every * welcome.rank, sys.maxsize, every * welcome.world_size) if every else (),
            ),
            PostStepWeights: PostStepWeights(optimizer_registry.newest, note),
            OwnState: OwnState(board, welcome.rank, options.own_state, recorder),
            Mirror: Mirror(board, welcome.rank, options.mirror),
            Results: Results(recorder),
            Exchange: Exchange(presence.channel, welcome.address),
        }
    )
    if options.keep_steps or options.verified:
        session.keep_by(Keeper(session, welcome.arguments))
    if welcome.address:
        session.parts[InterNodeCommit] = InterNodeCommit(session, presence.fds[3])
    session.observers = observers_of(session)
    return session


def _refuse(session: Rank, why: Reason) -> None:
    proof.report_mismatch(session.channel, session.generation, why)


def _note_sent_otherwise(session: Rank, tensor: torch.Tensor, difference: str) -> None:
    """A replacement sends something else than the lost rank has sent: refuse it, unless that may be a measurement.

    tensor       that it sends
    difference   a sentence
    """
    if proof.is_measured([tensor]):
        proof.report(session, [], [f"{difference}; it is small and not a gradient: perhaps a measured time"])
        return
    cause = "its steps depend on something that is neither recorded nor made again by its setup"
    why = Reason("not-replayable", f"the script cannot be replayed: {difference}, so {cause}")
    _refuse(session, why)


def observers_of(session: Rank) -> Observers:
    """Each question and report of the libraries goes to the part that can answer it."""
    commit = session.get(InterNodeCommit)
    observers = Observers(
        note=partial(proof.note, session),
        report=partial(proof.report, session),
        refuse=partial(_refuse, session),
        sends_otherwise=partial(_note_sent_otherwise, session),
        made=made_inside.note,
        leaves=session[Verifier].stop_if_divergent,
        keep_result=session[Mirror].keep_result,
        give_result=session[Mirror].give_result,
        weights=lambda: optimizer_registry.newest().weights,
        device_in_use=optimizer_registry.device_in_use,
        wrapped_models=optimizer_registry.wrapped_models,
    )
    if commit is not None:
        observers.cut = commit.cut
    return observers
