"""The replay: how a replacement reaches the lost rank's boundary N.

The replacement runs the user's script from the top. Collectives do not communicate, output goes to a log, loops jump to
the positions of the lost rank's records. It first reaches the place of an earlier boundary, mostly N-1: there the
variables and random states of that boundary are restored, and one more step is run, so that iterators and prefetched
data are where they were at boundary N. (If optimizers step in turn, it begins at the newest earlier boundary of the
same optimizer, so that the whole turn is run.) There the variables of boundary N are restored, the optimizer steps (to
make its state, and draw its random numbers), its tensors are overwritten by a survivor's, and the replacement goes
live.

A replay that cannot reproduce something is refused: every failed check is reported to the agent with a reason.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from ttprun.capture.data import loaders
from ttprun.capture.effects import files, origins
from ttprun.capture.effects.output import Diverted
from ttprun.capture.position import loop_sites, loops, placeholders
from ttprun.capture.records import replayable
from ttprun.capture.records.boundary_record import LoopRecord, Record
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.values import CannotRestoreError, Restore, restore_loop, room_to_walk
from ttprun.groups import results
from ttprun.groups.process_group import groups_of
from ttprun.groups.results import Answers, Results, as_if_alone
from ttprun.introspect import moments, random_state
from ttprun.introspect.frames import user_frames
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field, Phase
from ttprun.rank.checks import proof
from ttprun.rank.checks.replay_guard import MismatchError, report_mismatch
from ttprun.rank.context import LIVE, Mode
from ttprun.rank.replay import loss_scaling
from ttprun.rank.replay.differences import (
    difference_of_batches,
    difference_of_optimizers,
    difference_of_place,
    difference_of_stepping,
)
from ttprun.rank.replay.findings import Findings
from ttprun.rank.replay.jumps import Jumps
from ttprun.rank.replay.step_proof import StepProof
from ttprun.rank.session import Session
from ttprun.tensors import gradients, kept_gradients, mirror, open_boundaries, optimizer_registry
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.post_step_weights import KeptWeights

if TYPE_CHECKING:
    import torch

    from ttprun.groups.entry import Entry

SET_VARIABLES = "a replay sets the variables where it jumps into a loop"  # among the origins: see `end_by_error`
STEPS_TO_LOOK_FOR = 64  # optimizer steps that the replay may take before it reaches the place where it begins


class ReplayRun(Mode):
    """The state of a replay.

    boundary    the boundary N to reach
    live        set by the recovery thread when the tensors are loaded and the new generation is connected
    skip_lines  lines of stdout and stderr that the lost rank had printed since boundary N
    setup_s     the script's time from its top to its first optimizer step; None before that
    difference  why the script's first step was not where the replay begins
    is_alone    collectives are answered without the other ranks
    step_proof  set if no other rank goes on with the lost rank's state
    step_from   slot of the lost rank's mirror from which the step at boundary N is taken again; "": it is not
    is_joining, is_contradicted   see to_rank.Replay
    sets_variables   where it jumps into a loop: a replay before this one has failed without; see `end_by_error`
    jump        makes a loop that begins in the middle
    """

    is_live = False
    is_alone = True
    step_from = ""
    sets_variables = False
    step_proof: StepProof | None = None
    _taken_again: torch.optim.Optimizer | None = None
    is_joining = False
    is_contradicted = False
    jump = loops.Jump

    def __init__(
        self,
        session: Session,
        number: int,
        skip_lines: tuple[int, int],
        target: Record,
        before: Record | None,
        answers: Answers,
    ) -> None:
        """A replay up to the record `target`, which first reaches the place of `before` (None: from the top)."""
        self.session = session
        self.boundary = number
        self.live = threading.Event()
        self.skip_lines = skip_lines
        self.setup_s: float | None = None
        self._began_s = time.monotonic()
        self._target = target
        self._before = before
        self._jumps = Jumps(target if before is None else before, self.jump, self.refuse)
        self._answers = answers
        self._passed = 0  # newest boundary that the replay has reached
        self._has_arrived = self._before is None
        self._is_at_target = False
        self._steps_passed = 0
        self._steps_left_out = 0  # by a GradScaler
        self.difference = ""
        self._output = Diverted(session)
        self._findings = Findings(session, number, self.refuse)

    @classmethod
    def of_lost(cls, session: Session, number: int, skip_lines: tuple[int, int]) -> ReplayRun:
        """The replay of a lost rank's recorder.

        number       the boundary up to which the script is replayed
        skip_lines   lines of stdout and stderr that the lost rank had printed

        Raises KeyError if there is no record of that boundary.
        """
        records = replayable.records_up_to(session[Recorder], number)
        target, is_first = records[-1], len(records) == 1 and not records[-1].fields.is_straight
        before = None if is_first else records[0]
        recent = [result for record in records for result in record.fields.results]
        replay = cls(session, number, skip_lines, target, before, Answers(session[Recorder].read_log(), recent))
        replay.sets_variables = SET_VARIABLES in _origins_of(session)
        return replay

    def begin(self) -> None:
        """Take over the loops' hooks; the script may start."""
        if self._before is not None:
            loops.take_over(self._enter, self._loop)

    def _enter(self, site: loop_sites.Site, frame: FrameType) -> Any:
        return self._jumps.enter(site, frame)

    def _loop(self, site: loop_sites.Site, token: Any, iterable: Iterable[Any]) -> Any:
        if self.sets_variables and isinstance(token, LoopRecord):
            self.sets_variables = False
            self._set_variables(sys._getframe(1))
        return self._jumps.loop(site, token, iterable)

    def _set_variables(self, frame: FrameType) -> None:
        """Write the variables of the place where the replay begins already here, before the code that leads there.

        That code belongs to an iteration of an outer loop, and finds what the ones before have made (the last epoch's
        loss, a progress bar that has begun). The variables are those of a few steps later, and are written once more
        when the replay is there.
        """
        assert self._before is not None
        fields = self._before.fields
        with room_to_walk():
            restore = Restore(self._before.blobs, False, list(optimizer_registry.parameters()))
            for here, (at, variables, names) in zip(user_frames(frame), fields.frames(), strict=False):
                if [here.f_code.co_filename, here.f_code.co_qualname] != at[:2]:
                    break
                restore.frame(here, variables, f"{at[1]}: ", names)
            for name, module in self._import_modules(fields.modules, is_comparing=False).items():
                restore.module(vars(module), fields.modules[name], f"{name}: ")
            restore.forget()

    def end_by_error(self, what: str) -> None:
        """As in Mode: an error that the variables of the iterations before would have avoided is no error of a run.

        Only if others go on: where all resume from a stored state, each attempt begins with that state's own log.
        """
        is_on_the_way = not self._has_arrived and self._jumps.loops_used
        if not (is_on_the_way and self.is_joining) or SET_VARIABLES in _origins_of(self.session):
            return
        results.keep_origin(self.session[Recorder], (SET_VARIABLES, True))
        why = f"the replay jumps into a loop without what the iterations before have made, and has met {what}"
        report_mismatch(self.session.channel, self.session.generation, why, is_near=True)

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """As in Mode: up to the place where the replay begins."""
        return None if self._has_arrived else self._jumps.iterator_to_make(name)

    # Collectives.

    @property
    def newest_step(self) -> int:  # type: ignore[override]
        """The newest step of the lost rank that an answer may be of."""
        return self._passed if self._has_arrived or self._before is None else self._before.fields.boundary - 1

    def note_not_proved(self, text: str) -> None:
        """The script has found something that may be other than it was for the lost rank."""
        self._findings.not_proved.append(text)

    def answer(self, entry: Entry) -> None:
        """Fill a collective's outputs: with the lost rank's result, if that was small, else with its own inputs."""
        if not (entry.place and self._answers.answer(entry.place, entry.outputs, self.newest_step)):
            as_if_alone(entry)

    # Boundaries.

    def before_step(self, frame: FrameType, returned: Any = None, optimizer: Any = None) -> Any:
        """An optimizer is about to change weights: see step_hooks.before_step.

        returned   the result of the step's closure here; returns the lost rank's
        """
        self._note_setup()
        try:
            with room_to_walk():
                return self._arrive(frame, returned, optimizer)
        except MismatchError:
            raise
        except Exception as error:  # the script must not run with half of the variables
            self.refuse(f"the variables of the lost rank cannot be restored: {error!r}")

    def begin_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """What the step begins with is the lost rank's, all of it if it is taken again: refuses if it cannot be.

        returns   as in Mode: a collective step is taken with the other ranks
        """
        loss_scaling.take_over(optimizer)
        if self._is_at_target and open_boundaries.is_in_backward():  # after a forward pass with the set-up's weights
            self.refuse(f"step {self.boundary} is taken inside a backward pass, whose rest would differ")
        if self._is_at_target and self.step_proof is not None:
            self.step_proof.begin(optimizer)
        if not self._is_at_target or not self.step_from:
            return False
        is_before_step = self._target.fields.is_before_step
        try:
            mirror.load_step(self.step_from, None if is_before_step else optimizer)
            self._taken_again = optimizer
        except Exception as error:  # the step must not be taken with half of the state
            self.refuse(f"the step of boundary {self.boundary} cannot be taken again from the mirror: {error!r}")
        if is_before_step:
            self._go_live(is_before_step=True)
        return is_before_step

    def leaves_step_out(self, frame: FrameType) -> bool:
        """Whether a GradScaler has left out the lost rank's step at this place: it is not the next boundary's."""
        if not self._has_arrived:
            return False
        number = self._passed + 1
        record = self._target if number == self.boundary else replayable.read_record(self.session[Recorder], number)
        if not self._difference(record, frame):
            return False
        self._steps_left_out += 1
        return self._steps_left_out <= STEPS_TO_LOOK_FOR

    def _arrive(self, frame: FrameType, returned: Any, optimizer: Any) -> Any:
        """The script is before a step: if that is at a record's place, restore the record."""
        if placeholders.wanted():
            self.refuse(
                "the optimizer steps inside an iterator whose items a replay has to skip: step in the loop body"
            )
        if self._has_arrived:
            self._passed += 1
            is_target = self._passed == self.boundary
            record = self._target if is_target else replayable.read_record(self.session[Recorder], self._passed)
            difference = self._difference(record, frame, optimizer)
            if difference:
                self.refuse(f"the replay is not at the place of boundary {self._passed}: {difference}")
            if is_target:
                self._findings.note_equal(record)
            if self._before is not None:
                self._findings.compare_random_states(record)
            self._is_at_target = is_target
            restore, returned = self._restore(record, frame, returned, is_comparing=is_target)
            restore.forget()
            return returned
        assert self._before is not None
        difference = self._difference(self._before, frame, optimizer)
        if not difference:
            self._is_at_target = self._before is self._target
            if self._is_at_target:
                self._findings.note_equal(self._before)
            restore, returned = self._restore(self._before, frame, returned, is_comparing=self._is_at_target)
            restore.forget()
            self._has_arrived = True
            self._passed = self._before.fields.boundary
            loops.give_back()
            return returned
        self._note_other_place(difference)
        return returned

    def _note_setup(self) -> None:
        if self.setup_s is None:
            self.setup_s = time.monotonic() - self._began_s

    def _note_other_place(self, difference: str) -> None:
        """This step is not yet where the replay begins. Refuses after STEPS_TO_LOOK_FOR such steps."""
        self._steps_passed += 1
        self.difference = self.difference or difference
        if self._steps_passed > STEPS_TO_LOOK_FOR:
            begins_at = self._before.fields.boundary if self._before is not None else self.boundary
            self.refuse(f"the replay does not reach the place of boundary {begins_at}: {difference}")

    def _difference(self, record: Record, frame: FrameType, optimizer: Any = None) -> str:
        """How this place, or the optimizer that steps here, differs from a record's, "" if they are the same."""
        why_never = replayable.why_never(record.fields)
        if why_never:
            self.refuse(why_never)
        difference = difference_of_place(record.fields, frame, is_before_target=record is not self._target)
        difference = difference or difference_of_stepping(record.fields, optimizer)
        if difference:
            return difference
        is_target = record is self._target
        before = None if self._before is None or self._before is record else self._before.fields
        difference = difference_of_batches(record.fields, before, is_target)
        if difference:
            return difference
        is_run_again = record is not self._before or is_target
        return replayable.why_other_numbers(record.fields) if is_run_again else ""

    def _restore(self, record: Record, frame: FrameType, returned: Any, is_comparing: bool) -> tuple[Restore, Any]:
        """Write a record into the variables; returns the lost rank's closure result, too."""
        fields = record.fields
        if is_comparing and (difference := difference_of_optimizers(fields)):
            self.refuse(difference)
        # Variables that hold optimized tensors are recorded by index, which for parameters is the same here.
        is_alike = optimizer_registry.counts_now() == fields.stepped
        stepped = optimizer_registry.stepped_tensors() if is_alike else list(optimizer_registry.parameters())
        restore = Restore(record.blobs, is_comparing, stepped, self.session.options.is_strict)
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
                    zip(optimizer_registry.optimizers(), fields.optimizers, strict=is_comparing)
                ):
                    restore.value(optimizer, node, f"optimizer {index}")
                returned = restore.value(returned, fields.returned, "the closure's result")
        except CannotRestoreError as error:
            self.refuse(str(error))
        self._findings.weigh(restore, self.is_joining)
        random_state.restore(fields.rng)
        loaders.count_on(fields.loaders_made)
        return restore, returned

    def _import_modules(self, names: Iterable[str], is_comparing: bool) -> dict[str, ModuleType]:
        """Import the user's modules of these names, also those that the replay has not imported yet."""
        found = {}
        for name in names:
            try:
                found[name] = importlib.import_module(name)
            except Exception as error:  # whatever the module does
                if is_comparing:
                    self.refuse(f"the lost rank had imported the module {name}, which fails in the replay: {error!r}")
        return found

    def after_step(self) -> None:
        """Post-hook of Optimizer.step: at the boundary, wait for the tensors and go live."""
        if self._is_at_target:
            if self.step_proof is not None and (why_not := self.step_proof.end(self.boundary, self._findings)):
                self.session.give_up_protection(why_not)  # nor would it help if all ranks began at a stored state
                self.refuse(why_not)
            self._go_live(is_before_step=False)

    def _go_live(self, is_before_step: bool) -> None:
        """The boundary is reached: wait for the tensors and the connections, and take part from here on.

        is_before_step   the boundary's step is taken with the other ranks: all that it begins with is loaded
        """
        session = self.session
        if self._target.fields.is_before_step:
            session.note_collective_step()
        if self.is_contradicted and not proof.is_decisive(session, self.boundary):
            self.refuse(
                f"a replay of this script has differed from the run, and the rank had left no loss of step "
                f"{self.boundary} that would show whether this one does"
            )
        if self.is_joining and (made := self._target.fields.groups_made):
            # A replay passes over trainings that have ended, and the groups that they have made and destroyed.
            for group in groups_of(session):
                group.count_as(made)
            session.made.by_ranks = Counter(made)
        moments.reached("replay")
        self._findings.report()
        session.channel.send(from_rank.Replayed(session.generation, self.boundary, self.setup_s))
        self.live.wait()  # until the recovery thread sets it; at its deadline the agent kills this process
        self._order_buckets()
        if not is_before_step:
            if self._taken_again is not None:
                kept_gradients.note_step(self._taken_again)
            gradients.poison(
                optimizer_registry.optimizers(),
                lambda: report_mismatch(session.channel, session.generation, gradients.CARRIED),
            )
        self._output.end(*self.skip_lines)
        files.unmute(session, self._target.fields.files, self.boundary, self._target.fields.at_ns)
        origins.end()
        session[Results].begin_step(self.boundary)
        for site in loop_sites.sites.values():
            if site.key in self._target.fields.has_steps:
                site.note_step()
        session[KeptWeights].is_kept = self._target.fields.kept
        if not is_before_step:
            session.row[Field.STEPPED] = self.boundary
            session[KeptWeights].note(self.boundary)
        session.mode = LIVE
        if session.made.living:
            session.join()
        else:
            session.trains_alone = session.world_size > 1
        session.applied = self.boundary
        session.made.pass_boundary()
        session.board.announce(session.rank, Field.APPLIED, self.boundary)
        session.board.announce(session.rank, Field.RECORDED, self.boundary)
        session.board.set(session.rank, Field.MEETINGS, 0)
        if not is_before_step:
            session[Mirror].begin(session, self.boundary)
        session.touch(Phase.COMPUTING)

    def _order_buckets(self) -> None:
        """Rebuild DDP's buckets if the lost rank's were: DDP does it once, at its second step, with all ranks."""
        for model, was_rebuilt in zip(optimizer_registry.wrapped_models(), self._target.fields.rebuilt, strict=False):
            if was_rebuilt and not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True

    def refuse_end(self) -> None:
        """The script has ended before its boundary. Does not return."""
        why = f": {self.difference}" if self.difference else ""
        words = self._output.last_words()
        said = f"; the script's last words: {words}" if words else ""
        self.refuse(f"the replay reached the script's end and not boundary {self.boundary}{why}{said}")

    def refuse(self, reason: str, is_contradiction: bool = True) -> None:
        """Report that this replay has failed. Does not return. `is_contradiction` is as in from_rank.Mismatch."""
        report_mismatch(self.session.channel, self.session.generation, reason, is_contradiction)


def _origins_of(session: Session) -> set[str]:
    return {place for place, _ in results.origins_in(session[Recorder].read_log())}
