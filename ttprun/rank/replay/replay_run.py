"""The replay of a lost rank: how a replacement reaches the lost rank's boundary N.

The replacement runs the user's script from the top, as capture/replay/replay.py says; collectives do not communicate.
At boundary N the optimizer steps (to make its state, and draw its random numbers), its tensors are overwritten by a
survivor's, and the replacement goes live.

A replay that cannot reproduce something is refused: every failed check is reported to the agent with a reason.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from ttprun.capture.effects.effects import Effects
from ttprun.capture.records.packing import Record
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.replay.jumps import Findings
from ttprun.capture.replay.replay import Replay
from ttprun.groups import thread_collectives
from ttprun.groups.process_group import groups_of
from ttprun.groups.results import ENDED, ISSUED, Answers, Results, as_if_alone
from ttprun.introspect import fail_open, stages
from ttprun.introspect.current_rank import Mode, Rank
from ttprun.introspect.tensor_bytes import bytes_of
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field, Phase
from ttprun.protocol.reason import Reason
from ttprun.rank import proof
from ttprun.rank.proof import MismatchError, report_mismatch
from ttprun.rank.replay.kept_steps import Given
from ttprun.rank.step import special_steps
from ttprun.tensors import gradients, mirror, open_boundaries, optimizer_registry, replicated
from ttprun.tensors.gradients import GRADIENT
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.mirror_slots import Stored
from ttprun.tensors.replicated import PostStepWeights

if TYPE_CHECKING:
    import torch

    from ttprun.groups.operations import Entry

# The step of an optimizer is proved, too, where the lost rank alone held its part of the state.
#
# Nobody holds the same as such a rank, so nothing would show if the replacement's steps were others than its own:
# code of a library may keep what Python does not see (a running product of an Adam in C++). So the replacement takes
# the rank's last step again, from the mirror of the boundary before, and compares all of the result with what the
# rank had mirrored after it. Only then does it load that. If all ranks have gone back there is nothing to compare
# with: unless it is one of torch's own, the optimizer's step is named as not proved. Begin with `StepProof.end`.

STEP = "the step of its optimizer"
_ROUNDING = 4096  # units in the last place of the largest element, as between losses (evidence.is_close)


class StepProof:
    """Of one replay.

    step_from   slot of the mirror with what the last step began with; "": there is none
    result      slot with the state after it; "": there is none
    """

    def __init__(self, step_from: str, result: str) -> None:
        self._step_from = step_from
        self._result = result
        self._why_not = "" if step_from and result else "there is no mirror of the step before, or of what it gave"
        self._is_known = False  # an optimizer of torch, which keeps nothing beside its state

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """The step to the boundary is about to be taken in the replay: let it begin with what the lost rank's did."""
        self._is_known = type(optimizer).__module__.startswith("torch.optim.")
        if self._why_not:
            return
        try:
            mirror.load_step(self._step_from, optimizer)
        except Exception as error:
            self._give_up(error)

    def end(self, boundary: int, findings: Findings) -> Reason:
        """The step has been taken, and nothing else was loaded: compare; returns why the replay is to be refused."""
        difference = ""
        if not self._why_not:
            try:
                difference = _difference(Stored(self._result))
            except Exception as error:
                self._give_up(error)
        if self._why_not and not self._is_known:
            findings.not_proved.append(f"{STEP}: {self._why_not}")
        elif self._why_not:
            pass
        elif not difference:
            findings.equal.append(f"the step of the optimizer to boundary {boundary}, taken again from the mirror")
        elif difference == TO_ROUNDING:
            findings.not_proved.append(
                f"{STEP}: taken again, it gives the lost rank's state to rounding, and not bit for bit, so it depends "
                "on something that is in no record (a library's own code may keep it)"
            )
        else:
            return Reason(
                "hidden-state",
                f"the step of the optimizer to boundary {boundary}, taken again from the mirror, does not give what it "
                f"gave in the lost rank ({difference} differs), so it depends on something that is in no record",
            )
        return Reason()

    def _give_up(self, error: Exception) -> None:
        fail_open.raise_if_meant(error)
        self._why_not = f"it cannot be taken again from the mirror ({error})"


TO_ROUNDING = "to rounding"


def _difference(stored: Stored) -> str:
    """Which tensor is other than in a slot; TO_ROUNDING if all that differ do so by rounding, "" if none differs."""
    difference = ""
    parts = [part for part in replicated.describe()[1] if not part.is_gradient]
    places = {key: at for key, at in zip(stored.keys, stored.state, strict=True) if not key.endswith(f"/{GRADIENT}")}
    if [part.key for part in parts] != list(places):
        return "what the optimizer keeps"
    for part in parts:
        theirs = stored.tensor(part.tensor, places[part.key])
        if bytes_of(part.tensor) == bytes_of(theirs):
            continue
        if not _is_close(part.tensor, theirs):
            return part.key
        difference = TO_ROUNDING
    return difference


