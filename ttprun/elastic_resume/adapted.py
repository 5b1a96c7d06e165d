"""Resume from a checkpoint of other ranks, or of other arguments.

All ranks run the script from its top, and their setup is live: collectives really communicate, so that rank, world size
and all that depends on them are the new run's. As in a replay, output goes to a log, loops jump to the old run's
positions, and DataLoaders begin with the rest of the epoch. The first step after the jump is trained on any data, and
undone: at the old run's boundary, what the training had changed is written into the variables (merge.py), then the
checkpoint's tensors are loaded, and the job resumes there.

There is no undisturbed run to compare with. What does not match is refused, with a reason.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from types import FrameType
from typing import Any

import msgpack
import torch
import xxhash
from msgspec.structs import replace
from torch.nn.modules.module import register_module_forward_pre_hook

from ttprun.capture.data import loaders, rest_of_epoch
from ttprun.capture.effects import script_files
from ttprun.capture.position import loops
from ttprun.capture.recording import look, tree_of
from ttprun.capture.records.nodes import NumpyRandomNode, RandomNode
from ttprun.capture.records.packing import BoundaryRecord, LoopRecord, Record
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.replay.combined import spoil, state_of
from ttprun.capture.replay.jumps import difference_of_place
from ttprun.capture.replay.merge import Merge
from ttprun.capture.values import CannotRestoreError, Tree, pack
from ttprun.groups.journal import Journal
from ttprun.groups.results import Answers
from ttprun.introspect import random_state
from ttprun.introspect.current_rank import Rank
from ttprun.introspect.random_state import RngState
from ttprun.protocol.reason import Reason
from ttprun.protocol.to_rank import Adapt
from ttprun.rank.proof import MismatchError
from ttprun.rank.replay.replay_run import ReplayRun
from ttprun.rank.step.record import describe, steps_now

# Random states for ranks that the old run did not have: derived from those of an old rank, and never the same. Ranks
# that draw the same numbers (with a common seed, to decide alike) must continue to do so: a state that two old ranks
# share is kept for the new rank.

_TORCH_SEEDS, _NUMPY_SEEDS = (1 << 63) - 1, (1 << 32) - 1


class Derived:
    """The random states of one new rank.

    of       the new rank, or what it shares with new ranks that must draw the same
    common   the states that another old rank has too, packed, see `states_in`
    """

    def __init__(self, of: int | bytes, common: set[bytes]) -> None:
        self._of = of
        self._common = common

    def states(self, recorded: random_state.RngState) -> random_state.RngState:
        """The global generators' states, derived from an old rank's."""
        return {name: self._state(name, state) for name, state in recorded.items()}

    def record(self, last: BoundaryRecord) -> BoundaryRecord:
        """An old rank's record with derived states, and without its files."""
        loaders = [
            iterator
            | {
                "rng": self.states(iterator["rng"]),
                "generators": list(map(self.torch_state, iterator["generators"])),
            }
            for iterator in last.loaders
        ]
        return replace(
            last,
            rng=self.states(last.rng),
            loops=[list(map(self._loop, of_frame)) for of_frame in last.loops],
            generator_loops=list(map(self._loop, last.generator_loops)),
            loaders=loaders,
            files=[],
        )

    def _loop(self, loop: LoopRecord) -> LoopRecord:
        began_with, item_rng = (state and self.states(state) for state in (loop.began_with, loop.item_rng))
        return replace(loop, began_with=began_with, item_rng=item_rng)

    def _state(self, name: str, state: Any) -> Any:
        if pack([name, state]) in self._common:
            return state
        seed = self._seed([name, state])
        if name == "python":
            return random_state.state_of_python(random.Random(seed))
        if name == "torch":
            return self._torch(seed)
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return state
        return random_state.pack_mersenne(numpy.random.RandomState(seed & _NUMPY_SEEDS).get_state(legacy=False))

    def torch_state(self, state: bytes) -> bytes:
        """The state of a torch.Generator, derived from an old rank's."""
        return bytes(self._state("torch", state))

    def reseed(self, generator: Any, recorded: list[Any]) -> None:
        """Reseed a generator that has an old rank's state, so that it draws other numbers.

        recorded   kind and state from the record
        """
        if pack(recorded) in self._common:
            return
        seed = self._seed(recorded)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed & _TORCH_SEEDS)
        elif isinstance(generator, random.Random):
            generator.seed(seed)
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = type(generator.bit_generator)(seed).state
        elif hasattr(generator, "state"):
            generator.state = type(generator)(seed).state
        else:
            generator.seed(seed & _NUMPY_SEEDS)

    def _seed(self, recorded: list[Any]) -> int:
        return xxhash.xxh3_64_intdigest(pack([*recorded, self._of]))

    @staticmethod
    def _torch(seed: int) -> bytes:
        generator = torch.Generator()
        generator.manual_seed(seed & _TORCH_SEEDS)
        return generator.get_state().numpy().tobytes()


