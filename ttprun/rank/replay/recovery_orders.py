"""What a rank does for each of the agent's orders in a recovery: it freezes, gives or takes state, and resumes.

The order of a freeze, and why: STAGES. Begin with `freeze`, `send_state` and `resume`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ttprun.device import accelerator
from ttprun.groups import generations, thread_collectives
from ttprun.groups.connection import Exchange
from ttprun.groups.journal import Journal
from ttprun.groups.process_group import groups_of
from ttprun.introspect import fail_open, signal_handlers, stages
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.stages import Stage
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.patience import Patience
from ttprun.protocol.reason import Reason
from ttprun.protocol.snapshot_messages import Dumped
from ttprun.rank.proof import Alignment, Expected, Proof
from ttprun.rank.replay.replay_run import ReplayRun
from ttprun.rank.verification import Verifier
from ttprun.state.files import cannot_write
from ttprun.tensors import mirror, mirror_slots, replicated, sharded, shares, state_transfer

# Freeze: a rank is lost, and this one stops before its next commit, breaks the connections, and reports its boundary.
#
# What is done, in which order and why: STAGES. Begin with `freeze`.

LOOK_AGAIN_S = 0.05
COLLECTIVE_STEP_S = 5.0  # within which a collective step ends, if no rank is lost


def freeze(session: Rank, order: to_rank.Freeze, check_overtaken: Callable[[], None]) -> None:
    """Stop, and report where this rank is.

    check_overtaken   called now and then; its exception ends the order
    """
    state = _Freeze(session, order, check_overtaken)
    for _, act, _ in STAGES:
        act(state)


class _Freeze(NamedTuple):
    """What the stages know; see `freeze`."""

    session: Rank
    order: to_rank.Freeze
    check_overtaken: Callable[[], None]


def _hold(freeze: _Freeze) -> None:
    stages.reached("freeze")
    freeze.session.hold(freeze.order.generation)


def _end_collective_step(freeze: _Freeze) -> None:
    if freeze.session.has_collective_steps and not freeze.order.lost:
        let_collective_step_end(*freeze)


def _report(freeze: _Freeze) -> None:
    session = freeze.session
    frozen = from_rank.RankFrozen(
        session.generation,
        session.applied,
        digest=replicated.digest() if session.applied and not session.has_collective_steps else "",
        has_group=bool(session.made.living or session.made.left),
        journal=generations.known(session),
    )
    session.channel.send(frozen)


STAGES: tuple[Stage[_Freeze], ...] = (
    Stage("hold", _hold, "first: the main thread must not commit any more, and what follows announces this generation"),
    Stage(
        "collective step",
        _end_collective_step,
        "before the journal is frozen: if no rank is lost, the step can end, but only as long as operations are issued",
    ),
    Stage(
        "journal",
        lambda freeze: generations.freeze(freeze.session),
        "before the connections break: an operation would be issued on a broken one",
    ),
    Stage(
        "connections",
        lambda freeze: generations.break_connections(freeze.session, freeze.check_overtaken),
        "before the wait for the step: what it waits for may be a collective that a lost rank never joins",
    ),
    Stage(
        "step",
        lambda freeze: let_step_end(freeze.session, freeze.check_overtaken),
        "before it settles: that announces where this rank is, to those that settle with it",
    ),
    Stage(
        "settle",
        lambda freeze: settle(*freeze),
        "before the report and all that depends on the boundary: it may let one more step begin",
    ),
    Stage(
        "saves",
        lambda freeze: thread_collectives.give_up_older(freeze.session),
        "after it has settled: those are given up that began before the boundary it came to",
    ),
    Stage(
        "device",
        lambda freeze: generations.settle(freeze.session),
        "after it has settled: the step that this has let begin gives the device work, too",
    ),
    Stage("report", _report, "last: the digest is of weights that nothing changes any more"),
)


def let_step_end(session: Rank, check_overtaken: Callable[[], None]) -> None:
    """Wait for the end of the running optimizer step, if there is one.

    check_overtaken   called while this waits; its exception ends the wait
    """
    with session.changed:
        while session.is_applying:
            session.changed.wait(LOOK_AGAIN_S)
            check_overtaken()


def let_collective_step_end(session: Rank, order: to_rank.Freeze, check_overtaken: Callable[[], None]) -> None:
    """No rank is lost: let all ranks end the step in which they communicate, as its middle cannot be saved.

    order             names the survivors, and the boundary that all have recorded
    check_overtaken   called while this waits; its exception ends the wait

    Blocks for COLLECTIVE_STEP_S at most, and no longer once a collective has failed.
    """
    settle(session, order, check_overtaken)
    board, patience = session.board, Patience(COLLECTIVE_STEP_S)
    session.share_row()
    while min(board.get(row, Field.STEPPED) for row in order.ranks) < session.applied and not patience.look():
        if any(entry.error is not None for entry in session[Journal].unfinished()):
            return
        time.sleep(LOOK_AGAIN_S)
        session.share_row()
        check_overtaken()


def settle(session: Rank, order: to_rank.Freeze, check_overtaken: Callable[[], None]) -> None:
    """Bring all survivors to one boundary.

    order             names the survivors, and the boundary that all have recorded
    check_overtaken   called while this waits; its exception ends the wait

    Each has stopped before its next commit. If one of them has stepped already, every rank had recorded that boundary,
    so those that wait before it may step too. The lost rank may be the one that has stepped: if the survivors stayed
    where they are, it would have to take that step again, without the gradients of a step of several optimizers, which
    are in no record.

    Blocks until this rank is at that boundary, or `check_overtaken` raises.
    """
    board = session.board
    board.announce(session.rank, Field.HELD, session.generation)
    session.share_row()
    for row in order.ranks:
        while (generation := board.get(row, Field.HELD)) < session.generation:
            board.wait_for_change(row, Field.HELD, generation, LOOK_AGAIN_S)
            check_overtaken()
    boundary = max(order.committed, *(board.get(row, Field.APPLIED) for row in order.ranks))
    session.settle(boundary)
    with session.changed:
        while session.applied < boundary or session.is_applying:
            session.changed.wait(LOOK_AGAIN_S)
            check_overtaken()


# Repair: state goes from survivors to replacements, from snapshots to all, or from survivors to the disk.
#
# One function for each order of the agent (`protocol/to_rank.py`); begin with `send_state`.

_REST_LIMIT_S = 2.0
IN_STEP = Reason(
    "state-of-one-rank",
    "its optimizer communicates inside step(), so in the middle of it this rank holds the state of no boundary",
)


def send_state(session: Rank, order: to_rank.SendState, check_overtaken: Callable[[], None]) -> None:
    """Serve this rank's state to those that it repairs, waiting `order.limit_s` for each at most.

    order             says to how many, and where they meet
    check_overtaken   called now and then, and its exception ends the order

    Raises NotRepairableError, TimeoutError, OSError.
    """
    if session.has_collective_steps:
        raise fail_open.NotRepairableError(IN_STEP)
    digest = state_transfer.serve(_place_of(session, order), len(order.to), order.limit_s, check_overtaken)
    session.channel.send(from_rank.StateSent(order.generation, digest))


def fetch_state(session: Rank, order: to_rank.FetchState, check_overtaken: Callable[[], None]) -> None:
    """Load what another rank sends."""
    session.touch(Phase.REPAIRING)
    digest = state_transfer.fetch(_place_of(session, order), order.limit_s, check_overtaken)
    session.channel.send(from_rank.RankRepaired(order.generation, digest))


def send_gradients(session: Rank, order: to_rank.SendGradients, check_overtaken: Callable[[], None]) -> None:
    """Serve the gradients of the step that this rank is about to take; arguments and errors as those of send_state."""
    optimizer = _await_step(session, order, check_overtaken)
    place = _place_of(session, order)
    state_transfer.serve_gradients(place, optimizer, order.receivers, order.limit_s, check_overtaken)


def take_gradients(session: Rank, order: to_rank.TakeGradients, check_overtaken: Callable[[], None]) -> None:
    """Take another rank's gradients of the step that both are about to take; errors as those of fetch_state."""
    optimizer = _await_step(session, order, check_overtaken)
    state_transfer.take_gradients(_place_of(session, order), optimizer, order.limit_s, check_overtaken)
    accelerator.finish_here()  # the main thread steps on another stream
    session[Verifier].look_again(order.boundary)
    taken = f"gradients of step {order.boundary - 1}, taken from rank {order.source}, as some were equal to rounding"
    session.channel.send(from_rank.Compared([taken], []))
    session.channel.send(from_rank.Aligned(order.generation, order.boundary))


