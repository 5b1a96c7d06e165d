"""Repair: state goes from survivors to replacements, from snapshots to all, or from survivors to the disk.

One function for each order of the agent (`protocol/to_rank.py`); begin with `send_state`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ttprun.device import accelerator
from ttprun.groups.connection import Exchange
from ttprun.introspect import fail_open, moments, signal_handlers
from ttprun.protocol import from_rank, to_rank
from ttprun.protocol.board import Phase
from ttprun.protocol.reason import Reason
from ttprun.protocol.snapshot_messages import Dumped
from ttprun.rank.checks.alignment import Alignment
from ttprun.rank.checks.verification import Verifier
from ttprun.rank.session import Session
from ttprun.state.files import cannot_write
from ttprun.tensors import checkpoint_shards, mirror, mirror_slots, replicated, sharded, state_transfer

_LOOK_AGAIN_S = 0.05
IN_STEP = Reason(
    "state-of-one-rank",
    "its optimizer communicates inside step(), so in the middle of it this rank holds the state of no boundary",
)


def send_state(session: Session, order: to_rank.SendState, check_overtaken: Callable[[], None]) -> None:
    """Serve this rank's state to those that it repairs, waiting `order.limit_s` for each at most.

    order             says to how many, and where they meet
    check_overtaken   called now and then, and its exception ends the order

    Raises NotRepairableError, TimeoutError, OSError.
    """
    moments.reached("transfer")
    if session.has_collective_steps:
        raise fail_open.NotRepairableError(IN_STEP)
    digest = state_transfer.serve(_place_of(session, order), len(order.to), order.limit_s, check_overtaken)
    session.channel.send(from_rank.StateSent(order.generation, digest))


def fetch_state(session: Session, order: to_rank.FetchState, check_overtaken: Callable[[], None]) -> None:
    """Load what another rank sends."""
    session.touch(Phase.REPAIRING)
    moments.reached("transfer")
    digest = state_transfer.fetch(_place_of(session, order), order.limit_s, check_overtaken)
    session.channel.send(from_rank.RankRepaired(order.generation, digest))


def send_gradients(session: Session, order: to_rank.SendGradients, check_overtaken: Callable[[], None]) -> None:
    """Serve the gradients of the step that this rank is about to take; arguments and errors as those of send_state."""
    optimizer = _await_step(session, order, check_overtaken)
    place = _place_of(session, order)
    state_transfer.serve_gradients(place, optimizer, order.receivers, order.limit_s, check_overtaken)


def take_gradients(session: Session, order: to_rank.TakeGradients, check_overtaken: Callable[[], None]) -> None:
    """Take another rank's gradients of the step that both are about to take; errors as those of fetch_state."""
    optimizer = _await_step(session, order, check_overtaken)
    state_transfer.take_gradients(_place_of(session, order), optimizer, order.limit_s, check_overtaken)
    accelerator.synchronize()  # the main thread steps on another stream
    session[Verifier].look_again(order.boundary)
    taken = f"gradients of step {order.boundary - 1}, taken from rank {order.source}, as some were equal to rounding"
    session.channel.send(from_rank.Compared([taken], []))
    session.channel.send(from_rank.Aligned(order.generation, order.boundary))


def _await_step(
    session: Session, order: to_rank.SendGradients | to_rank.TakeGradients, check_overtaken: Callable[[], None]
) -> Any:
    """Wait until the main thread waits before the step to the boundary; returns the optimizer that takes it.

    Blocks until it is there, or `check_overtaken` raises. Raises TimeoutError after `order.limit_s`.
    """
    end_s = time.monotonic() + order.limit_s
    while (optimizer := session[Alignment].optimizer_at(session, order.boundary)) is None:
        check_overtaken()
        if time.monotonic() > end_s:
            raise TimeoutError(f"it has not come to optimizer step {order.boundary} within {order.limit_s:.0f} s")
        time.sleep(_LOOK_AGAIN_S)
    moments.reached("gradients")
    accelerator.synchronize()
    return optimizer


def _place_of(
    session: Session, order: to_rank.SendState | to_rank.FetchState | to_rank.SendGradients | to_rank.TakeGradients
) -> state_transfer.MeetingPlace:
    """Where the source and the receivers meet."""
    if not session.address:
        return state_transfer.InDirectory(*os.path.split(os.path.join(session.run_dir, order.name)))
    return state_transfer.OverNodes(session[Exchange], order.generation, order.name, order.limit_s)


def load_mirror(session: Session, order: to_rank.LoadMirror) -> None:
    """Load the lost rank's mirror."""
    session.touch(Phase.REPAIRING)
    moments.reached("transfer")
    if order.path:
        mirror.load(order.path)
    else:
        sharded.forget_gathered()
    digest = "" if session.has_collective_steps else replicated.digest()  # the others have none, in mid-step
    session.channel.send(from_rank.RankRepaired(order.generation, digest))


def load_state(session: Session, order: to_rank.LoadState) -> None:
    """Load a snapshot or a checkpoint."""
    session.touch(Phase.REPAIRING)
    moments.reached("transfer")
    differing = checkpoint_shards.Differing(order.owners, session.rank, ())
    checkpoint_shards.load(order.header, list(order.files), differing)
    session.channel.send(from_rank.RankRepaired(order.generation, replicated.digest()))


def dump(session: Session, order: to_rank.Dump) -> None:
    """Write this rank's share of the survivors' state; the main thread waits meanwhile."""
    moments.reached("persist")
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    share, mirrored, why_not = None, {}, ""
    try:
        if session.has_collective_steps and signal_handlers.Now.is_stepping:
            raise fail_open.NotRepairableError(IN_STEP)
        differing = checkpoint_shards.Differing(order.owners, session.rank, order.writers)
        share = checkpoint_shards.write(order.path, order.share, order.of, main, differing)
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