def states_in(fields: BoundaryRecord, generators: list[list[Any]]) -> set[bytes]:
    """Every random state in a boundary's record, packed.

    generators   kind and state of those in variables
    """
    states = [fields.rng, *(state for loop in fields.active() for state in (loop.began_with, loop.item_rng) if state)]
    states += [iterator["rng"] for iterator in fields.loaders]
    packed = {pack([name, state]) for by_name in states for name, state in by_name.items()}
    packed |= {pack(["torch", state]) for iterator in fields.loaders for state in iterator["generators"]}
    return packed | set(map(pack, generators))


# Which old rank a new one continues: the one that was like it when both had set themselves up.


MOST = 64  # old ranks that are looked at


@dataclass(frozen=True)
class OldRank:
    """Two records of a rank of the old run: of its first step, and of its last one."""

    first: Record
    last: Record


@dataclass(frozen=True)
class Closest:
    """What was found out.

    rank     the old rank; None: none was like this one, or all were
    seeds    of this one's generators, if it is like none, and some old ranks were like each other: what it would go on
             with, another rank has, too; b"": else
    """

    rank: int | None
    seeds: bytes = b""


def closest(old: Sequence[OldRank], mine: Tree, rng: RngState, default: int) -> Closest:
    """Compare the random generators of the first records with this rank's after its set-up: those that training uses.

    mine      its record of the same place in the script
    rng       the states of its global generators there
    default   the rank that is taken among equals
    """
    firsts = [_generators_of(Tree(*rank.first), rank.first.fields.rng) for rank in old]
    lasts = [_generators_of(Tree(*rank.last), rank.last.fields.rng) for rank in old]
    here = _generators_of(mine, rng)
    telling = [
        place
        for place in firsts[0]
        if any(first.get(place) != firsts[0][place] for first in firsts)
        and any(first.get(place) != last.get(place) for first, last in zip(firsts, lasts, strict=True))
    ]
    # The others were not seeded, or are seeded with what no old rank was seeded with.
    seeded = [place for place in telling if any(first.get(place) == here.get(place) for first in firsts)]
    like_mine = [
        number for number, first in enumerate(firsts) if all(first.get(place) == here.get(place) for place in seeded)
    ]
    if seeded and like_mine:
        return Closest(default if default in like_mine else like_mine[0])
    are_shared = any(
        first.get(place) == other.get(place) for place in telling for first, other in combinations(firsts, 2)
    )
    # New ranks that train on the same data have the same seeds, and must draw the same: they continue the same rank.
    return Closest(0, pack([here.get(place) for place in telling])) if are_shared else Closest(None)