def _await_step(
    session: Rank, order: to_rank.SendGradients | to_rank.TakeGradients, check_overtaken: Callable[[], None]
) -> Any:
    """Wait until the main thread waits before the step to the boundary; returns the optimizer that takes it.

    Blocks until it is there, or `check_overtaken` raises. Raises TimeoutError after `order.limit_s`.
    """
    end_s = time.monotonic() + order.limit_s
    while (optimizer := session[Alignment].optimizer_at(session, order.boundary)) is None:
        check_overtaken()
        if time.monotonic() > end_s:
            raise TimeoutError(f"it has not come to optimizer step {order.boundary} within {order.limit_s:.0f} s")
        time.sleep(LOOK_AGAIN_S)
    stages.reached("gradients")
    accelerator.synchronize()
    return optimizer


def _place_of(
    session: Rank, order: to_rank.SendState | to_rank.FetchState | to_rank.SendGradients | to_rank.TakeGradients
) -> state_transfer.MeetingPlace:
    """Where the source and the receivers meet."""
    if not session.address:
        directory, name = os.path.split(os.path.join(session.run_dir, order.name))
        return state_transfer.InDirectory(directory, name, lambda text: session.channel.send(from_rank.Note(text)))
    return state_transfer.OverNodes(session[Exchange], order.generation, order.name, order.limit_s)


