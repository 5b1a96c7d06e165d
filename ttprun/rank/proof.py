"""A replacement is compared with the lost rank: the collectives that it issues, and all that its first live step uses.

The lost rank has noted the batches, losses and inputs of collectives of that step (evidence.py). Its replacement runs
the step live, and compares each of these, bit for bit, before it is used. A difference means that some state is not
recorded: it is reported to the agent, and the next rung is tried. What was equal is reported too, and what could not be
compared: an incident claims no more than that.

Where arithmetic is not reproducible, losses and inputs may differ by rounding, and are named as equal to rounding.
`Proof._may_round` says where. On a CPU with one thread that has to be shown: the rank is replaced once more, and if the
second replacement comes to other bits than the first, which began with the same state, its kernels are to blame and not
its state. Whose results count then: groups/collectives.py, and `Alignment`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ttprun.capture.records.evidence import Noted, Place
from ttprun.capture.records.recorder import Recorder
from ttprun.device import accelerator
from ttprun.groups import device_link
from ttprun.groups.journal import EndedError, Journal
from ttprun.introspect import fail_open, host_copies
from ttprun.introspect.current_rank import BATCH, INPUT, LOSS, Rank, current
from ttprun.introspect.tensor_bytes import Unseen, comparable, is_close
from ttprun.protocol import from_rank, rank_events
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.from_rank import CARRIED
from ttprun.protocol.reason import Reason
from ttprun.tensors import gradients, optimizer_registry

if TYPE_CHECKING:
    from ttprun.groups.operations import Entry
    from ttprun.protocol.channel import Channel

_KILL_LIMIT_S = 60.0


class MismatchError(RuntimeError):
    """The replacement does not repeat the lost rank."""

    is_meant_for_script = True


class Expected:
    """The survivors' collectives by group, oldest first; empty once the replacement has issued them all.

    is_proved   False: that is reported only once the step has been compared with what the lost rank has left of it
    """

    def __init__(
        self, channel: Channel, generation: int, by_group: dict[str, list[str]], is_proved: bool = True
    ) -> None:
        self._channel = channel
        self._generation = generation
        self._is_proved = is_proved
        self._left = {name: list(reversed(signatures)) for name, signatures in by_group.items() if signatures}
        carried = {name: len(self._left.pop(name)) for name in list(self._left) if name.startswith(CARRIED)}
        self._carried = Counter({name.removeprefix(CARRIED): count for name, count in carried.items()})
        self._report_if_done()

    def take_carried(self, entry: Entry) -> bool:
        """Whether survivors' threads wait for this thread's own operation since before the boundary."""
        self._carried[entry.sequence] -= 1
        return self._carried[entry.sequence] >= 0

    def awaits(self, entry: Entry) -> bool:
        """Whether survivors have issued more in an operation's group since the boundary."""
        return entry.sequence in self._left

    def check(self, entry: Entry) -> None:
        """Compare a collective that is about to be issued. Raises MismatchError, after reporting it to the agent."""
        awaited = self._left.get(entry.sequence)
        if not awaited or entry.is_carried:
            return
        expected = awaited.pop()
        if expected != entry.signature:
            report_mismatch(
                self._channel,
                self._generation,
                Reason(
                    "other-collective",
                    f"the replacement issues '{entry.signature.strip()}' where the survivors have '{expected.strip()}'",
                ),
            )
        if not awaited:
            del self._left[entry.sequence]
            self._report_if_done()

    def note_proved(self) -> None:
        """The comparison with the lost rank is over."""
        if not self._is_proved:
            self._is_proved = True
            self._report_if_done()

    def _report_if_done(self) -> None:
        if not self._left and self._is_proved:
            self._channel.send(from_rank.RankReissued(self._generation))


def report_mismatch(
    channel: Channel, generation: int, reason: Reason, is_contradiction: bool = True, is_near: bool = False
) -> None:
    """Report why this rank must not continue, and wait until the agent kills the process, _KILL_LIMIT_S at most.

    generation                  the session's
    reason                      why
    is_contradiction, is_near   as in rank_events.MismatchFound

    Raises MismatchError, if it has not been killed by then.
    """
    channel.send(rank_events.MismatchFound(generation, reason, is_contradiction=is_contradiction, is_near=is_near))
    threading.Event().wait(_KILL_LIMIT_S)
    raise MismatchError(reason)


# After a repair in which something was equal to rounding alone: the gradients of the next step become one rank's.
#
# Survivors may have used the result of a collective that the others get anew, with the replacement's input in it.
# Whoever still has such a result gives it (groups/collectives.py); where it is lost, the sums of those that had it and
# of those that had not differ by rounding. No rank steps before all have recorded the boundary, so before it records,
# the replacement asks the agent to have the gradients passed on: from a survivor to itself, and to survivors that had
# not got as far. The weights are equal then, and so is all that the step makes of them.

