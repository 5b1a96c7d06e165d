"""The weights after the newest optimizer step, even if the script changes them before its next one.

A replacement begins after that step with a survivor's weights, and repeats what the script does from there on. If that
changes weights (averaged ones replace them for validation, they are scaled or clipped by hand, a best state is loaded),
a survivor in the middle of a step no longer holds what the replacement needs. So a change is looked for before each
step; after the first one, a copy is made after each step.

A change shows in the tensors' version counters, except through `.data`: hence the hash of a part of one parameter,
another one at each step, and of all of them after the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import torch
import xxhash

from ttprun.introspect import host_copies
from ttprun.introspect.distributed_tensors import local_of
from ttprun.introspect.tensor_bytes import content_of
from ttprun.protocol.reason import Reason
from ttprun.tensors.optimizer_registry import Stepped, hash_of

FULL_LOOKS = 2


class KeptWeights:
    """This process's weights after the newest step.

    trained   called after each step
    report    called once, with a note for the operator, when copies begin
    is_kept   copies are made
    """

    def __init__(self, trained: Callable[[], Stepped], report: Callable[[str], None]) -> None:
        self._trained = trained
        self._report = report
        self._copies: dict[int, torch.Tensor] = {}
        self.is_kept = False
        self._looks = 0
        # After the newest step:
        self._noted: Sequence[torch.Tensor] = ()
        self._versions: int | None = None
        self._mark: torch.Tensor | bytes = b""
        self._digest = b""

    def note(self, boundary: int) -> None:
        """The step to `boundary` has ended."""
        trained = self._trained()
        weights = trained.weights
        if self.is_kept:
            self._copy(weights)
            return
        self._noted = weights
        self._versions = sum(map(_version_of, weights))
        self._mark = trained.sample_later(boundary + 1)
        if self._looks < FULL_LOOKS:
            self._looks += 1
            self._digest = _digest_of(weights)
        else:
            self._digest = b""

    def forget(self) -> None:
        """The run of the script is over: drop its tensors."""
        self._noted, self._versions = (), None
        self._copies.clear()

    def compare(self, trained: Stepped, mark: bytes) -> None:
        """Before the next step: find out whether the script has changed weights since the previous one.

        trained   what the next step updates
        mark      the sample for the boundary to which it leads
        """
        if self.is_kept or self._versions is None:
            return
        weights = trained.weights
        if not (self._is_changed() or (mark != self._mark and _are_same(weights, self._noted))):
            return
        self.is_kept = True
        size = sum(local_of(weight).nbytes for weight in weights)
        self._report(
            f"the script changes weights between its optimizer's steps: {size / (1 << 20):.1f} MiB are copied after "
            "each step from now on, to repair a rank that is lost in between"
        )

    def compare_later(self, trained: Stepped, boundary: int, use: Callable[[bytes], None]) -> None:
        """As `compare`, with the next `host_copies.take`; `use` is called with the sample then."""
        now, then = trained.sample_later(boundary), self._mark

        def compare(copies: list[torch.Tensor]) -> None:
            hashes = iter(map(hash_of, copies))
            mark, self._mark = (sample if isinstance(sample, bytes) else next(hashes) for sample in (now, then))
            self.compare(trained, mark)
            use(mark)

        host_copies.later([sample for sample in (now, then) if not isinstance(sample, bytes)], compare)

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as the newest step has left it; of a sharded one, this rank's part."""
        return local_of(self._copies.get(id(weight), weight))

    def why_not(self) -> Reason:
        """Why `of` does not know; "" if it does."""
        if self._copies or self._versions is None or not (self.is_kept or self._is_changed()):
            return Reason()
        return Reason(
            "not-compared-yet",
            "the script has changed weights since its optimizer's step, for the first time, and there is no copy yet",
        )

    def _is_changed(self) -> bool:
        noted = self._noted
        return self._versions != sum(map(_version_of, noted)) or bool(
            self._digest and self._digest != _digest_of(noted)
        )

    def _copy(self, weights: Sequence[torch.Tensor]) -> None:
        copies = self._copies
        if copies.keys() != set(map(id, weights)):
            copies = {id(weight): torch.empty_like(local_of(weight), requires_grad=False) for weight in weights}
        for weight in weights:
            copies[id(weight)].copy_(local_of(weight).detach())
        self._copies = copies


_version_of = attrgetter("_version")


def _are_same(weights: Sequence[torch.Tensor], noted: Sequence[torch.Tensor]) -> bool:
    """False if parameters have been added or removed."""
    return len(weights) == len(noted) and all(map(is_, weights, noted))


def _digest_of(weights: Sequence[torch.Tensor]) -> bytes:
    state = xxhash.xxh3_64()
    for weight in weights:
        state.update(content_of(local_of(weight).detach()))
    return state.digest()
