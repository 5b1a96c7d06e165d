"""When the host waits for FSDP2's operations on a device: where it must at last, and not where they are issued.

A wait blocks the host until the operation has completed (device_link.py), so whatever the script gives the device next
comes late. FSDP2 waits for each operation at once: the device then idles for each reduction of a backward pass. Nothing
reads a gather's result before FSDP2 unpacks it, and nothing a reduction's before the backward pass is over, if its
result is the gradient: until there an operation that fails is issued again, and writes the same memory. So the host
waits for a gather when it is unpacked; for a reduction when the next one is about to be put together, which comes a
layer later, and at the end of the backward pass. One more input of a reduction is kept alive for that.

Other uses are waited for at once: accumulated gradients, another type for the reduction, HSDP, hooks, offloading; and
all on HCCL, where whatever the device has been given is lost when it is stopped. Begin with `is_read_later`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any

from ttprun.groups.journal import Journal
from ttprun.groups.operations import REDUCING, Entry
from ttprun.groups.work import ManagedWork
from ttprun.introspect.current_rank import current
from ttprun.introspect.ownership import variable_of

_wrapped: set[str] = set()  # of FSDP2's methods below; a release of torch may lack one


def is_read_later(entry: Entry, caller: FrameType) -> bool:
    """Whether the host may wait for an operation of FSDP2 at one of the methods below.

    caller   FSDP2's frame that has issued it
    """
    is_reducing = entry.op in REDUCING
    if not _wrapped >= ({"post_backward", "final callback"} if is_reducing else {"wait_for_unshard"}):
        return False
    function = "foreach_reduce" if is_reducing else "foreach_all_gather"
    for frame in (caller, caller.f_back):  # releases differ in whether a function of the same module calls the group
        if frame is not None and frame.f_code.co_name == function:
            try:
                return _is_gradient(frame, entry) if is_reducing else not variable_of(frame, "async_op")
            except (AttributeError, KeyError, LookupError, ValueError):  # another release of torch
                return False
    return False


def _is_gradient(frame: FrameType, entry: Entry) -> bool:
    """Whether what a reduction gives is the gradient itself, to which no kernel does anything before the step."""
    kept_type = variable_of(frame, "orig_dtype")
    return (
        variable_of(frame, "all_reduce_group") is None
        and variable_of(frame, "all_reduce_hook") is None
        and variable_of(frame, "postdivide_factor") in (None, 1)
        and kept_type in (None, entry.outputs[0].dtype)
        and all(map(_takes_it_over, variable_of(frame, "fsdp_params")))
    )


def _takes_it_over(parameter: Any) -> bool:
    sharded = parameter.sharded_param
    hooks = getattr(sharded, "_post_accumulate_grad_hooks", None)
    return sharded.grad is None and not parameter.offload_to_cpu and not hooks


def _wait_for(is_wanted: Callable[[Entry], bool]) -> bool:
    """Wait for what was put off, and is wanted now; returns whether that was anything."""
    session = current()
    journal = None if session is None else session.get(Journal)
    if journal is None:
        return False
    entries = journal.take_put_off(is_wanted)
    for entry in entries:
        ManagedWork(journal, entry).wait()
        journal.note_waited(entry)
    return bool(entries)


def _is_reducing(entry: Entry) -> bool:
    return entry.op in REDUCING


def wrap_wait_for_unshard(original: Any) -> Any:
    """FSDPParamGroup.wait_for_unshard: unpack what was gathered."""
    _wrapped.add("wait_for_unshard")

    def wait_for_unshard(group: Any) -> Any:
        if (gathered := group._all_gather_result) is not None:
            output = gathered.all_gather_output
            if not _wait_for(lambda entry: bool(entry.outputs) and entry.outputs[0] is output):
                _wait_for(lambda entry: not _is_reducing(entry))  # whatever it was gathered by is among these
        return original(group)

    return wait_for_unshard


def wrap_post_backward(original: Any) -> Any:
    """FSDPParamGroup.post_backward: a layer's gradients are there; put them together, and reduce them."""
    _wrapped.add("post_backward")

    def post_backward(*args: Any, **kwargs: Any) -> Any:
        _wait_for(_is_reducing)
        return original(*args, **kwargs)

    return post_backward


def wrap_final_callback(original: Any) -> Any:
    """FSDPState._root_post_backward_final_callback: the end of a backward pass."""
    _wrapped.add("final callback")

    def final_callback(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _wait_for(_is_reducing)
        return result

    return final_callback