_LOOK_AGAIN_S = 0.05
_LIMIT_S = 600.0  # longer than all that the agent waits for, which ends in another recovery


class Alignment:
    """From whom this rank takes gradients, and whether it must.

    source      rank whose results of the step count, by the newest order to resume; None: this rank's do too
    is_needed   this rank is a replacement, and something of its step was equal to the lost rank's to rounding alone
    """

    def __init__(self) -> None:
        self.source: int | None = None
        self.is_needed = False
        self._generation = -1  # of the order that has named the source
        self._stepping: tuple[int, Any] = (-1, None)  # boundary, optimizer (weak) about to step to it
        self._waits_at = -1
        self._last = -1  # boundary
        self._aligned_at = -1  # boundary

    def begin(self, session: Rank, generation: int, source: int | None) -> None:
        """All resume; of the step the results of `source` count."""
        with session.changed:
            self.source, self._generation, self._aligned_at = source, generation, -1
            session.changed.notify_all()

    def note_aligned(self, session: Rank, boundary: int) -> None:
        """All that were to take gradients of the step before this boundary have them."""
        with session.changed:
            self._aligned_at = boundary
            session.changed.notify_all()

    def arrive(self, session: Rank, boundary: int, optimizer: Any) -> None:
        """The optimizer is about to step to the boundary, which is not recorded yet.

        Blocks a replacement that needs other gradients until it has them, through any number of recoveries. One
        backward pass may have made the gradients of several optimizers, which step one after the other.

        Raises EndedError if this process is ordered to end meanwhile, MismatchError if no answer has come in _LIMIT_S.
        """
        self._stepping = boundary, weakref.ref(optimizer)
        if not self.is_needed:
            return
        if self._last < 0:
            self._last = boundary + max(1, len(optimizer_registry.optimizers())) - 1
        if boundary > self._last:
            self.is_needed, self._last = False, -1
            return
        asked, asked_at_s = -1, time.monotonic()
        self._waits_at = boundary
        try:
            while self.source is not None and self._aligned_at < boundary and not session.unprotected:
                if session[Journal].is_ended:
                    raise EndedError
                session.touch(Phase.REPAIRING)
                if self._generation not in (asked, -1) and self._generation == session.generation:
                    asked, asked_at_s = self._generation, time.monotonic()
                    session.channel.send(from_rank.Unaligned(asked, boundary))
                with session.changed:
                    if self._aligned_at < boundary:
                        session.changed.wait(_LOOK_AGAIN_S)
                if time.monotonic() - asked_at_s > _LIMIT_S:
                    why = f"the gradients of rank {self.source}, whose results count, have not come in {_LIMIT_S:.0f} s"
                    report_mismatch(session.channel, session.generation, Reason("gradients-late", why))
        finally:
            self._waits_at = -1

    def optimizer_at(self, session: Rank, boundary: int) -> Any:
        """The optimizer about to step to the boundary, if the main thread waits there; else None."""
        at, optimizer = self._stepping
        if at != boundary:
            return None
        has_recorded = session.board.get(session.rank, Field.RECORDED) >= boundary
        return optimizer() if has_recorded or self._waits_at == boundary else None


MEASURED_ELEMENTS = 16
# Replacements that come to the same bits, and not to the lost rank's, before that is taken for a contradiction. Noise
# may be of one bit, which two of three processes share.
MOST_TRIES = 6
# Names of the kinds: (singular, plural)
_NAMES = {
    BATCH: ("batch of a DataLoader", "batches of DataLoaders"),
    LOSS: ("loss", "losses"),
    INPUT: ("input of a collective", "inputs of collectives"),
}
_going_backward = 0
_gone_backward_at = -1  # the newest step in which a backward pass has begun


