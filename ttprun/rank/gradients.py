"""In a replacement's first live step: refuse a script that carries gradients across an optimizer step."""

from __future__ import annotations

from typing import Any

from ttprun.rank.expected import report_mismatch
from ttprun.rank.session import current

_is_checked = False


def wrap_backward(original: Any) -> Any:
    """torch.autograd.backward: at its first live call, no gradient of the replay may be left."""

    def backward(*args: Any, **kwargs: Any) -> Any:
        global _is_checked
        session = current()
        if not _is_checked and session is not None and session.replay is None and session.expected is not None:
            _is_checked = True
            from ttprun.rank.replay import has_poisoned_gradient

            if has_poisoned_gradient():
                report_mismatch(
                    session.channel,
                    session.generation,
                    "the script carries gradients across an optimizer step (no zero_grad in between): "
                    "those of the lost rank are not known",
                )
        return original(*args, **kwargs)

    return backward
