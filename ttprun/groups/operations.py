"""The operations of a process group, and one of them in the journal: `Entry`.

What is said of each kind: which arguments are inputs and outputs, and what must agree between ranks. torch has two
names for some: 2.13 calls `all_gather_single` and the like, older releases `_allgather_base`; 2.15 has added
`gather_single`. OPERATIONS holds all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ttprun.introspect.fail_open import NotRepairableError
from ttprun.introspect.tensor_bytes import elements_of
from ttprun.protocol.reason import Reason

JOURNAL_FULL = Reason("journal-full", "the journal of one step has reached journal_limit_mib")
# operation: (argument that holds the inputs, argument that holds the outputs)
OPERATIONS = {
    "allreduce": (0, 0),
    "allreduce_coalesced": (0, 0),
    "broadcast": (0, 0),
    "reduce": (0, 0),
    "allgather": (1, 0),
    "allgather_coalesced": (1, 0),
    "_allgather_base": (1, 0),
    "all_gather_single": (1, 0),
    "allgather_into_tensor_coalesced": (1, 0),
    "all_gather_single_coalesced": (1, 0),
    "gather": (1, 0),
    "gather_single": (1, 0),
    "gather_into_tensor": (1, 0),
    "scatter": (1, 0),
    "reduce_scatter": (1, 0),
    "_reduce_scatter_base": (1, 0),
    "reduce_scatter_single": (1, 0),
    "reduce_scatter_tensor_coalesced": (1, 0),
    "reduce_scatter_single_coalesced": (1, 0),
    "alltoall": (1, 0),
    "alltoall_base": (1, 0),
    "all_to_all_single": (1, 0),
    "barrier": (None, None),
}
# FSDP2 gathers parameters and reduces gradients by these.
REDUCING = frozenset({"_reduce_scatter_base", "reduce_scatter_single"})
GATHERING = frozenset({"_allgather_base", "all_gather_single"}) | REDUCING
# What these leave is the same in all members.
SAME_FOR_ALL = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base", "all_gather_single"),
        *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    }
)
EXCHANGING = frozenset({"alltoall", "alltoall_base", "all_to_all_single"})
# None of these completes anywhere before all members have issued it.
OF_ALL_MEMBERS = GATHERING | {"allreduce", "allreduce_coalesced", "allgather", "barrier"}
# Which argument of a point-to-point operation is sent, and which received.
POINT_TO_POINT: dict[str, tuple[int | None, int | None]] = {
    "send": (0, None),
    "recv": (None, 0),
    "recv_anysource": (None, 0),
}
BATCH = "batch"  # of messages that are started together: (list of (operation, its arguments),)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in an operation's argument (a tensor, or nested lists of tensors)."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    if len(value) == 1:  # most often
        (only,) = value
        return [only] if isinstance(only, torch.Tensor) else tensors_in(only)
    return [tensor for item in value for tensor in tensors_in(item)]


def with_tensors_replaced(value: Any, replacement: dict[int, torch.Tensor]) -> Any:
    """An argument with other tensors in the places of its own; `replacement` is keyed by id()."""
    if isinstance(value, torch.Tensor):
        return replacement[id(value)]
    if isinstance(value, list):
        return [with_tensors_replaced(item, replacement) for item in value]
    if isinstance(value, tuple):
        return tuple(with_tensors_replaced(item, replacement) for item in value)
    return value


def positional(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments in the backend's order; a single tensor stands for a list of one, as in torch's own bindings.

    op             the backend's method
    args, kwargs   as the method was called
    """
    full = args + tuple(kwargs.values()) if kwargs else args
    if op in ("allreduce", "broadcast", "reduce") and isinstance(full[0], torch.Tensor):
        if op == "allreduce":
            options: Any = dist.AllreduceOptions()
            if len(full) > 1 and not isinstance(full[1], dist.AllreduceOptions):
                options.reduceOp = full[1]
            elif len(full) > 1:
                options = full[1]
        else:
            options = dist.BroadcastOptions() if op == "broadcast" else dist.ReduceOptions()
            options.rootRank = full[1]
            options.rootTensor = 0
        return ([full[0]], options)
    return full


def signature_of(op: str, args: tuple[Any, ...]) -> str:
    """What must agree between ranks: the operation, and the tensors' shapes and dtypes where those must be equal."""
    shapes = (
        ",".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors_in(args[0]))
        if op in ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
        else ""
    )
    return f"{with_options(op, args)} {shapes}"


def with_options(op: str, args: tuple[Any, ...]) -> str:
    """The operation, how it reduces and from or to which rank: "allreduce RedOpType.SUM "."""
    options: Any = args[-1] if args else None
    kind: Any = type(options)
    has_reduce_op, has_root = _fields_of(kind)
    reduce_op = options.reduceOp.op if has_reduce_op else None
    return _described(op, reduce_op, options.rootRank if has_root else None)