class Proof:
    """The comparison in the step in which a rank was lost; its replacement goes live at boundary `step`.

    is_of_all   all ranks go back: what differs by rounding is named, as no survivor has a result that it must fit
    """

    def __init__(self, session: Rank, step: int, is_of_all: bool = False) -> None:
        self._session = session
        self._step = step
        self._is_of_all = is_of_all
        self._evidence = session[Recorder].evidence
        self._left = self._evidence.left(step)
        self._equal: Counter[int] = Counter()
        self._close: Counter[int] = Counter()
        self._why_close = ""
        self._not_proved: list[str] = []

    @classmethod
    def begin(cls, session: Rank, step: int, is_of_all: bool = False) -> None:
        """Compare from this boundary on, unless the lost rank has left nothing: that is reported.

        step        the boundary at which the replacement goes live
        is_of_all   as in the class
        """
        proof = cls(session, step, is_of_all)
        if proof._left:
            session.proof = proof
        else:
            proof.end()

    def compare(self, place: Place, noted: Noted, tensors: Sequence[torch.Tensor], what: str) -> bool:
        """Compare what this rank is about to use. Raises MismatchError, after reporting it to the agent.

        place, noted   as `Evidence.note` returns them
        tensors        that were noted: dense, any dtype, shape and device; at least one
        what           which one it is, for a person
        returns        whether it is equal to rounding alone
        """
        lost = self._left.pop(place, None)
        if lost is None:
            return False
        kind, _, number = place
        which = f"{_NAMES[kind][0]} number {number + 1} of step {self._step}"
        which += f" ({what})" if what else ""
        if any(digest != noted.digest for digest in self._evidence.tried(self._step, place)):
            self._evidence.note_noise()
        is_near = lost != noted and kind != BATCH and len({tensor.dtype for tensor in tensors}) <= 1
        is_near = is_near and is_close(lost.sample, noted.sample, tensors[0].dtype)
        why = self._may_round() if is_near else ""
        if lost == noted:
            self._equal[kind] += 1
        elif why:
            self._close[kind] += 1
            self._why_close = why
            self._session[Alignment].is_needed = not self._is_of_all
        elif kind == INPUT and is_measured(tensors):
            self._not_proved.append(
                f"{which} differs from the lost rank's; it is small and not a gradient: perhaps a measured time"
            )
        elif is_near and not _must_be_equal(self._session):
            self._refuse_unless_noise(place, noted, f"{which} differs from the lost rank's by rounding alone")
        elif kind == INPUT and gradients.are_of_replay(tensors):
            report_mismatch(self._session.channel, self._session.generation, gradients.CARRIED)
        else:
            self._refuse(f"{which} differs from the lost rank's", "other-batch" if kind == BATCH else "other-loss")
        if not self._left:
            self.end()
        return bool(why)

    def _may_round(self) -> str:
        """Why losses and inputs may differ from the lost rank's by rounding; "" if they may not."""
        if self._is_of_all:
            return "no survivor has a result that it must fit"
        if _must_be_equal(self._session):
            return ""
        device = optimizer_registry.device_in_use()
        if device is not None:
            return f"kernels of {device.type} need not be reproducible"
        if torch.get_num_threads() > 1:
            return "kernels run on several threads"
        return "the same state has given other bits in another process" if self._evidence.is_noisy else ""

    def _refuse_unless_noise(self, place: Place, noted: Noted, difference: str) -> None:
        """One thread's arithmetic is reproducible unless another replacement comes to something else than this one."""
        times = len(self._evidence.tried(self._step, place))
        if times == MOST_TRIES or not self._evidence.note_tried(self._step, place, noted):
            self._refuse(f"{difference}, and {times} other replacements have come to the same", "equal-to-rounding")
        self._session.proof = None
        why = Reason("equal-to-rounding", f"to see whether this is reproducible: {difference}")
        report_mismatch(self._session.channel, self._session.generation, why, is_near=True)

    def end_step(self) -> None:
        """The step is over. Raises MismatchError if the lost rank had noted more in it."""
        if self._left:
            kinds = Counter(kind for kind, _, _ in self._left)
            missing = ", ".join(_counted(kind, count) for kind, count in sorted(kinds.items()))
            difference = f"the replacement did not reach what the lost rank had in step {self._step}: {missing}"
            self._refuse(difference, "other-place")

    def end(self, why_not: str = "") -> None:
        """Report the result: everything that the lost rank had noted has been compared, or nothing more can be.

        why_not   why not; "" if it has
        """
        if why_not:
            self._not_proved.append(why_not)
        self._session.proof = None
        if self._session.expected is not None:
            self._session.expected.note_proved()
        compared = self._equal + self._close
        at = f"in step {self._step}"
        equal = [f"{_counted(kind, self._equal[kind])} {at}{self._near(kind)}" for kind in sorted(compared)]
        if self._step and not (compared[LOSS] or compared[INPUT]):
            self._not_proved.append(f"the lost rank had left no loss and no input of a collective of step {self._step}")
        report(self._session, equal, self._not_proved)

    def _near(self, kind: int) -> str:
        """What of this kind was equal to rounding alone, and why that is enough."""
        count = self._close[kind]
        return f", {count} equal to rounding ({self._why_close})" if count else ""

    def _refuse(self, difference: str, kind: str) -> None:
        self._session.proof = None
        report_mismatch(
            self._session.channel,
            self._session.generation,
            Reason(
                kind,
                f"the script cannot be replayed: {difference}, so its steps depend on something that is neither "
                "recorded nor made again by its setup",
            ),
        )