def _is_close(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if not tensor.dtype.is_floating_point:
        return False
    here, there = tensor.detach().double().cpu(), other.double()
    largest = float(torch.maximum(here.abs().max(), there.abs().max()))
    return bool(((here - there).abs() <= _ROUNDING * torch.finfo(tensor.dtype).eps * largest).all())


_MOST_NAMED = 4  # hyperparameters
SET_VARIABLES = "a replay sets the variables where it jumps into a loop"  # among the origins: see `end_by_error`


_THREAD_LIMIT_S = 5.0  # in which a thread ends that the lost rank's record has as ended


class ReplayRun(Replay, Mode):
    """The state of a replay.

    live        set by the recovery thread when the tensors are loaded and the new generation is connected
    setup_s     the script's time from its top to its first optimizer step; None before that
    step_proof  set if no other rank goes on with the lost rank's state
    step_from   slot of the lost rank's mirror from which the step at boundary N is taken again; "": it is not
    is_joining, is_contradicted, given, debug   see to_rank.Replay
    sets_variables   a replay before this one has failed without; see `end_by_error`
    """

    step_from = given = debug = ""
    step_proof: StepProof | None = None
    _taken_again: torch.optim.Optimizer | None = None
    is_contradicted = False
    refused = MismatchError

    def __init__(self, session: Rank, target: Record, before: Record | None, answers: Answers) -> None:
        """A replay up to the record `target`, which first reaches the place of `before` (None: from the top)."""
        self.session = session
        super().__init__(session, optimizer_registry, target, before, session.options.is_strict)
        self.live = threading.Event()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []  # whose operations it has answered
        self.setup_s: float | None = None
        self._began_s = time.monotonic()
        self._answers = answers

    @classmethod
    def of_lost(cls, session: Rank, number: int) -> ReplayRun:
        """The replay of a lost rank's recorder.

        number   the boundary up to which the script is replayed

        Raises KeyError if there is no record of that boundary.
        """
        records, before = cls.records_of(session[Recorder], number)
        recent = [result for record in records for result in record.fields.results]
        replay = cls(session, records[-1], before, Answers(session[Recorder].read_log(), recent))
        replay.sets_variables = SET_VARIABLES in _origins_of(session)
        return replay

    def end_by_error(self, what: str) -> None:
        """As in Mode: an error that the variables of the iterations before would have avoided is no error of a run.

        Only if others go on: where all resume from a stored state, each attempt begins with that state's own log.
        """
        is_on_the_way = not self.has_arrived and self.jumps.loops_used
        if not (is_on_the_way and self.is_joining) or SET_VARIABLES in _origins_of(self.session):
            return
        Effects(self.session[Recorder]).keep_origin(SET_VARIABLES, True)
        why = Reason(
            "other-place",
            f"the replay jumps into a loop without what the iterations before have made, and has met {what}",
        )
        report_mismatch(self.session.channel, self.session.generation, why, is_near=True)

    @property
    def step(self) -> int:
        """As in Mode."""
        return self.newest_step if self.has_arrived or self.jumps.loops_used else 0

    def answer(self, entry: Entry) -> bool:
        """Fill a collective's outputs: with the lost rank's result, if that was small, else with its own inputs.

        Another thread's own waits for the end of the replay, unless the lost rank's thread had ended before that.
        """
        answers, place, newest = self._answers, entry.place, self.newest_step
        if entry.is_apart and place and self.has_arrived:
            newest = self.boundary - 1
            has_ended = answers.has(ENDED + place)
        else:
            has_ended = True
        if has_ended and place and answers.answer(place, entry.outputs, newest, entry.is_apart):
            if entry.is_apart:
                answers.answer(ISSUED + place, [], math.inf, True)
                self._threads.append(threading.current_thread())
            return True
        if not has_ended:
            self._is_over.wait()  # if the script waits for the thread, the agent's deadline ends this process
            return self._answer_late(entry)
        as_if_alone(entry)
        return True

    def _answer_late(self, entry: Entry) -> bool:
        """Answer an operation of a thread that this replay, which is over, has started; as in Mode."""
        expected = self.session.expected
        inputs = entry.own_inputs
        was_issued = self._answers.answer(ISSUED + entry.place, inputs, math.inf, True)
        entry.is_carried = expected is not None and expected.take_carried(entry)
        if not was_issued:
            self._name(entry, "gives what a replay has computed: the lost rank had not come to it")
            return False
        if entry.is_carried or (expected is not None and expected.awaits(entry)):
            return False
        if not self._answers.answer(entry.place, entry.outputs, math.inf, True):
            as_if_alone(entry)
            self._name(entry, "has this rank's own input as its result, which the lost rank had not come to")
        return True

    def _name(self, entry: Entry, why: str) -> None:
        line = entry.place.partition(" in a thread of step ")[0].rpartition("/")[2]
        thread = threading.current_thread().name
        proof.report(self.session, [], [f"{entry.op} of thread {thread!r} ({line}) {why}"])

    def is_decisive(self) -> bool:
        """As in Replay."""
        return proof.is_decisive(self.session, self.boundary)

    # Boundaries.

    def before_step(self, frame: FrameType, returned: Any = None, optimizer: Any = None) -> Any:
        """As in Replay; see step_hooks.before_step."""
        if self.setup_s is None and not self.is_joining:
            with contextlib.suppress(Exception):  # they are named, and no more
                self.report_hyperparameters(self.other_hyperparameters())
        self._note_setup()
        for thread in self._threads:  # what they write to the variables is in the record
            thread.join(_THREAD_LIMIT_S)
        self._threads.clear()
        return super().before_step(frame, returned, optimizer)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """What the step begins with is the lost rank's, all of it if it is taken again: refuses if it cannot be.

        returns   as in Mode: a collective step is taken with the other ranks
        """
        special_steps.take_over(optimizer)
        if self.is_at_target and open_boundaries.is_in_backward():  # after a forward pass with the set-up's weights
            self.refuse(
                Reason(
                    "step-in-backward", f"step {self.boundary} is taken inside a backward pass, whose rest would differ"
                )
            )
        if self.is_at_target and self.step_proof is not None:
            self.step_proof.begin(optimizer)
        if not self.is_at_target or not self.step_from:
            return False
        is_before_step = self.target.fields.is_before_step
        try:
            mirror.load_step(self.step_from, None if is_before_step else optimizer)
            self._taken_again = optimizer
        except Exception as error:  # the step must not be taken with half of the state
            self.refuse(
                Reason(
                    "stored-state-unusable",
                    f"the step of boundary {self.boundary} cannot be taken again from the mirror: {error!r}",
                )
            )
        if is_before_step:
            self._go_live(is_before_step=True)
        return is_before_step

    def report_hyperparameters(self, differing: Sequence[str]) -> None:
        """Report, once a job, which of the script's are not the checkpoint's: a phrase each."""
        if differing and self.session.rank == 0:
            named = "; ".join(differing[:_MOST_NAMED])
            note = from_rank.Note(f"{named} (choose by --resume-hyperparameters script|checkpoint)")
            self.session.channel.send(note)

    def _note_setup(self) -> None:
        if self.setup_s is None:
            self.setup_s = time.monotonic() - self._began_s

    def after_step(self) -> None:
        """Post-hook of Optimizer.step: at the boundary, wait for the tensors and go live."""
        if self.is_at_target:
            if self.step_proof is not None and (why_not := self.step_proof.end(self.boundary, self.findings)):
                self.session.give_up_protection(why_not)  # nor would it help if all ranks began at a stored state
                self.refuse(why_not)
            self._go_live(is_before_step=False)

    def _go_live(self, is_before_step: bool) -> None:
        """The boundary is reached: wait for the tensors and the connections, and take part from here on.

        is_before_step   the boundary's step is taken with the other ranks: all that it begins with is loaded
        """
        session = self.session
        if self.target.fields.is_before_step:
            session.note_collective_step()
        if self.is_contradicted and not proof.is_decisive(session, self.boundary):
            self.refuse(
                Reason(
                    "other-loss",
                    f"a replay of this script has differed from the run, and the rank had left no loss of step "
                    f"{self.boundary} that would show whether this one does",
                )
            )
        if self.is_joining and (made := self.target.fields.groups_made):
            # A replay passes over trainings that have ended, and the groups that they have made and destroyed.
            for group in groups_of(session):
                group.count_as(made)
            session.made.by_ranks = Counter(made)
        stages.reached("replay")
        self.findings.report()
        session.channel.send(from_rank.RankReplayed(session.generation, self.boundary, self.setup_s))
        self.live.wait()  # until the recovery thread sets it; at its deadline the agent kills this process
        self._order_buckets()
        if not is_before_step:
            if self._taken_again is not None:
                gradients.note_step(self._taken_again)
            gradients.poison(
                optimizer_registry.optimizers(),
                lambda: report_mismatch(session.channel, session.generation, gradients.CARRIED),
            )
        if self.given:  # what the script writes is not written again
            self.output.end()
        else:
            self.unmute()
        session[Results].begin_step(self.boundary)
        session[PostStepWeights].is_kept = self.target.fields.kept
        if not is_before_step:
            session.row[Field.STEPPED] = self.boundary
            session[PostStepWeights].note(self.boundary)
        thread_collectives.Replayed.boundary, thread_collectives.Replayed.answer = self.boundary, self._answer_late
        if self.given:
            session.stand_in(Given(session, self.given, self.debug))
        else:
            session.go_live()
        self._is_over.set()
        session.take_part()
        session.made.pass_boundary()
        session.stand_at(self.boundary)
        if not is_before_step:
            session[Mirror].begin(session, self.boundary)
        session.touch(Phase.COMPUTING)

    def _order_buckets(self) -> None:
        """Rebuild DDP's buckets if the lost rank's were: DDP does it once, at its second step, with all ranks."""
        for model, was_rebuilt in zip(optimizer_registry.wrapped_models(), self.target.fields.rebuilt, strict=False):
            if was_rebuilt and not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True

    def refuse(self, reason: Reason, is_contradiction: bool = True) -> None:
        """Report that this replay has failed. Does not return. `is_contradiction`: see `MismatchFound`."""
        report_mismatch(self.session.channel, self.session.generation, reason, is_contradiction)


def _origins_of(session: Rank) -> set[str]:
    return {place for place, _ in Effects(session[Recorder]).drawn()}
