"""What happens at each optimizer step: the record, the commit, the step.

Before `Optimizer.step` number N runs, the rank writes its record of boundary N and then waits until every rank of the
node has written its own. This commit is what makes replacing a rank simple: no rank changes its weights before all have
left the record that a replacement would need, so when a rank is lost all survivors stand at one boundary, and the lost
rank has a record of it. The ranks have just met in the step's last all-reduce, so the wait is short.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import xxhash

from ttprun.board import Board, Field, Phase
from ttprun.rank import entropy, faults, files, gradients, loaders, loops, random_state, rewrite, values
from ttprun.rank.expected import report_mismatch
from ttprun.rank.frames import place, user_frames
from ttprun.rank.record import Record
from ttprun.rank.recorder import RecordTooLargeError
from ttprun.rank.session import Session, current
from ttprun.rank.tensor_bytes import bytes_of

_optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
_wrapped_models: list[weakref.ref[Any]] = []
_running: torch.optim.Optimizer | None = None
_LOOK_AGAIN_S = 1.0
_cuda: Any = torch.cuda  # whose functions have no types


def wrap_optimizer_init(original: Any) -> Any:
    """Optimizer.__init__: know the optimizers in the order in which they were made, which is the same in every rank."""

    def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _optimizers.append(weakref.ref(self))

    return init


def wrap_ddp_init(original: Any) -> Any:
    """DistributedDataParallel.__init__: know the wrapped models, for their buckets' order."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _wrapped_models.append(weakref.ref(self))

    return init


def wrap_join(original: Any) -> Any:
    """Join.__enter__, by way of DistributedDataParallel.join: a rank without data left steps no optimizer any more."""

    def enter(self: Any) -> Any:
        session = current()
        if session is not None and self._enable and session.world_size > 1:
            session.give_up_protection("with join() the ranks do not step together")
        return original(self)

    return enter


def forget() -> None:
    """The run of the script is over."""
    global _running, _stepped
    _optimizers.clear()
    _wrapped_models.clear()
    _running = None
    _stepped = (None, {}, [])
    _samples.clear()


def optimizers() -> list[torch.optim.Optimizer]:
    """All living optimizers, in the order in which they were made."""
    return [found for ref in _optimizers if (found := ref()) is not None]


def wrapped_models() -> list[Any]:
    """All living DistributedDataParallel modules, in the order in which they were made."""
    return [found for ref in _wrapped_models if (found := ref()) is not None]


_stepped: tuple[Any, dict[int, int], list[torch.Tensor]] = (None, {}, [])
# Of each living optimizer: how many parameters, and how many tensors of state, `stepped_tensors` holds of it.
_counts: list[list[int]] = []


def stepped_storages(living: list[torch.optim.Optimizer]) -> dict[int, int]:
    """Data pointers of the storages that the living optimizers update, each with its place in `stepped_tensors`.

    The very same object as before as long as nothing shows that they have changed.
    """
    global _stepped, _counts
    seen = [entry for optimizer in living for entry in _signature(optimizer)]
    if seen != _stepped[0]:
        _samples.clear()
        found: dict[int, int] = {}
        for index, tensor in enumerate(stepped_tensors()):
            found.setdefault(tensor.untyped_storage().data_ptr(), index)
        _stepped = (seen, found, list(_weights()))
        _counts = list(map(_count, living))
    return _stepped[1]


def weights() -> list[torch.Tensor]:
    """The parameters of all optimizers, as they were when they were asked for their storages last."""
    if _stepped[0] is None:
        stepped_storages(optimizers())
    return _stepped[2]


def stepped_tensors() -> list[torch.Tensor]:
    """What the optimizers update, in an order that is the same in every rank: parameters, and the optimizers' state."""
    return [tensor for optimizer in optimizers() for tensor in _tensors(optimizer)]


