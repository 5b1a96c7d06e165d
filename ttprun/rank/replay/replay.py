"""The replay: how a replacement gets to the place where the lost rank stood.

The replacement runs the user's script from the top. Collectives do not communicate, output goes to a log, loops jump to
the positions of the lost rank's records. It comes by the place of an earlier boundary first, mostly N-1: there the
variables and random states of that boundary are put in, and one more step is run, so that iterators and data fetched
ahead are where they were at boundary N. (With optimizers that step in turn, it begins at the newest boundary of the
same optimizer, so that the whole turn is run.) There the variables of boundary N are put in, the optimizer steps (so
that its state exists and it draws the random numbers that it draws), its tensors are overwritten by a survivor's, and
the replacement goes live.

What the replay cannot reproduce it refuses: every check that fails is told to the agent with a reason.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from ttprun.protocol import from_rank
from ttprun.protocol.board import Field, Phase
from ttprun.rank import moments
from ttprun.rank.checks import proof
from ttprun.rank.checks.replay_guard import MismatchError, report_mismatch
from ttprun.rank.comm.results import Answers, as_if_alone, as_result
from ttprun.rank.data import loaders
from ttprun.rank.effects import files, origins
from ttprun.rank.effects.output import Diverted
from ttprun.rank.position import loops, placeholders
from ttprun.rank.position.frames import place, user_frames
from ttprun.rank.process import random_state
from ttprun.rank.records import replayable
from ttprun.rank.records.record import Record
from ttprun.rank.session import Session
from ttprun.rank.values import CannotRestoreError, Restore, restore_loop, room_to_walk
from ttprun.rank.weights import gradients, optimizer_registry, sharded

if TYPE_CHECKING:
    from ttprun.rank.comm.journal import Entry

STEPS_TO_LOOK_FOR = (
    64  # optimizer steps that the replay may pass before it comes by the place of the first recorded boundary
)
_MOST_SKIPS = 100_000  # of one loop: a `while` loop around it may count by itself


class _Skip:
    """Token of a loop that is over in the lost rank, and would only train again."""


class Replay:
    """The state of a replay.

    boundary    the boundary N to reach
    live        set by the recovery thread once the tensors are in and the new generation is connected
    skip_lines  lines of stdout and stderr that the lost rank had written since boundary N
    setup_s     what the script itself has taken from its top to its first optimizer step; None before that
    difference  why the script's first step was not where the replay begins
    is_alone    collectives are answered without the other ranks
    jump        how a loop begins that was under way
    """

    is_alone = True
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
        """A replay up to one record by way of another one, by whose place the script comes first; None: by none."""
        self.session = session
        self.boundary = number
        self.live = threading.Event()
        self.skip_lines = skip_lines
        self.setup_s: float | None = None
        self._began_s = time.monotonic()
        self._target = target
        self._before = before
        self._answers = answers
        self._passed = 0  # newest boundary that the replay has come by
        self._has_arrived = self._before is None
        self._is_at_target = False
        self._steps_passed = 0
        self.difference = ""
        self._loops_used: set[int] = set()
        self._iterators_used: set[int] = set()
        self._skipped: dict[Any, int] = {}  # by loop, how often it was come to
        self._output = Diverted(session)
        self._equal: list[str] = []  # what was compared with the lost rank's
        self._not_proved: list[str] = []

    @classmethod
    def of_lost(cls, session: Session, number: int, skip_lines: tuple[int, int]) -> Replay:
        """The replay of what a lost rank has left in its recorder. Raises KeyError."""
        records = replayable.records_up_to(session.recorder, number)
        target, is_first = records[-1], len(records) == 1 and not records[-1]["is_straight"]
        before = None if is_first else records[0]
        recent = [as_result(packed) for record in records for packed in record["results"]]
        return cls(session, number, skip_lines, target, before, Answers(session.recorder.read_log(), recent))

    def begin(self) -> None:
        """Take over the loops' hooks; the script may start."""
        if self._before is not None:
            loops.take_over(self._enter, self._loop)

    # Loops and iterators, on the way to the first recorded boundary.

    def _enter(self, site: loops.Site, frame: FrameType) -> Any:
        recorded = self._loop_to_jump(site, frame)
        if recorded is None:
            assert self._before is not None
            return self._skip(site) if site.key in self._before["has_steps"] else random_state.capture()
        if recorded["began_with"] is not None:
            random_state.restore(recorded["began_with"])
        return recorded

    def _skip(self, site: loops.Site) -> type[_Skip]:
        """A loop that the lost rank had left behind trains no more; refuses if the script never comes past it."""
        self._skipped[site.key] = self._skipped.get(site.key, 0) + 1
        if self._skipped[site.key] > _MOST_SKIPS:
            self.refuse(
                f"the replay comes again and again to the loop at {site.key}, which the lost rank had left behind: a "
                "`while` loop around it ends by what is done in its steps; write that one as a `for` loop"
            )
        return _Skip

    def _loop_to_jump(self, site: loops.Site, frame: FrameType) -> dict[str, Any] | None:
        assert self._before is not None
        frames = user_frames(frame)
        depth = len(frames) - 1
        recorded_place = self._before["place"]
        here = place(frames)
        candidates: list[dict[str, Any]] = []
        if (
            depth < len(recorded_place)
            and here[:depth] == recorded_place[:depth]
            and here[depth][:2] == recorded_place[depth][:2]
        ):
            candidates += self._before["loops"][depth]
        candidates += self._before["generator_loops"]
        for candidate in candidates:
            if candidate["site"] == site.key and id(candidate) not in self._loops_used:
                self._loops_used.add(id(candidate))
                return candidate
        return None

    def _loop(self, site: loops.Site, token: Any, iterable: Iterable[Any]) -> Any:
        if token is _Skip:
            return loops.Loop(site, None, ())
        if isinstance(token, dict) and "site" in token:
            assert self._before is not None
            if token["site"] in self._before["has_steps"]:
                site.note_step()
            site.is_outer = token["item_rng"] is not None
            return self.jump(site, token, iterable)
        return loops.Loop(site, token, iterable)

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """The record of the DataLoader iterator that the lost rank had under way, for a loader of this name."""
        if self._has_arrived or self._before is None:
            return None
        left = [(i, it) for i, it in enumerate(self._before["loaders"]) if i not in self._iterators_used]
        same_name = [(i, it) for i, it in left if it["name"] == name]
        same_place = [(i, it) for i, it in left if it["name"][0] == name[0]]
        chosen = same_name[-1:] or (same_place if len(same_place) == 1 else [])
        for index, iterator in chosen:
            self._iterators_used.add(index)
            found: dict[str, Any] = iterator
            return found
        return None

    # Collectives.

    def answer(self, entry: Entry) -> None:
        """Fill a collective's outputs: what it gave in the lost rank, if that was small, else its own inputs."""
        newest = self._passed if self._has_arrived or self._before is None else self._before["boundary"] - 1
        if not (entry.place and self._answers.answer(entry.place, entry.outputs, newest)):
            as_if_alone(entry)

    # Boundaries.

    def before_step(self, frame: FrameType, returned: Any = None) -> Any:
        """An optimizer is about to change weights: see boundary.before_step.

        returned   what the step's closure returns here; gives back what it returned in the lost rank
        """
        self._note_setup()
        try:
            with room_to_walk():
                return self._come_to(frame, returned)
        except MismatchError:
            raise
        except Exception as error:  # the script must not go on with half of it
            self.refuse(f"the variables of the lost rank cannot be put in: {error!r}")

    def _come_to(self, frame: FrameType, returned: Any) -> Any:
        """The script stands before a step: where that is at a record's place, put in what the record holds."""
        if placeholders.wanted():
            self.refuse("the optimizer steps within an iterator whose items a replay has to pass over")
        if self._has_arrived:
            self._passed += 1
            is_target = self._passed == self.boundary
            record = self._target if is_target else replayable.read_record(self.session.recorder, self._passed)
            difference = self._difference(record, frame)
            if difference:
                self.refuse(f"the replay has come to another place than boundary {self._passed}: {difference}")
            if is_target:
                self._note_equal(record)
            if self._before is not None:
                self._compare_random_states(record)
            self._is_at_target = is_target
            return self._put_in(record, frame, returned, is_comparing=is_target)[1]
        assert self._before is not None
        difference = self._difference(self._before, frame)
        if not difference:
            self._is_at_target = self._before is self._target
            if self._is_at_target:
                self._note_equal(self._before)
            _, returned = self._put_in(self._before, frame, returned, is_comparing=self._is_at_target)
            self._has_arrived = True
            self._passed = self._before["boundary"]
            loops.give_back()
            return returned
        self._pass_by(difference)
        return returned

    def _note_setup(self) -> None:
        if self.setup_s is None:
            self.setup_s = time.monotonic() - self._began_s

    def _pass_by(self, difference: str) -> None:
        """This step is not yet where the replay begins. Refuses if it will never come there."""
        self._steps_passed += 1
        self.difference = self.difference or difference
        if self._steps_passed > STEPS_TO_LOOK_FOR:
            begins_at = self._before["boundary"] if self._before is not None else self.boundary
            self.refuse(f"the replay does not come by the place of boundary {begins_at}: {difference}")

    def _difference(self, record: Record, frame: FrameType) -> str:
        """Where this place differs from a record's, "" if it is the same."""
        why_never = replayable.why_never(record)
        if why_never:
            self.refuse(why_never)
        difference = difference_of_place(record, frame, is_on_the_way=record is not self._target)
        if difference:
            return difference
        mine, lost = _by_name(loaders.records()), _by_name(record["loaders"])
        yielded, expected = ([[it["name"], it["yielded"]] for it in known] for known in (mine, lost))
        if [count for _, count in yielded] != [count for _, count in expected]:
            return f"its DataLoaders have handed out {yielded}, the lost rank's {expected}"
        if record is self._target:
            before = None if self._before is record else self._before
            used = {tuple(it["name"]): it["yielded"] for it in before["loaders"]} if before else {}
            if any(
                here["batch"] != there["batch"] and there["yielded"] != used.get(tuple(there["name"]))
                for here, there in zip(mine, lost, strict=True)
            ):
                return "a DataLoader has handed out another batch than in the lost rank"
        is_run_again = record is not self._before or record is self._target
        return replayable.why_other_numbers(record) if is_run_again else ""

    def _put_in(self, record: Record, frame: FrameType, returned: Any, is_comparing: bool) -> tuple[Restore, Any]:
        """Write what a record holds into the variables; returns what its closure returned, too."""
        if is_comparing:
            self._compare_optimizers(record)
        # Variables that hold what optimizers update are told by its place. Of the parameters that is the same here.
        is_alike = optimizer_registry.counts_now() == record["stepped"]
        stepped = optimizer_registry.stepped_tensors() if is_alike else list(optimizer_registry.parameters())
        restore = Restore(record.blobs, is_comparing, stepped)
        modules = self._import_modules(record["modules"], is_comparing)
        try:
            frames = user_frames(frame)
            for depth, (user_frame, variables) in enumerate(zip(frames, record["variables"], strict=True)):
                restore.frame(user_frame, variables, f"{record['place'][depth][1]}: ")
            for user_frame, recorded in zip(frames, record["loops"], strict=True):
                for loop, fields in zip(loops.of_frame(user_frame), recorded, strict=True):
                    restore_loop(restore, loop, fields)
            for name, module in modules.items():
                restore.module(vars(module), record["modules"][name], f"{name}: ")
            for index, (optimizer, node) in enumerate(
                zip(optimizer_registry.optimizers(), record["optimizers"], strict=is_comparing)
            ):
                restore.value(optimizer, node, f"optimizer {index}")
            returned = restore.value(returned, record.fields.get("returned"), "what the closure returns")
        except CannotRestoreError as error:
            self.refuse(str(error))
        if restore.mismatches:
            self.refuse("the script cannot be replayed: " + "; ".join(restore.mismatches[:3]))
        random_state.restore(record["rng"])
        return restore, returned

    def _import_modules(self, names: Iterable[str], is_comparing: bool) -> dict[str, ModuleType]:
        """The user's modules of these names, those among them that the replay has not come by too."""
        found = {}
        for name in names:
            try:
                found[name] = importlib.import_module(name)
            except Exception as error:  # whatever the module does
                if is_comparing:
                    self.refuse(f"the lost rank had loaded the module {name}, and here that fails: {error!r}")
        return found

    def _note_equal(self, record: Record) -> None:
        """The target's place has been compared, with all that says where the script stands."""
        loops_ = sum(map(len, record["loops"]))
        batches = [it for it in record["loaders"] if it["batch"]]
        counted = [(loops_, "loop", "loops"), (len(batches), "batch of a DataLoader", "batches of DataLoaders")]
        told = [f"{count} {many if count != 1 else one}" for count, one, many in counted if count]
        self._equal.append(f"{', '.join(['place in the script', *told])} at boundary {record['boundary']}")

    def _compare_random_states(self, record: Record) -> None:
        """The replay comes to a boundary from one at which it was given the lost rank's random states.

        In between it draws as many numbers as the lost rank did, unless something has changed that nobody records, or
        how many are drawn follows from the weights, which are not the lost rank's yet. What the lost rank has given to
        the step behind the boundary tells these two cases apart, if it has given anything.
        """
        here = random_state.capture()
        names = sorted(here.keys() & record["rng"].keys())
        differing = [name for name in names if here[name] != record["rng"][name]]
        at = f"at boundary {record['boundary']}"
        if not differing:
            self._equal.append(f"random states ({', '.join(names)}) on arriving {at}")
            return
        told = f"the replay has arrived {at} with other random states ({', '.join(differing)}) than the lost rank"
        if not proof.is_decisive(self.session, self.boundary):
            self.refuse(
                f"the script cannot be replayed: {told}: what the steps draw follows from something that is not "
                "recorded, or from the weights; and nothing of the step behind it is left to compare"
            )
        self._not_proved.append(f"{told}, whose states it was given")

    def _compare_optimizers(self, record: Record) -> None:
        """Refuses if they have other parameters than in the lost rank."""
        found = [parameters for parameters, _ in optimizer_registry.counts_now()]
        before = [parameters for parameters, _ in record["stepped"]]
        if len(found) != len(before):
            self.refuse(f"the script has made {len(found)} optimizers in the replay, {len(before)} before")
        for index, (here, lost) in enumerate(zip(found, before, strict=True)):
            if here != lost:
                self.refuse(
                    f"optimizer {index} has {lost} parameters in the lost rank and {here} in the replay: "
                    "what the steps before have added to it (add_param_group?), the replay has passed over"
                )

    def after_step(self) -> None:
        """Post-hook of Optimizer.step: at the boundary, wait for the tensors and go live."""
        if not self._is_at_target:
            return
        session = self.session
        moments.reached("replay")
        if sharded.are_any(optimizer_registry.parameters()):
            sharded.tell(session.channel)
        proof.tell(session, self._equal, self._not_proved)
        session.channel.send(from_rank.Replayed(session.generation, self.boundary, self.setup_s))
        self.live.wait()  # ended by the recovery thread, or by the agent's deadline, which ends the process
        self._order_buckets()
        gradients.poison(optimizer_registry.optimizers())
        self._output.end(*self.skip_lines)
        files.unmute(session, self._target["files"], self.boundary)
        origins.end()
        session.results.begin_step(self.boundary)
        for site in loops.sites.values():
            if site.key in self._target["has_steps"]:
                site.note_step()
        session.kept_weights.is_kept = self._target["kept"]
        session.kept_weights.note(self.boundary)
        session.replay = None
        if session.groups:
            session.join()
        else:
            session.trains_alone = session.world_size > 1
        session.applied = self.boundary
        session.board.announce(session.local_rank, Field.APPLIED, self.boundary)
        session.board.announce(session.local_rank, Field.RECORDED, self.boundary)
        session.board.set(session.local_rank, Field.MEETINGS, 0)
        session.touch(Phase.COMPUTING)

    def _order_buckets(self) -> None:
        """DDP orders its buckets anew at its second step, with all ranks; the lost rank has been there."""
        for model, was_rebuilt in zip(optimizer_registry.wrapped_models(), self._target["rebuilt"], strict=False):
            if was_rebuilt and not model._has_rebuilt_buckets and model.reducer._rebuild_buckets():
                model._has_rebuilt_buckets = True

    def refuse(self, reason: str) -> None:
        """This replay has failed. Does not return."""
        report_mismatch(self.session.channel, self.session.generation, reason)