def _must_be_equal(session: Rank) -> bool:
    """Whether the user demands bits: by --proof strict, or of torch."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return session.options.is_strict or (is_deterministic and not torch.is_deterministic_algorithms_warn_only_enabled())


def _counted(kind: int, count: int) -> str:
    return f"{count} {_NAMES[kind][count != 1]}"


def report(session: Rank, equal: list[str], not_proved: list[str]) -> None:
    """Report what the comparison with the lost rank has shown, if anything.

    equal        what was found equal: a noun with its number, "3 losses in step 7"
    not_proved   what is not proved, and why: a sentence each
    """
    if equal or not_proved:
        session.channel.send(from_rank.Compared(equal, not_proved))


def is_decisive(session: Rank, step: int) -> bool:
    """Whether the lost rank has left a loss or an input of a collective of a step, which depend on all its state."""
    return any(kind in (LOSS, INPUT) for kind, _, _ in session[Recorder].evidence.left(step))


def note(
    session: Rank,
    kind: int,
    name: str,
    values: Sequence[Any],
    what: str = "",
    is_one_of_many: bool = False,
    is_weights: bool = False,
) -> bool:
    """Note what this rank is about to use in the current step; a replacement compares it.

    kind, name   BATCH, LOSS or INPUT; of the loader, group or message, the same in all processes of this rank
    values       of which the dense tensors are noted
    what         which one it is, for a person; of an input the operation
    is_one_of_many  a step may have hundreds of these: of most of them only some are noted, see `Evidence.is_drawn`
    is_weights      the fewer, as all else depends on them
    returns   whether it is equal to rounding alone

    Raises MismatchError, and nothing else.
    """
    if session.keeper is not None:
        session.keeper.note(kind, values)
    if not session.mode.is_live or not (session.is_repairable() or session.is_recorded()):
        return False
    try:
        evidence = session.parts[Recorder].evidence
        if is_one_of_many and not evidence.is_drawn(place := evidence.count(session.applied, kind, name), is_weights):
            return False
        with Unseen():
            tensors = comparable(values)
            if not tensors:
                return False
            if not is_one_of_many:
                place = evidence.count(session.applied, kind, name)
            if session.proof is None and not tensors[0].is_cpu:
                parts, write = evidence.write_later(place, tensors)
                host_copies.later(parts, write, accelerator.mark())
                if _gone_backward_at == session.applied and not _going_backward:  # by hand, without DDP
                    _send_notes()
                return False
            noted = evidence.write(place, tensors)
            if session.proof is not None:
                return bool(session.proof.compare(place, noted, tensors, what))
    except MismatchError:
        raise
    except Exception as error:  # not proved; training continues
        fail_open.raise_if_meant(error)
        if session.proof is not None:
            session.proof.end(f"step {session.applied} cannot be compared with the lost rank's: {error!r}")
    return False


def wrap_backward(original: Any) -> Any:
    """torch.autograd.backward: note the losses, and which collectives reduce gradients."""

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        global _going_backward, _gone_backward_at
        session = current()
        is_capturing = accelerator.is_capturing()  # nothing may be copied to the CPU then
        unseen = None if is_capturing else gradients.look_at_watched()
        if unseen is not None and unseen.text and session is not None and session.rank == 0:
            cure = "as long as there is none, nothing of this run is saved, not even at a signal"
            session.channel.send(from_rank.Note(f"{unseen}: {cure}{unseen.pointer}"))
        if is_capturing or session is None or threading.current_thread() is not threading.main_thread():
            return original(tensors, *args, **kwargs)
        note(session, LOSS, "", tensors if isinstance(tensors, list | tuple) else [tensors])
        if host_copies.waiting:
            _send_notes()
        _going_backward, _gone_backward_at = _going_backward + 1, session.applied
        try:
            return original(tensors, *args, **kwargs)
        finally:
            _going_backward -= 1
            if host_copies.waiting:
                _send_notes()
            if (why := gradients.look_after_backward()) and session.mode.is_live and session.is_repairable():
                session.note_hindrance(session.applied, why)

    return backward


def _send_notes() -> None:
    """Let what was noted on a device come to where it outlives this process. The CPU does not wait for it."""
    try:
        if (sent := host_copies.send()) is not None:
            device_link.watch(sent, sent)
    except Exception as error:  # not proved; whatever the script asks of a device that has failed tells it
        fail_open.raise_if_meant(error)


def is_measured(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a collective's input may be a measurement (a time, memory in use) or a pickled object, not a gradient.

    These differ between two runs, and training does not depend on them.

    tensors   any dtype, shape and device: a few elements, or bytes, may be a measurement
    """
    if _going_backward or any(
        tensor is parameter.grad for tensor in tensors for parameter in optimizer_registry.parameters()
    ):
        return False
    return all(tensor.numel() <= MEASURED_ELEMENTS or tensor.dtype is torch.uint8 for tensor in tensors)