@functools.cache
def _fields_of(kind: Any) -> tuple[bool, bool]:
    """Whether torch's options of this kind say how to reduce, and a root."""
    return hasattr(kind, "reduceOp"), hasattr(kind, "rootRank")


@functools.cache
def _described(op: str, reduce_op: Any, root: int | None) -> str:
    return f"{op} {'' if reduce_op is None else reduce_op} {'' if root is None else root}"


def nans_in(tensor: torch.Tensor) -> int:
    """The number of elements that are NaN."""
    tensor = elements_of(tensor)
    # The sum over infinities of both signs is NaN too, hence the count.
    if tensor.is_floating_point() and math.isnan(tensor.sum().item()):
        return int(tensor.isnan().sum())
    return 0


Tensor = torch.Tensor


class Input:
    """What this rank has given to an operation, in case it is issued again: here copies, or the tensors themselves.

    Without either it is made again, of the gradients in a bucket (inputs.py) or of shards (inputs.py).

    tensors       as many as the operation's own
    is_borrowed   they are the operation's own, to which nobody writes until they are freed
    """

    tensors: Sequence[Tensor] = ()
    is_borrowed = False

    def __init__(self, tensors: Sequence[Tensor], is_borrowed: bool = False) -> None:
        self.tensors = tensors
        self.is_borrowed = is_borrowed

    @property
    def is_kept(self) -> bool:
        """Whether the result is still there, in the place of the input, once the operation has completed."""
        return False

    @property
    def is_last(self) -> bool:
        """Whether nothing is reduced after it in the backward pass: it can be looked through at once."""
        return True

    def put_back(self, own: Sequence[Tensor]) -> None:
        """The operation's own tensors become what they were. Raises NotRepairableError if that is lost."""
        for tensor, copy in zip(own, self.tensors, strict=bool(self.tensors)):
            tensor.copy_(copy)

    def made_again(self) -> Sequence[Tensor]:
        """What was given; raises NotRepairableError if that is lost."""
        return self.tensors

    def count_nans(self) -> str:
        """ "3 of 8 elements" if it has NaN, else ""."""
        counts = ((nans_in(tensor), tensor.numel()) for tensor in self.made_again())
        return next((f"{count} of {of} elements" for count, of in counts if count), "")


NOTHING = Input(())


class KeptInput(Input):
    """An input that is the result of a reduction, of which the mirror has a copy: HSDP's, which reduces it once more.

    give   fills a tensor with it
    """

    def __init__(self, give: Callable[[Tensor], None], form: Tensor) -> None:
        super().__init__(())
        self._give = give
        self._form = form

    def put_back(self, own: Sequence[Tensor]) -> None:
        """As in Input."""
        self._give(own[0])

    def made_again(self) -> Sequence[Tensor]:
        """As in Input."""
        tensor = torch.empty_like(self._form)
        self._give(tensor)
        return [tensor]


class NotHeld(Input):
    """An input for which the journal had no room: the operation cannot be issued again."""

    def put_back(self, own: Sequence[Tensor]) -> None:
        """Raises NotRepairableError."""
        self.made_again()

    def made_again(self) -> Sequence[Tensor]:
        """Raises NotRepairableError."""
        raise NotRepairableError(JOURNAL_FULL)

    def count_nans(self) -> str:
        """Nothing is known of it."""
        return ""


