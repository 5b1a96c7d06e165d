"""The weights as the newest optimizer step has left them, whatever the script does to them before its next one.

A replacement begins behind that step with a survivor's weights, and does again what the script does from there on. If
that changes weights (averaged ones take their place for validation, they are scaled or clipped by hand, a best state is
loaded again), a survivor in the middle of a step does not hold any more what the replacement needs. So a change is
looked for in front of each step; once there has been one, a copy is made behind each step from then on.

A change shows in the tensors' version counters. One by way of `.data` does not; hence the hash of a part of one
parameter, another one at each step, and of all of them behind the first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, is_

import torch
import xxhash

from ttprun.rank.weights.optimizer_registry import Stepped
from ttprun.rank.weights.sharded import local_of
from ttprun.rank.weights.tensor_bytes import bytes_of

FULL_LOOKS = 2


class KeptWeights:
    """What this process knows of its weights behind the newest step.

    trained   called behind each step
    tell      called once, with what is said to people when copies begin
    is_kept   copies are made
    """

    def __init__(self, trained: Callable[[], Stepped], tell: Callable[[str], None]) -> None:
        self._trained = trained
        self._tell = tell
        self._copies: dict[int, torch.Tensor] = {}
        self.is_kept = False
        self._looks = 0
        # Behind the newest step:
        self._noted: Sequence[torch.Tensor] = ()
        self._versions: int | None = None
        self._mark = b""
        self._digest = b""

    def note(self, boundary: int) -> None:
        """The step to `boundary` has run to its end."""
        trained = self._trained()
        weights = trained.weights
        if self.is_kept:
            self._copy(weights)
            return
        self._noted = weights
        self._versions = sum(map(_version_of, weights))
        self._mark = trained.sample(boundary + 1)
        if self._looks < FULL_LOOKS:
            self._looks += 1
            self._digest = _digest_of(weights)
        else:
            self._digest = b""

    def forget(self) -> None:
        """The run of the script is over, and nothing of it may outlive it."""
        self._noted, self._versions = (), None
        self._copies.clear()

    def compare(self, trained: Stepped, mark: bytes) -> None:
        """The next step is about to be taken: has the script changed weights since the one before?

        trained   what that step updates
        mark      the sample for the boundary to which it leads
        """
        if self.is_kept or self._versions is None:
            return
        weights = trained.weights
        if not (self._is_changed() or (mark != self._mark and _are_same(weights, self._noted))):
            return
        self.is_kept = True
        size = sum(local_of(weight).nbytes for weight in weights)
        self._tell(
            "the script changes weights between its optimizer's steps: behind each step they are copied from now on, "
            f"{size / (1 << 20):.1f} MiB, for a rank that is lost in between"
        )

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight as the newest step has left it; of a sharded one, what this rank holds."""
        return local_of(self._copies.get(id(weight), weight))

    def why_not(self) -> str:
        """Why `of` cannot tell; "" if it can."""
        if self._copies or self._versions is None or not (self.is_kept or self._is_changed()):
            return ""
        return "the script has changed weights since its optimizer's step, for the first time, and there is no copy yet"

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
    """False if parameters have been added or taken away."""
    return len(weights) == len(noted) and all(map(is_, weights, noted))


def _digest_of(weights: Sequence[torch.Tensor]) -> bytes:
    state = xxhash.xxh3_64()
    for weight in weights:
        state.update(bytes_of(local_of(weight).detach()))
    return state.digest()
