"""Graphs of a device: `torch.cuda.graph`, `make_graphed_callables`, `torch.compile(mode="reduce-overhead")`.

A graph runs what was captured once, without the Python code: none of our hooks is called, and its random numbers are
drawn from a place of its own. And while work is being captured, nothing may be copied to the CPU, as our hooks do: the
capture would fail. So protection ends before the first capture begins.
"""

from __future__ import annotations

from typing import Any

from ttprun.rank.session import current

REASON = (
    "the script captures its work in graphs of the device (torch.cuda.graph, make_graphed_callables, or torch.compile "
    'with mode="reduce-overhead" or "max-autotune"), which cannot be replayed: without them it is repaired'
)


def wrap_capture_begin(original: Any) -> Any:
    """CUDAGraph.capture_begin, by which all of them begin."""

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = current()
        if session is not None:
            session.give_up_protection(REASON)
        return original(self, *args, **kwargs)

    return capture_begin
