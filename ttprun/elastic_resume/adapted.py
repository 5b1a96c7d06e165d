"""Resume from a checkpoint of other ranks, or of other arguments.

All ranks run the script from its top, and their setup is live: collectives really communicate, so that rank, world size
and all that depends on them are the new run's. As in a replay, output goes to a log, loops jump to the old run's
positions, and DataLoaders begin with the rest of the epoch. The first step after the jump is trained on any data, and
undone: at the old run's boundary, what the training had changed is written into the variables (merge.py), then the
checkpoint's tensors are loaded, and the job resumes there.

There is no undisturbed run to compare with. What does not match is refused, with a reason.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import msgpack
import torch
from msgspec.structs import replace
from torch.nn.modules.module import register_module_forward_pre_hook

from ttprun.capture.data import loaders, rest_of_epoch
from ttprun.capture.effects import script_files
from ttprun.capture.position import loops
from ttprun.capture.recording import look, tree_of
from ttprun.capture.records.boundary_record import Record
from ttprun.capture.records.nodes import NumpyRandomNode, RandomNode
from ttprun.capture.records.recorder import Recorder
from ttprun.capture.replay.combined import spoil, state_of
from ttprun.capture.replay.findings import difference_of_place
from ttprun.capture.replay.merge import Merge
from ttprun.capture.values import CannotRestoreError, Tree, pack
from ttprun.elastic_resume.derive import Derived, states_in
from ttprun.elastic_resume.donors import MOST, OldRank, closest
from ttprun.groups.journal import Journal
from ttprun.groups.results import Answers
from ttprun.introspect.random_state import RngState
from ttprun.protocol.to_rank import Adapt
from ttprun.rank.checks.replay_guard import MismatchError
from ttprun.rank.replay.replay_run import ReplayRun
from ttprun.rank.session import Session
from ttprun.rank.step import boundary


class Adapted(ReplayRun):
    """The setup of one rank of the new run, up to the old run's boundary.

    adapt   the old ranks whose variables it takes
    """

    is_alone = False
    jump = loops.JumpToNewEnd

    def __init__(self, session: Session, number: int, adapt: Adapt) -> None:
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
            states = [states_in(record.fields, _generators_in(Tree(*record))) for record in records]
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
            self.refuse(f"the DataLoader of {where} cannot resume with other ranks: {error}")
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
            self._before_first_step = look(sys._getframe(1), boundary.steps_now())
        except Exception as error:  # it must not end the script's own step
            self.refuse(f"the variables before the first step cannot be read: {error!r}")

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
            self.refuse(str(error))
        except Exception as error:  # the script must not run with half of the variables
            self.refuse(f"the variables cannot be taken over: {error!r}")
        self.has_arrived = self.is_at_target = True
        loops.give_back()
        return returned

    def _difference_of_loaders(self) -> str:
        """How far the iterators are from the dummies and what is read ahead; "" if they have yielded these."""
        handed = sorted((it["name"], it["yielded"]) for it in loaders.records())
        expected = sorted((it["name"], max(1, it["lead"])) for it in self.target.fields.loaders)
        if handed == expected:
            return ""
        return f"its DataLoaders have yielded {handed} in the first step, and in the old run {expected}"

    def _take_over(self, frame: FrameType, returned: Any) -> Any:
        session = self.session
        fields, tensors, _ = boundary.describe(session, self.boundary, frame, returned)
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
        fields, tensors, _ = boundary.describe(session, self.boundary, frame, returned)
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
    log: list[bytes] = _read(adapt.paths[rank % len(adapt.paths)])["log"]
    return log


def _old_rank(path: str) -> OldRank:
    part = _read(path)
    return OldRank(Record.of(*part["first"][1:]), Record.of(*part["records"][-1][1:]))


def _generators_in(tree: Tree) -> list[list[Any]]:
    return [state_of(node) for node in tree.definitions.values() if isinstance(node, RandomNode | NumpyRandomNode)]