def _signature(optimizer: torch.optim.Optimizer) -> list[int]:
    """Changes when parameters are added or when the state is loaded anew: counts, and where the ends of them lie."""
    seen = [len(optimizer.state)]
    for group in optimizer.param_groups:
        parameters = group["params"]
        seen.append(len(parameters))
        for parameter in (*parameters[:1], *parameters[-1:]):
            seen.append(parameter.data_ptr())
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        seen.append(value.data_ptr())
    return seen


def _count(optimizer: torch.optim.Optimizer) -> list[int]:
    parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    return [parameters, sum(1 for _ in _tensors(optimizer)) - parameters]


def _tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _weights() -> Iterator[torch.Tensor]:
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            yield from group["params"]


def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Global pre-hook of Optimizer.step."""
    global _running
    session = current()
    if session is None or (_running is not None and _running is not optimizer):
        return  # a step inside another optimizer's step belongs to that one
    _running = optimizer
    if session.replay is not None:
        session.replay.before_step(sys._getframe(1))
        return
    faults.reached("before_step")
    if session.expected is not None and gradients.are_carried_over(optimizer):
        report_mismatch(
            session.channel,
            session.generation,
            "the script carries gradients across an optimizer step, and those of the lost rank are not known "
            "(or they have become NaN)",
        )
    if session.is_recorded():
        for entry in session.journal.unfinished():
            session.journal.wait(entry)
        boundary = session.applied + 1
        session.verifier.look(boundary, _weights())
        if _write_record(session, boundary, sys._getframe(1)):
            commit(session, boundary)
    session.journal.clear()
    with session.changed:
        session.is_applying = True
    session.updates.begin()
    session.touch(Phase.STEPPING)
    faults.reached("in_step")


def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Global post-hook of Optimizer.step: the boundary has been reached."""
    global _running
    session = current()
    if session is None or _running is not optimizer:
        return
    _running = None
    if session.replay is not None:
        session.replay.after_step()
        return
    faults.reached_step_end()
    session.updates.end()
    if session.is_recorded():
        session.kept_weights.note(session.applied + 1)
    if session.snapshots.is_due(session.applied + 1):
        session.snapshots.take(session, session.applied + 1, sys._getframe(1))
    pass_boundary(session)
    session.verifier.step_aside_if_odd()
    faults.reached("after_step")


def pass_boundary(session: Session) -> None:
    """The optimizer step has run to its end."""
    with session.changed:
        session.applied += 1
        session.is_applying = False
        session.board.set(session.local_rank, Field.APPLIED, session.applied)
        session.board.set(session.local_rank, Field.MEETINGS, 0)
        session.changed.notify_all()
    session.touch(Phase.COMPUTING)
    if not session.has_stepped:
        session.has_stepped = True
        session.tell_modules()
        session.snapshots.tell_size(session.channel)


def _write_record(session: Session, boundary: int, frame: FrameType) -> bool:
    try:
        why_not = _why_not_recorded(is_first=not session.has_stepped)
        if why_not:
            session.give_up_protection(why_not)
        else:
            head, blobs = record_of(session, boundary, frame)
            session.recorder.write(boundary, head, blobs)
            if boundary == 1:
                session.recorder.write_first(boundary, head, blobs)
    except RecordTooLargeError as error:
        session.give_up_protection(str(error))
    except Exception as error:  # a script that we cannot record must go on as under torchrun
        session.give_up_protection(f"the state of boundary {boundary} cannot be recorded: {error!r}")
    session.board.set(session.local_rank, Field.LINES_OUT, 0)
    session.board.set(session.local_rank, Field.LINES_ERR, 0)
    session.snapshots.agree(session.channel, boundary)
    session.board.announce(session.local_rank, Field.RECORDED, boundary)
    return not session.unprotected


def _why_not_recorded(is_first: bool) -> str:
    """What of this rank's state could not come from a record and another rank; "" if nothing."""
    if _cuda.is_initialized():
        return "what a script keeps on a GPU is not recorded yet"
    sharded = sys.modules.get("torch.distributed.tensor") if is_first else None
    if sharded is not None and any(isinstance(weight, sharded.DTensor) for weight in _weights()):
        return (
            "its parameters are sharded over the ranks (FSDP or tensor parallel), so that no other rank holds what a "
            "lost one held"
        )
    return ""