def _generators_of(tree: Tree, rng: RngState) -> dict[Any, Any]:
    """The states of the global random generators, and of those in variables: by scope and name."""
    states: dict[Any, Any] = dict(rng)
    for which, scope in (*enumerate(tree.variables), *tree.modules.items()):
        for name, node in scope.items():
            generator = tree.resolve(node)
            if isinstance(generator, RandomNode | NumpyRandomNode):
                states[which, name] = state_of(generator)
    return states


class Adapted(ReplayRun):
    """The setup of one rank of the new run, up to the old run's boundary.

    adapt   the old ranks whose variables it takes
    """

    is_alone = False
    jump = loops.JumpToNewEnd

    def __init__(self, session: Rank, number: int, adapt: Adapt) -> None:
        self.session = session
        self._paths, self._hyperparameters = adapt.paths, adapt.hyperparameters
        self._derived: Derived | None = None
        self._is_resized = session.world_size != len(adapt.paths)
        self._default = session.rank % len(adapt.paths)
        last = self._take(self._default, session.rank if session.rank >= len(adapt.paths) else None)
        super().__init__(session, last, last, Answers([], []))
        self._before_first_step: Tree | None = None
        self._forward = register_module_forward_pre_hook(self._before_forward)

    def _take(self, number: int, draws: int | bytes | None) -> Record:
        """Continue an old rank; returns its last record.

        draws   another rank continues it, too: from what this one's random numbers are derived; None: none does
        """
        old = _old_rank(self._paths[number])
        last, self._derived = old.last, None
        if draws is not None:
            others = [other for other in range(min(len(self._paths), MOST)) if other != number]
            records = [_old_rank(self._paths[other]).last for other in others]
            states = [
                states_in(
                    record.fields,
                    [
                        state_of(node)
                        for node in Tree(*record).definitions.values()
                        if isinstance(node, RandomNode | NumpyRandomNode)
                    ],
                )
                for record in records
            ]
            self._derived = Derived(draws, set.intersection(*states) if states else set())
            last = Record(self._derived.record(last.fields), last.blobs)
        self._first, self._old = old.first, Tree(*last)
        return last

    def _take_closest(self, mine: Tree, rng: RngState) -> None:
        """Continue the old rank that was like this one; its own setup, `mine` and its random states, shows it."""
        donor = closest([_old_rank(path) for path in self._paths[:MOST]], mine, rng, self._default)
        if donor.rank is not None and (donor.seeds or donor.rank != self._default or self._derived is not None):
            self.target = self._take(donor.rank, donor.seeds or None)

    def iterator_to_make(self, loader: Any, name: list[Any]) -> dict[str, Any] | None:
        """What a loader's iterator yields: dummies, and then the rest of the epoch."""
        recorded = super().iterator_to_make(loader, name)
        if recorded is None:
            return None
        source = rest_of_epoch.source_of(loader)
        try:
            rest_of_epoch.check(recorded["source"], source)
            rest = rest_of_epoch.rest_of(recorded)
        except rest_of_epoch.CannotDistributeError as error:
            where = name[0].rpartition("|")[2].rpartition("/")[2]
            self.refuse(
                Reason("resume-with-other-ranks", f"the DataLoader of {where} cannot resume with other ranks: {error}")
            )
        epochs = (recorded.get("first") or recorded)["epochs"]
        changed = {"yielded": 0, "lead": 0, "workers": None, "held": b"", "rest": rest, "seed": None}
        return recorded | changed | {"source": source, "epochs": epochs, "first": None}

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        """The first step begins with the first call of a model that trains: record the variables after the setup."""
        is_in_loop = bool(self.jumps.loops_used) or not any(self.target.fields.loops)
        if not is_in_loop or not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        self._forward.remove()
        try:
            self._before_first_step = look(sys._getframe(1), steps_now())
        except Exception as error:  # it must not end the script's own step
            self.refuse(
                Reason("resume-with-other-ranks", f"the variables before the first step cannot be read: {error!r}")
            )

    def before_step(self, frame: FrameType, returned: Any = None, optimizer: Any = None) -> Any:
        """Pre-hook of Optimizer.step: at the old run's boundary, take its variables."""
        assert not self.has_arrived
        self._note_setup()
        difference = difference_of_place(self.target.fields, frame) or self._difference_of_loaders()
        if difference:
            self.note_other_place(difference)
            return returned
        for entry in self.session[Journal].unfinished():
            self.session[Journal].wait(entry)
        try:
            returned = self._take_over(frame, returned)
        except MismatchError:
            raise
        except CannotRestoreError as error:
            self.refuse(Reason.of(error, "resume-with-other-ranks"))
        except Exception as error:  # the script must not run with half of the variables
            self.refuse(Reason("resume-with-other-ranks", f"the variables cannot be taken over: {error!r}"))
        self.has_arrived = self.is_at_target = True
        loops.give_back()
        return returned

    def _difference_of_loaders(self) -> Reason:
        """How far the iterators are from the dummies and what is read ahead; "" if they have yielded these."""
        handed = sorted((it["name"], it["yielded"]) for it in loaders.records())
        expected = sorted((it["name"], max(1, it["lead"])) for it in self.target.fields.loaders)
        if handed == expected:
            return Reason()
        return Reason(
            "other-batch", f"its DataLoaders have yielded {handed} in the first step, and in the old run {expected}"
        )

    def _take_over(self, frame: FrameType, returned: Any) -> Any:
        session = self.session
        fields, tensors, _ = describe(session, self.boundary, frame, returned)
        head, own_loaders = pack(fields), fields.loaders
        mine = tree_of(head, tensors)
        session[Recorder].write_first(self.boundary, head, tensors)
        self._take_closest(mine, fields.rng)
        per_loader = [it["ahead"] for it in self.target.fields.loaders]
        ahead = frozenset(fingerprint for fingerprints in per_loader for fingerprint in fingerprints or ())
        first = Tree(*self._first)
        self._forward.remove()
        if self._before_first_step is not None:
            spoil(first, self._before_first_step, mine)
        merge = Merge(first, self._old, mine, ahead, self._is_resized, self._hyperparameters)
        taken = Record(replace(self.target.fields, **merge.record()), merge.blobs)
        self.report_hyperparameters(merge.differing)
        if merge.left != ahead:
            raise CannotRestoreError(
                "prefetched batches are not in the variables as the DataLoader has made them, so they cannot be "
                "distinguished from other data"
            )
        restore, returned = self.restore(taken, frame, returned, is_comparing=True)
        if self._derived is not None:
            for number, state in merge.generators.items():
                self._derived.reseed(restore.object_of(number), state)
        old = replace(self.target.fields, files=script_files.positions_again(self.target.fields.files))
        self.target = Record(old, self.target.blobs)
        fields, tensors, _ = describe(session, self.boundary, frame, returned)
        fields = replace(fields, is_straight=True, weights=old.weights, files=old.files, held=old.held)
        fields = replace(fields, loaders=own_loaders)  # the restored variables may have overwritten the newest batch
        session[Recorder].write(self.boundary, pack(fields), tensors)
        return returned

    def _order_buckets(self) -> None:
        """Nothing to do: for DDP the first step was a real one, in all ranks."""
        self.session[Journal].clear()


def _read(path: str) -> dict[str, Any]:
    """A rank's own part of a checkpoint, whose digest the agent has compared."""
    part: dict[str, Any] = msgpack.unpackb(Path(path).read_bytes(), strict_map_key=False)
    return part


def log_of(adapt: Adapt, rank: int) -> list[bytes]:
    """The log of an old rank, of which this rank of the new run begins with the loops' positions."""
    return list(_read(adapt.paths[rank % len(adapt.paths)])["log"])


def _old_rank(path: str) -> OldRank:
    part = _read(path)
    return OldRank(Record.of(*part["first"][1:]), Record.of(*part["records"][-1][1:]))