def difference_of_place(record: Record, frame: FrameType, is_on_the_way: bool = False) -> str:
    """Where the code and its loops stand otherwise than in a record, "" if it is the same.

    is_on_the_way   the items are not compared of what will only now be made to go on as in the lost rank, such as a
                    generator that counts
    """
    frames = user_frames(frame)
    here = place(frames)
    if here != record["place"]:
        return f"it stands at {_told(here)}, the lost rank at {_told(record['place'])}"
    for user_frame, recorded in zip(frames, record["loops"], strict=True):
        active = loops.of_frame(user_frame)
        positions = [[loop.site.key, loop.position, loop.current] for loop in active]
        expected = [[loop["site"], loop["position"], loop["current"]] for loop in recorded]
        if is_on_the_way and len(active) == len(recorded):
            for at, loop in enumerate(recorded):
                if loop["over"] is not None:
                    expected[at][2] = positions[at][2]
        if positions != expected:
            return f"its loops stand at {positions}, the lost rank's at {expected}"
    return ""


def _by_name(iterators: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In an order that does not depend on which was made first."""
    return sorted(iterators, key=lambda it: (it["name"], it["yielded"]))


def _told(where: list[list[Any]]) -> str:
    return " > ".join(f"{function}:{line}" for _, function, line in where) or "(no user code)"