def record_of(session: Session, boundary: int, frame: FrameType) -> tuple[bytes, list[torch.Tensor]]:
    """The record of a boundary: (packed plain part, tensors to write behind it)."""
    record, blobs = describe(session, boundary, frame)
    return values.pack(record), blobs


def describe(session: Session, boundary: int, frame: FrameType) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The same before it is packed."""
    frames = user_frames(frame)
    living = optimizers()
    scopes: list[dict[str, Any]] = []
    active: list[list[loops.Loop]] = []
    around: list[loops.Loop] = []
    unfollowed: list[loops.Site] = []
    is_followed = True
    for user_frame in frames:
        code, scope = user_frame.f_code, user_frame.f_locals
        known, unknown = loops.under_way(code, scope, user_frame.f_lineno)
        scopes.append(scope)
        active.append(known)
        around += known
        unfollowed += unknown
        is_followed = is_followed and not unknown and code.co_filename in rewrite.followed_files
    on_stack = set(map(id, scopes))
    loops.note_steps(around, unfollowed)
    loaders.note_boundary()
    values.begin_boundary()
    storages, mark = stepped_storages(living), weights_sample(boundary, living)
    session.kept_weights.compare(mark)
    snapshot = values.Snapshot(storages, [id(loop.over) for loop in around if loop.over is not None])
    record = {
        "boundary": boundary,
        "place": place(frames),
        "unfollowed": not is_followed,
        "variables": [
            snapshot.variables(scope, (id(user_frame.f_code), depth))
            for depth, (user_frame, scope) in enumerate(zip(frames, scopes, strict=True))
        ],
        "loops": [[snapshot.loop(loop) for loop in of_frame] for of_frame in active],
        "generator_loops": snapshot.generator_loops,
        "modules": {
            name: snapshot.variables(vars(module), name)
            for name, module in files.user_modules()
            if id(module.__dict__) not in on_stack
        },
        "optimizers": [snapshot.node(optimizer, 0) for optimizer in living],
        "stepped": _counts,
        "rng": random_state.capture(),
        "loaders": loaders.records(),
        "results": session.results.begin_step(boundary),
        "rebuilt": [bool(model._has_rebuilt_buckets) for model in wrapped_models()],
        "files": files.positions(),
        "has_steps": [site.key for site in loops.sites if site.has_steps],
        "lines": [
            session.board.get(session.local_rank, Field.LINES_OUT),
            session.board.get(session.local_rank, Field.LINES_ERR),
        ],
        "weights": mark,
        "kept": session.kept_weights.is_kept,
        "entropy": entropy.drawn_since_last_asked(),
        "blobs": [blob.nbytes for blob in snapshot.blobs],
        "is_straight": False,
    }
    return record, snapshot.blobs


def look(frame: FrameType) -> values.Tree:
    """The user's variables between two boundaries, in the form of a record; nothing is noted of them."""
    frames = user_frames(frame)
    scopes = [user_frame.f_locals for user_frame in frames]
    around = [loop for user_frame in frames for loop in loops.of_frame(user_frame)]
    snapshot = values.Snapshot(
        stepped_storages(optimizers()), [id(loop.over) for loop in around if loop.over is not None]
    )
    on_stack = set(map(id, scopes))
    record = {
        "place": place(frames),
        "variables": [snapshot.variables(scope) for scope in scopes],
        "loops": [],
        "modules": {
            name: snapshot.variables(vars(module))
            for name, module in files.user_modules()
            if id(module.__dict__) not in on_stack
        },
        "optimizers": [],
        "stepped": _counts,
        "loaders": [],
        "blobs": [blob.nbytes for blob in snapshot.blobs],
    }
    return tree_of(values.pack(record), snapshot.blobs)


