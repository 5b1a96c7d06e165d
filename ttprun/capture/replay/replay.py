"""The replay: how a script, run from its top in another process, becomes what a record says.

Loops jump to the positions of the records, output goes to a log, writes are dropped. The script first reaches the place
of an earlier boundary, mostly N-1: there the variables and random states of that boundary are restored, and one more
step is run, so that iterators and prefetched data are where they were at boundary N. (If optimizers step in turn, it
begins at the newest earlier boundary of the same optimizer, so that the whole turn is run.) There the variables of
boundary N are restored. What the optimizers update is not in a record: whoever replays loads it then.

What cannot be reproduced is refused. Begin with `Replay.before_step`, called before each step of an optimizer.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any

from ttprun.capture.data import loaders
from ttprun.capture.effects import origins, output, script_files
from ttprun.capture.position import loops, placeholders
from ttprun.capture.records.packing import LoopRecord, PassRecord, Record, ScriptState, read_state
from ttprun.capture.records.recorder import Recorder, read_record, records_up_to, why_never, why_other_numbers
from ttprun.capture.replay.jumps import (
    Findings,
    Jumps,
    Optimizers,
    difference_of_batches,
    difference_of_optimizers,
    difference_of_place,
    difference_of_stepping,
)
from ttprun.capture.replay.merge import compared, optimizers_of, phrase_of
from ttprun.capture.values import CannotRestoreError, Restore, Tree, restore_loop, room_to_walk
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.ownership import user_frames
from ttprun.protocol.reason import Reason

STEPS_TO_LOOK_FOR = 64  # optimizer steps that the replay may take before it reaches the place where it begins


class NotRepeatedError(RuntimeError):
    """The replay does not repeat what was recorded; the message says what."""

    is_meant_for_script = True


class Replay:
    """One way back, to a boundary; how the script runs as long as it is not over (`Mode` in current_rank.py).

    boundary      the boundary N to reach
    target        its record
    before        the record where the replay begins; None: at the script's top
    passed        newest boundary that was reached
    has_arrived   the place of `before` was reached
    is_at_target  the newest step was at boundary N
    difference    why the script's first step was not where the replay begins
    is_joining    other processes go on, and this one joins them
    sets_variables   where it jumps into a loop, see `_set_variables`
    jump          makes a loop that begins in the middle
    refused       what `refuse` raises
    """

    is_live = False
    is_alone = True
    sets_variables = False
    is_joining = False
    jump = loops.Jump
    refused: type[Exception] = NotRepeatedError

    def __init__(
        self, host: Rank, optimizers: Optimizers, target: Record, before: Record | None, is_strict: bool = False
    ) -> None:
        """A replay up to the record `target`, which first reaches the place of `before` (None: from the top).

        is_strict   what is not proved to be equal is refused
        """
        self._host = host
        self._optimizers = optimizers
        self._is_strict = is_strict
        self.boundary = target.fields.boundary
        self.target = target
        self.before = before
        self.jumps = Jumps(target if before is None else before, self.jump, self.refuse)
        self.passed = 0
        self.has_arrived = before is None
        self.is_at_target = False
        self._steps_passed = 0
        self._starts: dict[str, PassRecord] = {}  # of passes that are to be begun, by the loop's key
        self._steps_left_out = 0  # by a GradScaler
        self.difference = ""
        self.output = output.Diverted(host)
        self.findings = Findings(host, self.refuse, self.is_decisive, is_strict)

    @staticmethod
    def records_of(recorder: Recorder, number: int) -> tuple[list[Record], Record | None]:
        """The records from where a replay to this boundary begins, and the first of these; None: at the script's top.

        Raises KeyError if there is no record of that boundary.
        """
        records = records_up_to(recorder, number)
        is_first = len(records) == 1 and not records[-1].fields.is_straight
        return records, None if is_first else records[0]

    # What whoever replays may do otherwise.

    def refuse(self, reason: Reason, is_contradiction: bool = True) -> None:
        """Give up. Does not return; the script must not go on.

        is_contradiction   the script does something else than it did; else not enough is known
        """
        raise NotRepeatedError(reason)

    def is_decisive(self) -> bool:
        """Whether the next step will show that something is other than it was."""
        return False

    # How the script runs meanwhile.

    def begin(self) -> None:
        """Take over the loops' hooks; the script may start."""
        if self.before is not None:
            self._starts = {start.site: start for start in self.before.fields.passes}
            loops.passes.update(self._starts)
            loops.take_over(self.enter, self._loop, self._begin_pass)

    def enter(self, site: loops.Site, frame: FrameType) -> Any:
        """A loop begins; see loops.take_over."""
        return self.jumps.enter(site, frame)

    def _loop(self, site: loops.Site, token: Any, iterable: Iterable[Any]) -> Any:
        if self.sets_variables and isinstance(token, LoopRecord):
            self.sets_variables = False
            assert self.before is not None
            self._set_variables(sys._getframe(1), self.before.fields, self.before.blobs)
        return self.jumps.loop(site, token, iterable)

    def _begin_pass(self, key: str, frame: FrameType) -> None:
        """Begin the first pass of a loop as the lost rank has begun its newest one."""
        if (start := self._starts.pop(key, None)) is None:
            return
        try:
            self._set_variables(frame, read_state(start.state), [memoryview(blob) for blob in start.blobs])
            random_state.restore(start.rng)
        except Exception as error:  # the script must not run with half of the variables
            self.refuse(
                Reason(
                    "other-variable",
                    f"the variables at the start of a pass of the loop at {key} cannot be restored: {error!r}",
                )
            )

    def _set_variables(self, frame: FrameType, fields: ScriptState, blobs: list[memoryview]) -> None:
        """Write the variables of the place where the replay begins already here, before the code that leads there.

        That code belongs to an iteration of an outer loop, and finds what the ones before have made (the last epoch's
        loss, a progress bar that has begun). The variables are those of a few steps later, and are written once more
        when the replay is there.
        """
        with room_to_walk():
            restore = Restore(blobs, False, list(self._optimizers.parameters()))
            for here, (at, variables, names) in zip(user_frames(frame), fields.frames(), strict=False):
                if [here.f_code.co_filename, here.f_code.co_qualname] != at[:2]:
                    break
                restore.frame(here, variables, f"{at[1]}: ", names)
            for name, module in self._import_modules(fields.modules, is_comparing=False).items():
                restore.module(vars(module), fields.modules[name], f"{name}: ")
            restore.forget()

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """The record of the lost rank's iterator over the loader of this name; None if it had none.

        Up to the place where the replay begins.
        """
        return None if self.has_arrived else self.jumps.iterator_to_make(name)

    @property
    def newest_step(self) -> int:
        """The newest step of the lost rank that an answer may be of."""
        return self.passed if self.has_arrived or self.before is None else self.before.fields.boundary - 1

    def note_not_proved(self, text: str) -> None:
        """The script has found something that may be other than it was for the lost rank."""
        self.findings.not_proved.append(text)

    # Boundaries.

    def before_step(self, frame: FrameType, returned: Any = None, optimizer: Any = None) -> Any:
        """An optimizer is about to change weights: if that is at a record's place, restore the record.

        frame       the innermost one of the script, or one called by it
        returned    the result of the step's closure here; returns the lost rank's
        optimizer   None: one that is not known
        """
        try:
            with room_to_walk():
                return self._arrive(frame, returned, optimizer)
        except self.refused:
            raise
        except Exception as error:  # the script must not run with half of the variables
            self.refuse(
                Reason.of(error, "other-variable").within(
                    f"the variables of the lost rank cannot be restored: {error!r}"
                )
            )

    def _arrive(self, frame: FrameType, returned: Any, optimizer: Any) -> Any:
        if placeholders.wanted():
            self.refuse(
                Reason(
                    "loop-not-followed",
                    "the optimizer steps inside an iterator whose items a replay has to skip: step in the loop body",
                )
            )
        if self.has_arrived:
            self.passed += 1
            is_target = self.passed == self.boundary
            record = self.record_of(self.passed)
            difference = self.difference_from(record, frame, optimizer)
            if difference:
                where = f"the replay is not at the place of boundary {self.passed}"
                self.refuse(difference.within(f"{where}: {difference}"))
            if is_target:
                self.findings.note_equal(record)
            if self.before is not None:
                self.findings.compare_random_states(record)
            self.is_at_target = is_target
            restore, returned = self.restore(record, frame, returned, is_comparing=is_target)
            restore.forget()
            return returned
        assert self.before is not None
        difference = self.difference_from(self.before, frame, optimizer)
        if not difference:
            self.is_at_target = self.before is self.target
            if self.is_at_target:
                self.findings.note_equal(self.before)
            restore, returned = self.restore(self.before, frame, returned, is_comparing=self.is_at_target)
            restore.forget()
            self.arrive(self.before.fields.boundary)
            return returned
        self.note_other_place(difference)
        return returned

    def other_hyperparameters(self) -> list[str]:
        """Those that the script sets otherwise than the run did whose records are restored, a phrase each.

        Called before the first step, when the optimizers are as the set-up has made them.
        """
        stored, differing = self._host[Recorder].read_first(), list[str]()
        if stored is None:
            return differing
        trees = Tree(*Record.of(*stored[1:])), Tree(*self.target)
        for first, last, live in zip(*map(optimizers_of, trees), self._optimizers.optimizers(), strict=False):
            for groups in zip(first.groups, last.groups, live.param_groups, strict=False):
                for name, before, now, ours, _ in compared(*groups):
                    differing += [] if ours in (before, now) else [phrase_of(name, ours, now, now)]
        return list(dict.fromkeys(differing))

    def record_of(self, number: int) -> Record:
        """The record of a boundary on the way. Raises KeyError."""
        return self.target if number == self.boundary else read_record(self._host[Recorder], number)

    def leaves_step_out(self, frame: FrameType) -> bool:
        """Whether a GradScaler has left out the lost rank's step at this place: it is not the next boundary's."""
        if not self.has_arrived:
            return False
        if not self.difference_from(self.record_of(self.passed + 1), frame):
            return False
        self._steps_left_out += 1
        return self._steps_left_out <= STEPS_TO_LOOK_FOR

    def arrive(self, boundary: int) -> None:
        """The script is where the replay begins: from here on loops are followed as in a run."""
        self.has_arrived = True
        self.passed = boundary
        loops.give_back()

    def note_other_place(self, difference: Reason) -> None:
        """This step is not yet where the replay begins. Refuses after STEPS_TO_LOOK_FOR such steps."""
        self._steps_passed += 1
        self.difference = self.difference or str(difference)
        if self._steps_passed > STEPS_TO_LOOK_FOR:
            begins_at = self.before.fields.boundary if self.before is not None else self.boundary
            where = f"the replay does not reach the place of boundary {begins_at}"
            self.refuse(difference.within(f"{where}: {difference}"))

    def difference_from(self, record: Record, frame: FrameType, optimizer: Any = None) -> Reason:
        """How this place, or the optimizer that steps here, differs from a record's, "" if they are the same."""
        if never := why_never(record.fields):
            self.refuse(never)
        is_target = record is self.target
        difference = difference_of_place(record.fields, frame, is_before_target=not is_target)
        number = self._optimizers.number_of(optimizer)
        difference = difference or difference_of_stepping(record.fields, number)
        if difference:
            return difference
        before = None if self.before is None or self.before is record else self.before.fields
        difference = difference_of_batches(record.fields, before, is_target)
        if difference:
            return difference
        is_run_again = record is not self.before or is_target
        return why_other_numbers(record.fields) if is_run_again else Reason()

    def restore(self, record: Record, frame: FrameType, returned: Any, is_comparing: bool) -> tuple[Restore, Any]:
        """Write a record into the variables; returns the lost rank's closure result, too."""
        fields, optimizers = record.fields, self._optimizers
        if is_comparing and (difference := difference_of_optimizers(fields, optimizers)):
            self.refuse(difference)
        # Variables that hold optimized tensors are recorded by index, which for parameters is the same here.
        is_alike = optimizers.counts_now() == fields.stepped
        stepped = optimizers.stepped_tensors() if is_alike else list(optimizers.parameters())
        restore = Restore(record.blobs, is_comparing, stepped, self._is_strict)
        modules = self._import_modules(fields.modules, is_comparing)
        try:
            frames = user_frames(frame)
            for user_frame, (at, variables, names) in zip(frames, fields.frames(), strict=True):
                restore.frame(user_frame, variables, f"{at[1]}: ", names)
            with restore.strictly():
                for user_frame, around in zip(frames, fields.loops, strict=True):
                    for loop, recorded in zip(loops.of_frame(user_frame), around, strict=True):
                        restore_loop(restore, loop, recorded.over)
            for name, module in modules.items():
                restore.module(vars(module), fields.modules[name], f"{name}: ")
            with restore.strictly():
                for index, (optimizer, node) in enumerate(
                    zip(optimizers.optimizers(), fields.optimizers, strict=is_comparing)
                ):
                    restore.value(optimizer, node, f"optimizer {index}")
                returned = restore.value(returned, fields.returned, "the closure's result")
        except CannotRestoreError as error:
            self.refuse(Reason.of(error, "other-variable"))
        self.findings.weigh(restore, self.is_joining)
        random_state.restore(fields.rng)
        loaders.count_on(fields.loaders_made)
        return restore, returned

    def _import_modules(self, names: Iterable[str], is_comparing: bool) -> dict[str, ModuleType]:
        """Import the user's modules of these names, also those that the replay has not imported yet."""
        modules = {}
        for name in names:
            try:
                modules[name] = importlib.import_module(name)
            except Exception as error:  # whatever the module does
                if is_comparing:
                    self.refuse(
                        Reason(
                            "import-fails",
                            f"the lost rank had imported the module {name}, which fails in the replay: {error!r}",
                        )
                    )
        return modules

    def unmute(self) -> None:
        """The boundary is reached, and all is loaded: the script writes again."""
        fields = self.target.fields
        self.output.end()
        output.resume_from(self._host[Recorder], self.boundary)
        script_files.unmute(self._host, fields.files, self.boundary, fields.at_ns)
        origins.end()
        for site in loops.sites.values():
            if site.key in fields.has_steps:
                site.note_step()

    def refuse_end(self) -> None:
        """The script has ended before its boundary. Does not return."""
        why = f": {self.difference}" if self.difference else ""
        words = self.output.last_words()
        said = f"; the script's last words: {words}" if words else ""
        self.refuse(
            Reason("other-place", f"the replay reached the script's end and not boundary {self.boundary}{why}{said}")
        )
