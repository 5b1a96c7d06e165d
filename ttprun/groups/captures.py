"""Graphs of a device: `torch.cuda.graph`, `make_graphed_callables`, `torch.compile(mode="reduce-overhead")`.

A graph runs what was captured once, without the Python code: none of our hooks is called, and its random numbers are
drawn from a place of its own. And while work is being captured, nothing may be copied to the CPU, as our hooks do: the
capture would fail. So protection ends before the first capture begins; and nobody looks at an event of the device any
more, since that would make a capture fail as well.
"""

from __future__ import annotations

from typing import Any

from ttprun.groups.host import current
from ttprun.groups.transports import late
from ttprun.protocol.reason import Reason

REASON = Reason(
    "device-graph",
    "the script captures its work in graphs of the device (torch.cuda.graph, make_graphed_callables, or torch.compile "
    'with mode="reduce-overhead" or "max-autotune"), which cannot be replayed: without them it is repaired',
)

_LIMIT_S = 5.0  # for operations that were issued before the capture


def wrap_capture_begin(original: Any) -> Any:
    """CUDAGraph.capture_begin, by which all of them begin."""

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None:
            session.give_up_protection(REASON)
            late.stop_looking(_LIMIT_S)
        return original(self, *args, **kwargs)

    return capture_begin


def wrap_rendezvous(original: Any) -> Any:
    """torch.distributed._symmetric_memory.rendezvous: ranks map each other's memory, and kernels use it directly."""

    def rendezvous(*args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None:
            session.give_up_protection(
                Reason(
                    "symmetric-memory",
                    "the script maps other ranks' memory (symmetric memory), which kernels use without a collective",
                )
            )
        return original(*args, **kwargs)

    return rendezvous