def tree_of(packed: bytes, tensors: list[torch.Tensor]) -> values.Tree:
    """A record as another process would read it."""
    found = Record.of(packed, b"".join(map(bytes, map(bytes_of, tensors))))
    return values.Tree(found.fields, found.blobs)


_samples: dict[tuple[int, int], memoryview] = {}
_SAMPLE_BYTES = 4096


def weights_sample(boundary: int, living: list[torch.optim.Optimizer]) -> bytes:
    """A hash of the beginning of one parameter, another one at each boundary: do ranks hold the same weights?"""
    groups = [group["params"] for optimizer in living for group in optimizer.param_groups]
    count = sum(map(len, groups))
    if not count:
        return b""
    at = boundary % count
    for parameters in groups:
        if at < len(parameters):
            break
        at -= len(parameters)
    parameter = parameters[at]
    key = (id(parameter), parameter.data_ptr())  # the same memory as when it was first asked for
    sample = _samples.get(key)
    if sample is None or not parameter.is_contiguous():
        sample = bytes_of(parameter.detach())[:_SAMPLE_BYTES]
        if parameter.is_contiguous() and parameter.device.type == "cpu":
            _samples[key] = sample
    return xxhash.xxh3_64_digest(sample)


def commit(
    session: Session, boundary: int, held: Callable[[], None] = lambda: None, look_again_s: float = _LOOK_AGAIN_S
) -> None:
    """Wait until every rank of the node has recorded the boundary.

    held   called now and then while a recovery holds this rank back; what it raises ends the wait

    The wait has no deadline of its own: a rank that is late holds up its peers in the next collective anyhow. But if it
    stands in a collective itself, it waits for us: the ranks do not step together, and protection ends.
    """
    session.touch(Phase.COMMITTING)
    while True:
        _wait_for_records(session, boundary, held, look_again_s)
        with session.changed:
            if session.is_holding and session.settle_at < boundary and not session.unprotected:
                held()
                session.changed.wait(look_again_s)
            elif _is_recorded_by_all(session, boundary):
                session.is_applying = True
                return


def _wait_for_records(session: Session, boundary: int, held: Callable[[], None], look_again_s: float) -> None:
    board = session.board
    stuck_since = 0.0
    for row in range(board.n_ranks):
        while (recorded := board.get(row, Field.RECORDED)) < boundary:
            if session.unprotected or session.settle_at >= boundary:
                return
            if session.is_holding:
                held()
            at, pulse = _where(board, row), board.get(row, Field.PULSE_NS)
            board.wait_for_change(row, Field.RECORDED, recorded, look_again_s)
            is_alive = board.get(row, Field.PULSE_NS) != pulse
            is_working = at[0] not in (Phase.COLLECTIVE, Phase.WAITING) or _where(board, row) != at
            if is_working or session.is_holding:
                stuck_since = 0.0
            elif not is_alive:
                continue  # a stopped process says nothing of where it stands; whoever looks for hangs will find it
            elif not stuck_since:
                stuck_since = time.monotonic()
            elif time.monotonic() - stuck_since > session.options["commit_timeout_s"]:
                session.give_up_protection(
                    f"rank {session.rank} steps its optimizer (step {boundary}) while local rank {row} waits in a "
                    "collective: the ranks do not step together"
                )


def _where(board: Board, row: int) -> tuple[int, int, int]:
    """Where a rank's main thread is: phase, collectives, and heartbeats, which move as long as it runs bytecode.

    DDP waits for its collectives without telling us, so that the phase stays what it was when they were issued. Who
    waits for them in our own loop runs that loop's bytecode only.
    """
    phase = board.get(row, Field.PHASE)
    beats = 0 if phase == Phase.WAITING else board.get(row, Field.MAIN_BEATS)
    return phase, board.get(row, Field.COLLECTIVES), beats


def _is_recorded_by_all(session: Session, boundary: int) -> bool:
    board = session.board
    if session.unprotected or session.settle_at >= boundary:
        return True
    return all(board.get(row, Field.RECORDED) >= boundary for row in range(board.n_ranks))
