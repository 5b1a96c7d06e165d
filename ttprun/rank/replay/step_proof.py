"""The step of an optimizer is proved, too, where the lost rank alone held its part of the state.

Nobody holds the same as such a rank, so nothing would show if the replacement's steps were others than its own: code of
a library may keep what Python does not see (a running product of an Adam in C++). So the replacement takes the rank's
last step again, from the mirror of the boundary before, and compares all of the result with what the rank had mirrored
after it. Only then does it load that. If all ranks have gone back there is nothing to compare with: unless it is one of
torch's own, the optimizer's step is named as not proved. Begin with `StepProof.end`.
"""

from __future__ import annotations

import torch

from ttprun.capture.replay.findings import Findings
from ttprun.introspect import fail_open
from ttprun.introspect.tensor_bytes import bytes_of
from ttprun.protocol.reason import Reason
from ttprun.tensors import mirror, replicated
from ttprun.tensors.gradients import GRADIENT
from ttprun.tensors.mirror_slots import Stored

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