class Completed:
    """Like a completed work of the backend, without tensors: for an operation that is over, or that it never had."""

    def wait(self, *limit: Any) -> bool:
        """As Work.wait."""
        return True

    def is_completed(self) -> bool:
        """It is over."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


_OVER = Completed()


class Entry:
    """One collective of one group; `collectives.py` has a kind of its own.

    op, args    the backend's method and its arguments (the user's tensors)
    outputs     the tensors that the operation writes
    input       what this rank has given, in case it is issued again
    inner       the backend's work in the current generation; None while the rank is frozen
    error       without its traceback, whose frames would keep a dead backend until a garbage collection
    failed      the work whose future has failed with `error`
    future      what the script or DDP waits for, None if nothing does
    promise     completes `future` with the outputs or an exception
    place       where in the script it was called, if its result is small enough to be kept
    stream      of the device on which it was called then, if its result is there
    size_bytes  of the inputs and outputs that it keeps alive
    result      its outputs, if they are small and the same in all members, once it has completed; on a device, copies
    given       what another rank is sending in place of the operation: bytes of all outputs
    nan         "3 of 8 elements" if an input has NaN, else ""
    is_passing  the caller drops its tensors soon: only the copies of the inputs are kept once it has completed
    device      of the tensors that were dropped, or of a message's
    is_settled  all members have completed it: its inputs are dropped, and it is not issued again
    at          place in the order in which this rank has issued its collectives
    waited_at   the newest place in that order when the script's thread had waited for it
    is_read_later  nothing on the device reads its result before the script's thread waits for it once more
    is_apart    another thread's own (thread_collectives.py)
    begun       newest boundary when that thread was started
    is_carried  another thread's own, of a step before the newest boundary
    save        of a checkpoint, to which it belongs; None: to none
    number      since the boundary: in its sequence: of messages, or of borrowed entries
    kept_version  of its output, when the mirror got a copy of that; -1: it has none
    reduces_again  its input is the result of a reduction of FSDP
    sends_copy  it is issued again with the copies alone: `send_copy`
    ready       event of the device after which its inputs are there, if another thread issues it, and what is kept of
                its result; of the first one since a step always, as the step has ended by then
    kept_row    of a step that can be taken again: what is kept of it (rank/replay/kept_steps.py)
    parameters  of FSDP2's class for these, whose gradients it reduces in such a step
    """

    # Class attributes, as most entries never change these.
    input = NOTHING
    sends_copy = False
    inner: Any = None
    future: torch.futures.Future[Any] | None = None
    promise: Any = None
    size_bytes = 0
    is_done = False
    error: BaseException | None = None
    failed: Any = None
    place = ""
    stream: Any = None
    result: Sequence[bytes | Tensor] | None = None
    given: Tensor | None = None
    nan = ""
    is_passing = False
    device: torch.device | None = None
    is_settled = False
    is_apart = False
    begun = 0
    is_carried = False
    save: Any = None
    at = 0
    waited_at = 0
    is_read_later = False
    number = 0
    kept_version = -1
    reduces_again = False
    ready: Any = None
    kept_row: Any = None
    parameters: Sequence[Any] = ()

    def __init__(self, group: Any, op: str, args: tuple[Any, ...], outputs: list[Tensor]) -> None:
        self.group = group
        self.op = op
        self.args = args
        self.outputs = outputs

    def make_future(self) -> torch.futures.Future[Any]:
        """The future of the outputs.

        Not the promise itself: torch's Python futures keep an exception as a value, which crashes DDP's C++ code.
        """
        self.promise = torch._C.Future([])  # torch.futures.Future without type annotations
        self.future = self.promise.then(_value_or_raise)
        return self.future

    def settle(self, result: list[Tensor] | BaseException | None) -> None:
        """Complete the future, if there is one: with the outputs, or with an error."""
        if self.promise is not None and not self.promise.done():
            self.promise.set_result(result)

    @property
    def signature(self) -> str:
        """What must agree between ranks."""
        return signature_of(self.op, self.args)

    @property
    def sequence(self) -> str:
        """Name of the sequence of operations that must agree between ranks: the group's own."""
        name: str = self.group.group_name
        return name

    @property
    def members(self) -> Sequence[int]:
        """The ranks between which they must agree."""
        ranks: Sequence[int] = self.group.ranks
        return ranks

    @property
    def is_soon_dropped(self) -> bool:
        """Whether it reduces gradients of FSDP, which holds its tensors for a moment."""
        return self.is_passing and self.op in REDUCING

    @property
    def own_inputs(self) -> list[Tensor]:
        """The tensors that the operation reads."""
        at, _ = OPERATIONS.get(self.op) or POINT_TO_POINT[self.op]
        return [] if at is None else tensors_in(self.args[at])

    def send_copy(self) -> None:
        """It has been issued, and its inputs are copied: from now on, send these."""

    def digest(self) -> str:
        """Of what was received with a message; "" before that, and of a collective."""
        return ""

    def note_result(self) -> None:
        """It has completed; the script does not know yet."""

    def release(self) -> None:
        """The script knows that it has completed."""
        if self.is_passing and self.input is not NOTHING:
            self._drop_tensors()

    def settle_for_all(self) -> None:
        """All members have completed it."""
        self.is_settled = True
        self.input = Input((), self.input.is_borrowed)

    def _drop_tensors(self) -> None:
        """Keep the form of its tensors alone, and the copies of its inputs."""
        output, given, *options = self.args
        self.device = given.device
        form = _form(1, given.shape, given.stride(), given.dtype)
        self.args = (_form(0, output.shape, output.stride(), output.dtype), form, *options)
        self.inner = _OVER
        if self.op not in REDUCING:  # whose small results are looked through for NaN
            self.outputs = []


@functools.lru_cache(maxsize=4096)
def _form(at: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor without elements; the same for the operations of each step, another one for each tensor of one.

    at   which of the operation's tensors has this form
    """
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _value_or_raise(promise: Any) -> Any:
    result = promise.value()
    if isinstance(result, BaseException):
        raise result
    return result