def load_mirror(session: Rank, order: to_rank.LoadMirror) -> None:
    """Load the lost rank's mirror."""
    session.touch(Phase.REPAIRING)
    stages.reached("transfer")
    if order.path:
        mirror.load(order.path)
    else:
        sharded.forget_gathered()
    digest = "" if session.has_collective_steps else replicated.digest()  # the others have none, in mid-step
    session.channel.send(from_rank.RankRepaired(order.generation, digest))


def load_state(session: Rank, order: to_rank.LoadState) -> None:
    """Load a snapshot or a checkpoint."""
    session.touch(Phase.REPAIRING)
    stages.reached("transfer")
    differing = shares.Differing(order.owners, session.rank, ())
    shares.load(order.header, list(order.files), differing)
    session.channel.send(from_rank.RankRepaired(order.generation, replicated.digest()))


def dump(session: Rank, order: to_rank.Dump) -> None:
    """Write this rank's share of the survivors' state; the main thread waits meanwhile.

    That of a rank alone first comes to its next commit, within _REST_LIMIT_S: what it prints by then is saved with it.
    """
    stages.reached("persist")
    if session.is_alone():
        session.board.wait_for_change(session.rank, Field.RECORDED, session.applied, _REST_LIMIT_S)
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    share, mirrored, why_not = None, {}, ""
    try:
        if session.has_collective_steps and signal_handlers.Now.is_stepping:
            raise fail_open.NotRepairableError(IN_STEP)
        differing = shares.Differing(order.owners, session.rank, order.writers)
        share = shares.write(order.path, order.share, order.of, main, differing)
        mirrored = {lost.rank: mirror_slots.write(lost, order.owners, order.writers) for lost in order.mirrors}
    except (fail_open.NotRepairableError, ValueError) as error:  # only the checkpoint is lost
        why_not = f"rank {session.rank}: {error}"
    except OSError as error:
        why_not = f"rank {session.rank}: {cannot_write(error, Path(order.path).parent.parent)}"
    is_handled = _handles_end_signals()
    session.channel.send(Dumped(order.generation, why_not, is_handled, share, mirrored))


def _handles_end_signals() -> bool:
    """Whether the script has a handler of its own for a signal that ends jobs."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    return any(callable(handler) and handler is not signal.default_int_handler for handler in handlers)


# Resume: connect in the new generation, issue the journal again, and let the main thread continue.
#
# Begin with `resume`, for a survivor; a replacement whose replay has ended goes live (`go_live`).


def resume(session: Rank, order: to_rank.Resume, check_overtaken: Callable[[], None]) -> None:
    """Issue the journal again, thaw, and wait until all of it has completed; a replacement goes live.

    check_overtaken   called now and then; its exception ends the order
    """
    stages.reached("rebuild")
    if isinstance(session.mode, ReplayRun):
        go_live(session, session.mode, order)
        return
    note_agreed(session, order)
    generations.issue_again(session, lambda: session.channel.send(from_rank.RankRebuilt(session.generation)))
    session[Verifier].prove_from(session.applied)
    session.go_on()
    stages.reached("thaw")
    generations.complete(session, check_overtaken)
    session.channel.send(from_rank.RankReissued(session.generation))


def go_live(session: Rank, replay: ReplayRun, order: to_rank.Resume) -> None:
    """The replay has ended, and the tensors are loaded: connect, and let the main thread continue.

    replay   of this rank, whose main thread waits at the boundary
    order    of the agent, for this generation
    """
    for group in () if replay.given else groups_of(session):
        group.links.connect_in(session.generation)
        group.links.is_joined = True
    session.channel.send(from_rank.RankRebuilt(session.generation))
    note_agreed(session, order)
    session[Verifier].prove_from(replay.boundary)
    if replay.is_alone and not replay.given:
        Proof.begin(session, replay.boundary, is_of_all=not replay.is_joining)
    # Ranks that have all gone back have no journal of others to keep to, only what they have left themselves; and a
    # rank that was lost had perhaps gone further than the others.
    expect(session, order)
    replay.live.set()


def expect(session: Rank, order: to_rank.Resume) -> None:
    """This replacement must issue what the survivors have issued since the boundary."""
    session.expected = Expected(session.channel, session.generation, order.expected, session.proof is None)


def note_agreed(session: Rank, order: to_rank.Resume) -> None:
    """What all ranks know alike of the operations since the boundary."""
    session[Journal].note_agreed(
        {(name, number): rank for name, number, rank in order.sources}, order.received, order.settled
    )
    session[Alignment].begin(session, order.generation, order.takes_from)
