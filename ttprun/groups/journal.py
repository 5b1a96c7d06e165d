"""The journal: the collectives and messages of the current step, with their inputs.

When a rank is lost, the collectives since the newest boundary are issued again with its replacement. gloo reduces in
place, so inputs are copied before an operation is issued, unless they can be computed again (inputs.py); the copies go
into buffers that are reused from step to step. A commit (every rank has recorded the boundary) empties the journal.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from ttprun.device import accelerator
from ttprun.device.device_errors import DeviceErrors, Diagnosis
from ttprun.groups.operations import JOURNAL_FULL, NOTHING, OF_ALL_MEMBERS, Entry, Input
from ttprun.introspect import fail_open
from ttprun.introspect.ownership import waits_for_recovery
from ttprun.introspect.tensor_bytes import size_of
from ttprun.protocol.patience import Patience
from ttprun.protocol.reason import Reason

Tensor = torch.Tensor
SMALL_RESULT_BYTES = 64 << 10
# How long a failed operation waits for a recovery, while the agent could order one, before the script gets the error.
PATIENCE_S = 15.0
# How long after the failure it is reported to the agent, which knows by then if a peer has died.
REPORT_AFTER_S = 1.0
_ENTRY_BYTES = 4 << 10  # at most, without its tensors
# How often a waiting rank checks whether its operation was issued again: one that was cut may never end by itself.
_LOOK_AGAIN = timedelta(seconds=0.25)
# Steps after which unused spare buffers are freed; in the first ones after each. What DDP sends when it is made, and
# in the buckets of its first backward pass, comes once, and takes as much as all weights and gradients: freed at once.
_TRIM_EVERY = 16
_FIRST_STEPS = 32
# By then a device holds all that a step needs: weights, gradients, optimizer state. Until then a small part of what is
# free there may be used, as the script comes first.
_LEARNING_STEPS = 2
_PART_AT_FIRST, _PART = 64, 2
_Kind = tuple[torch.Size, torch.dtype, torch.device]  # of a copy


class EndedError(RuntimeError):
    """This process has been ordered to end: no recovery will come."""

    is_meant_for_script = True

    def __init__(self) -> None:
        super().__init__("the job is being ended: its pending collectives will not complete")


def _is_over(entry: Entry) -> bool:
    return entry.is_done or (entry.inner is not None and has_succeeded(entry.inner))


def has_succeeded(work: Any) -> bool:
    """Whether an operation of the backend has completed without an error (`Work.is_success` warns: deprecated)."""
    if not work.is_completed():
        return False
    try:
        work.wait()  # returns at once
    except Exception:
        return False
    return True


def has_ended(work: Any, limit_s: float) -> bool:
    """Whether an operation of the backend has completed or failed; waits `limit_s` at most."""
    if not work.is_completed():
        with contextlib.suppress(Exception):
            work.wait(timedelta(seconds=max(limit_s, 0.001)))
    return bool(work.is_completed())


_TABLE = DeviceErrors({})


class Journal:
    """All entries since the newest boundary, of all groups, in the order in which they were issued.

    `lock` guards the entries' order and the frozen state: an operation is either issued on a living connection, or
    stays in the journal for the recovery to issue.

    report_broken  called with a failed entry, and the seconds since then, if no fault has been reported
    admit          called by a waiting thread; its exception ends the wait; None: nothing is
    is_agent_awake  whether the agent could order a recovery now
    diagnose       what an operation's error says about the device or the connection
    sources         (group, number of a collective since the boundary) -> rank that has its result, and broadcasts it
                   instead of the collective
    received       sequence -> digests of messages since the boundary that living ranks had received at the newest fault
    settled        sequence -> how many of its borrowed entries all members had completed at the newest fault
    issued_again   entries that a recovery has issued again, with the works of the backend; [] once all have completed
    follows_device  its limit is what a device has room for; `may_follow_device`: once operations are on one
    unsettled      borrowed entries that not all members are known to have completed
    may_settle     what all members have completed is not issued again: a lost one's results are in its mirror, or all
                   ranks go back
    is_ended       this process has been ordered to end, and no recovery will come
    """

    def __init__(
        self,
        limit_bytes: int,
        is_agent_awake: Callable[[], bool] = lambda: True,
        diagnose: Callable[[BaseException], Diagnosis] = _TABLE.diagnose,
        report_broken: Callable[[Entry, float], None] = lambda entry, after_s: None,
        may_follow_device: bool = False,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.entries: list[Entry] = []
        self.sources: dict[tuple[str, int], int] = {}
        self.received: Mapping[str, Sequence[str]] = {}
        self.settled: Mapping[str, int] = {}
        self.may_settle = False
        self.issued_again: list[tuple[Entry, Any]] = []
        self.unsettled: list[Entry] = []
        self._numbers: Counter[str] = Counter()  # of messages and of borrowed entries, by sequence
        self._issued = 0
        self._put_off: list[Entry] = []
        self.is_frozen = False
        self.is_ended = False
        self.admit: Callable[[], None] | None = None
        self.is_agent_awake = is_agent_awake
        self._report_broken = report_broken
        self._diagnose = diagnose
        self._is_watching = False
        self.held_bytes = 0
        self._limit_bytes = limit_bytes
        self.may_follow_device, self.follows_device = may_follow_device, False
        self._spare: defaultdict[_Kind, list[Tensor]] = defaultdict(list)
        self._shapes_used: set[_Kind] = set()
        self._steps = 0

    def save(self, entry: Entry, inputs: list[Tensor]) -> bool:
        """Copy the inputs into spare buffers; False if the journal's limit is reached (nothing is copied then).

        An input that the entry has already is not copied. The outputs count too, as the entry keeps them alive; not
        if they are dropped soon. Where that leaves nothing, what an entry takes itself counts, as a script may take no
        step.

        inputs   any dtype, shape, layout and device; a copy is on the same device
        """
        outputs = entry.outputs
        size = _ENTRY_BYTES
        if entry.input is NOTHING or entry.input.is_borrowed:
            size = size_of(inputs[0]) if len(inputs) == 1 else sum(map(size_of, inputs))
        if outputs and not entry.is_passing and not (inputs and inputs[0] is outputs[0]):
            size += sum(map(size_of, outputs))
        if not self.reserve(entry, size):
            return False
        if inputs and entry.input is NOTHING:
            try:
                copies = [self._copied(tensor.detach() if tensor.requires_grad else tensor) for tensor in inputs]
            except torch.OutOfMemoryError:  # the script meets it, if it needs as much itself
                self.held_bytes -= size
                entry.size_bytes = 0
                self._spare.clear()
                return False
            entry.input = Input(copies)
        return True

    @property
    def has_learnt(self) -> bool:
        """Whether the limit stays."""
        return self._steps > _LEARNING_STEPS or not self.follows_device

    @property
    def why_full(self) -> Reason:
        """Why `save` has refused."""
        if not self.follows_device:
            return JOURNAL_FULL
        limit = f"the {self._limit_bytes >> 20} MiB that the script leaves for that on its device"
        return JOURNAL_FULL.within(f"what the collectives of a step are given takes more than {limit}")

    def _follow_device(self, held_bytes: int = 0) -> None:
        """Set the limit by what is free on the device now; at a commit `held_bytes` of it are the journal's."""
        if self.follows_device:
            part = _PART if self._steps >= _LEARNING_STEPS else _PART_AT_FIRST
            self._limit_bytes = held_bytes + accelerator.unclaimed_bytes() // part

    def reserve(self, entry: Entry, size_bytes: int) -> bool:
        """Count what an entry keeps alive from now on; False if the journal's limit is reached."""
        if self._steps < _LEARNING_STEPS and not self.held_bytes:
            self._follow_device()
        if self.held_bytes + size_bytes > self._limit_bytes:
            return False
        self.held_bytes += size_bytes
        entry.size_bytes = size_bytes
        return True

    def _copied(self, source: Tensor) -> Tensor:
        if source.layout is not torch.strided:  # another one each step holds as many elements as it likes
            return source.clone()
        kind = source.shape, source.dtype, source.device
        spare = self._spare[kind]
        self._shapes_used.add(kind)
        if spare:
            copy = spare.pop()
        else:
            with torch.inference_mode(False):  # or nothing could write to it outside of one
                copy = torch.empty(source.shape, dtype=source.dtype, device=source.device)
        return copy.copy_(source)

    def drop(self, entry: Entry) -> None:
        """Remove an entry whose operation the backend has refused (the script's own mistake)."""
        with self.lock:
            if entry in self.entries:
                self.entries.remove(entry)
                self.held_bytes -= entry.size_bytes
                self.unsettled = [borrowed for borrowed in self.unsettled if borrowed is not entry]
                self._recycle(entry)
                entry.args = ()

    def clear(self) -> None:
        """Every rank has recorded the boundary: nothing older will be issued again."""
        with self.lock:
            carried = [entry for entry in self.entries if entry.is_apart and not (entry.save or _is_over(entry))]
            for entry in self.entries:
                entry.is_carried = entry in carried
                if entry.is_carried:
                    continue
                if entry.is_done or not entry.input.tensors:  # a message may still be pending
                    self._recycle(entry)
                entry.args = ()
            self.entries[:] = carried
            self.sources.clear()
            self.received = {}
            self.settled = {}
            self.unsettled.clear()
            self._put_off.clear()  # all was waited for before the commit
            self._numbers.clear()
            self._steps += 1
            if _LEARNING_STEPS <= self._steps <= _FIRST_STEPS:
                self._follow_device(self.held_bytes)
            self.held_bytes = sum(entry.size_bytes for entry in carried)
            if self._steps == 1:
                self._spare.clear()
            if self._steps <= _FIRST_STEPS or self._steps % _TRIM_EVERY == 0:
                for shape in self._spare.keys() - self._shapes_used:
                    del self._spare[shape]
                self._shapes_used.clear()

    def has_own(self) -> bool:
        """Whether the script's own threads have issued an operation since the boundary, and not one apart."""
        return any(not entry.is_apart for entry in self.entries)

    def forget_saves_before(self, boundary: int) -> None:
        """Remove the operations of saves that began before a boundary, and wake who waits for one.

        Those that other threads have carried over it are removed if they have completed.
        """
        with self.changed:
            newer = [entry for entry in self.entries if entry.save is None or entry.save.began_at >= boundary]
            self.entries = [entry for entry in newer if not (entry.is_carried and _is_over(entry))]
            self.changed.notify_all()

    def forget_completed(self) -> None:
        """Remove completed entries, where nothing is issued again."""
        with self.lock:
            self.entries = [entry for entry in self.entries if not _is_over(entry)]

    def _recycle(self, entry: Entry) -> None:
        for copy in entry.input.tensors:
            if copy.layout is torch.strided and not entry.input.is_borrowed:
                self._spare[copy.shape, copy.dtype, copy.device].append(copy)
        entry.input = NOTHING

    def of_group(self, name: str) -> list[Entry]:
        """The collectives of one group since the boundary, oldest first."""
        with self.lock:
            return [entry for entry in self.entries if entry.sequence == name and not entry.is_carried]

    def number_of(self, message: Entry) -> int:
        """Count a new message."""
        with self.lock:
            self._numbers[message.sequence] += 1
            return self._numbers[message.sequence] - 1

    def has_arrived(self, entry: Entry) -> bool:
        """Whether this is a message that a living rank had received at the newest fault: it is not sent again."""
        return bool(self.received) and entry.number < len(self.received.get(entry.sequence, ()))

    def note_agreed(
        self, sources: dict[tuple[str, int], int], received: Mapping[str, Sequence[str]], settled: Mapping[str, int]
    ) -> None:
        """What all ranks know alike of the operations since the boundary, once a fault is being repaired.

        sources, received, settled   replace the attributes of these names
        """
        self.sources, self.received, self.settled = sources, received, settled

    def take_issued_again(self) -> list[tuple[Entry, Any]]:
        """What a recovery was issuing again when it was interrupted, for whoever has to end it; noted no longer."""
        taken, self.issued_again = self.issued_again, []
        return taken

    def note_order(self, entry: Entry) -> None:
        """A collective is about to be issued."""
        self._issued += 1
        entry.at = entry.waited_at = self._issued
        if entry.input.is_borrowed:
            entry.number = self.number_of(entry)
            self.unsettled.append(entry)

    def settle_before(self, entry: Entry) -> None:
        """A collective has completed, so all members have issued it: drop the inputs of what they waited for before.

        FSDP2 waits for each reduce-scatter before it issues anything else, or at a place that is the same in all
        members (`put_off`). The caller holds the lock.
        """
        if not self.may_settle or entry.op not in OF_ALL_MEMBERS:
            return
        for borrowed in self.unsettled:
            if borrowed.group is entry.group and borrowed.is_done and borrowed.waited_at < entry.at:
                self.held_bytes -= borrowed.size_bytes
                borrowed.size_bytes = 0
                borrowed.settle_for_all()
        self.unsettled = [borrowed for borrowed in self.unsettled if not borrowed.is_settled]

    def put_off(self, entry: Entry) -> None:
        """The script's thread waits for this entry later: see `take_put_off`."""
        with self.lock:
            entry.waited_at = sys.maxsize
            self._put_off.append(entry)

    def take_put_off(self, is_wanted: Callable[[Entry], bool]) -> list[Entry]:
        """What was put off and is waited for now, oldest first."""
        if not self._put_off:
            return []
        with self.lock:
            taken = [entry for entry in self._put_off if is_wanted(entry)]
            self._put_off = [entry for entry in self._put_off if entry not in taken]
        return taken

    def note_waited(self, entry: Entry) -> None:
        """The script's thread has waited for what was put off: whatever it issues next, members issue after that."""
        with self.lock:
            entry.waited_at = self._issued

    def is_settled(self, entry: Entry) -> bool:
        """Whether all members had completed this entry at the newest fault: it is not issued again."""
        return entry.input.is_borrowed and entry.number < self.settled.get(entry.sequence, 0)

    def source_of(self, entry: Entry) -> int | None:
        """The rank that broadcasts an entry's result; None: the operation itself is issued (again)."""
        if not self.sources:
            return None
        name = entry.sequence
        number = next((number for number, other in enumerate(self.of_group(name)) if other is entry), None)
        return None if number is None else self.sources.get((name, number))

    def has_in_flight(self) -> bool:
        """Whether an operation of the training has not completed. Never waits: whoever holds the lock may."""
        return any(not (entry.is_done or entry.is_apart) for entry in tuple(self.entries))

    def unfinished(self) -> list[Entry]:
        """Entries that have not completed, oldest first; a copy, so the journal may grow meanwhile."""
        with self.lock:
            return [entry for entry in self.entries if not entry.is_done]

    def end(self) -> None:
        """This process is ordered to end: fail whatever waits for a recovery.

        A signal handler must run, and Python cannot run it while DDP waits for a future in C++.
        """
        with self.changed:
            self.is_ended = True
            pending = [entry for entry in self.entries if not entry.is_done] if self.is_frozen else []
            self.changed.notify_all()
        for entry in pending:
            entry.settle(EndedError())

    def attach(self, entry: Entry, inner: Any) -> None:
        """The entry has been issued (again) as `inner`: wake those that wait for it."""
        with self.changed:
            entry.inner = inner
            self.changed.notify_all()

    def wait(self, entry: Entry, may_stop: Callable[[], bool] = lambda: False) -> None:
        """Block until the entry has completed, through any number of recoveries.

        may_stop   asked now and then: whether to return though it has not

        Raises the backend's error if no recovery comes within PATIENCE_S, and at once if it is a device error that a
        new connection cannot solve.
        """
        failed: Any = None
        while not entry.is_done:
            if self.admit is not None:
                self.admit()
            if entry.save is not None:
                entry.save.raise_if_given_up()
            inner = entry.inner
            if inner is None or inner is failed:
                with self.changed:
                    self._wait_for_recovery(entry, failed)
                continue
            try:
                inner.wait(_LOOK_AGAIN)
            except Exception as error:
                if not inner.is_completed():
                    if may_stop():
                        return
                    continue
                if has_succeeded(inner):  # it has completed since the wait timed out
                    entry.group.complete(entry, inner)
                    continue
                failed = inner
                if self._is_for_script(entry, inner, error, self._diagnose(error)):
                    fail_open.meant(error)
                    raise
            else:
                entry.group.complete(entry, inner)

    def _is_for_script(self, entry: Entry, inner: Any, error: Exception, diagnosis: Diagnosis) -> bool:
        """Whether an operation's error must end the script's run, since a new connection would not solve it.

        Otherwise it is noted, and the operation waits for a recovery. Errors during a recovery are that recovery's own.
        """
        with self.lock:
            entry.error = error.with_traceback(None)
            if diagnosis.can_wait or self.is_frozen or entry.inner is not inner:
                return False
            self.drop(entry)
            return True

    @waits_for_recovery
    def _wait_for_recovery(self, entry: Entry, failed: Any) -> None:
        started = time.monotonic()
        patience = Patience(PATIENCE_S, self.is_agent_awake)
        is_reported = False
        while entry.inner is None or entry.inner is failed:
            if self.admit is not None:
                self.admit()
            if entry.save is not None:
                entry.save.raise_if_given_up()
            if self.is_ended:
                raise EndedError
            if self.is_frozen:
                patience = Patience(PATIENCE_S, self.is_agent_awake)
            elif failed is not None and not is_reported and time.monotonic() - started > REPORT_AFTER_S:
                is_reported = True
                self._report_broken(entry, REPORT_AFTER_S)
            elif not entry.group.is_protected() or patience.look():
                self.drop(entry)
                lost = entry.error or RuntimeError(f"{entry.op}: the connection was lost and no recovery came")
                raise fail_open.meant(lost)
            self.changed.wait(0.5)

    def note_failure(self, entry: Entry, inner: Any, error: Exception) -> None:
        """A future's operation has failed (DDP waits for futures in C++, not in `wait`).

        inner   the backend's work that has failed; an entry that was issued again has another
        error   of the backend

        The future stays pending during a recovery; if none comes within PATIENCE_S, it gets the error.
        """
        diagnosis = self._diagnose(error)
        with self.lock:
            entry.failed = inner
            self._is_for_script(entry, inner, error, diagnosis)  # if so, it is no longer in the journal
            is_in_journal = entry in self.entries
            is_first = is_in_journal and not self._is_watching
            self._is_watching = self._is_watching or is_first
        if is_first:
            threading.Thread(target=self._watch_failed_futures, name="ttprun-patience", daemon=True).start()
        if not is_in_journal:
            entry.settle(error)

    def _watch_failed_futures(self) -> None:
        started = time.monotonic()
        patience = Patience(PATIENCE_S, self.is_agent_awake)
        is_reported = False
        while True:
            with self.changed:
                failed = [entry for entry in self.entries if entry.failed is not None and entry.failed is entry.inner]
                waited_s = time.monotonic() - started
                is_over = patience.look() or any(not entry.group.is_protected() for entry in failed)
                if not failed or (is_over and not self.is_frozen) or self.is_ended:
                    self._is_watching = False
                    break
                must_report = not self.is_frozen and not is_reported and waited_s > REPORT_AFTER_S
                if self.is_frozen:
                    started, patience = time.monotonic(), Patience(PATIENCE_S, self.is_agent_awake)
                if not must_report:
                    self.changed.wait(0.2)
            if must_report:
                is_reported = True
                self._report_broken(failed[0], REPORT_AFTER_S)
        for entry in failed:
            self.drop(entry)
            if not entry.is_done:
                entry.settle(entry.error)
