"""The share of a snapshot or checkpoint that one rank writes, and loading all shares again.

All replicas hold the same tensors, so each writes some of them; the division follows from the tensors' sizes, so that
ranks need not communicate. Of sharded tensors each rank writes its part. Parameters that differ between ranks
(`Differing`) are written by the lowest rank of those that hold the same, under a key with its number. A share is a
safetensors file, also in the memory of a snapshot.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack
import safetensors
import torch
import xxhash
from msgspec.structs import replace

from ttprun.introspect import fail_open, model_tensors
from ttprun.introspect.model_tensors import parts_of, tables_of
from ttprun.introspect.ownership import SCALARS, user_frames, variables_of
from ttprun.introspect.safe_reads import dictionary_of, is_a, module_of_class
from ttprun.protocol.board import LEADER, ROW_FIELDS, Board, Field, Phase
from ttprun.protocol.reason import Reason, pointer
from ttprun.protocol.snapshot_messages import PART_DIGITS, PARTS, Share, SnapshotSize, SnapshotTaken
from ttprun.state.chunks import OWNER, Chunk
from ttprun.state.files import CannotReshardError, write_file
from ttprun.state.tensor_file import chunks, lay_out, metadata_of
from ttprun.state.tensor_file import load as load_resharded
from ttprun.tensors import optimizer_registry, replicated, sharded
from ttprun.tensors.memory import Memory, free_bytes
from ttprun.tensors.open_boundaries import MOST_PUT_OFF
from ttprun.tensors.replicated import Part, parameter_of

if TYPE_CHECKING:
    from ttprun.introspect.current_rank import Rank
    from ttprun.protocol.channel import Channel

_MOST_MODULES = 16
BOTH_KINDS = Reason(
    "sharding-unknown",
    "some parameters are DTensors, and others differ between the ranks: both together are not stored yet",
)


class Differing(NamedTuple):
    """Parameters that differ between ranks.

    owners   key of each -> by rank, the lowest rank that has always held the same
    rank     this one
    writers  ranks that write a share, in the order of the shares
    """

    owners: Mapping[str, Sequence[int]]
    rank: int
    writers: Sequence[int]

    def holds(self, key: str) -> bool:
        """Whether the tensor of this key belongs to such a parameter."""
        return parameter_of(key) in self.owners

    def stored(self, key: str) -> str:
        """The key under which a file holds this rank's version of a tensor."""
        owners = self.owners.get(parameter_of(key))
        return key if owners is None else f"{key}{OWNER}{owners[self.rank]}"

    def is_mine(self, key: str) -> bool:
        """Whether this rank writes its tensor of that key."""
        owners = self.owners[parameter_of(key)]
        return min(rank for rank in self.writers if owners[rank] == owners[self.rank]) == self.rank


NONE_DIFFERING = Differing({}, 0, ())


def version_of(owners: Mapping[str, Sequence[int]]) -> str:
    """A hash of `owners` of `Differing`, to check that ranks and agent agree."""
    packed = json.dumps([[key, *owners[key]] for key in sorted(owners)])
    return str(xxhash.xxh3_64_hexdigest(packed.encode()))


def file_of(share: int) -> str:
    """Name of a share's file in a checkpoint."""
    return f"tensors-{share:05d}.safetensors"


def divide(sizes: list[int], of: int) -> list[int]:
    """The share to which each tensor goes: the largest first, each to the share that is smallest so far.

    sizes    bytes of each tensor
    of       number of shares
    returns  for each tensor the number of its share, from 0
    """
    filled = [0] * of
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = filled.index(min(filled))
        owners[index] = owner
        filled[owner] += sizes[index]
    return owners


def write(path: str, share: int, of: int, frame: FrameType | None, differing: Differing = NONE_DIFFERING) -> Share:
    """Write one share of this rank's state to a new file of a checkpoint; a file of an earlier attempt is removed.

    share  its number, from 0; the first one has the models' own tensors too
    of     number of shares
    frame  innermost of the main thread's: its variables name the models
    differing  parameters that differ between ranks

    returns  its description, for the agent

    Raises NotRepairableError, OSError.
    """
    described, header, tensors = _describe(share, of, frame, differing)
    Path(path).unlink(missing_ok=True)
    entry = write_file(Path(path), chunks(header, tensors))
    return replace(described, bytes=entry.bytes, xxh3=entry.xxh3)


def copy(memory: Memory, share: int, of: int, frame: FrameType | None, differing: Differing = NONE_DIFFERING) -> Share:
    """Copy one share of this rank's state into shared memory; arguments, result and errors as those of `write`.

    memory   of the agent; it is extended as needed
    """
    described, header, tensors = _describe(share, of, frame, differing)
    size = len(header) + sum(tensor.nbytes for tensor in tensors)
    memory.fill(size, chunks(header, tensors))
    return replace(described, bytes=size)


def _describe(
    share: int, of: int, frame: FrameType | None, differing: Differing
) -> tuple[Share, bytes, list[torch.Tensor]]:
    """(description without the file's size and hash, the file's header, its tensors) of one share."""
    header, parts = replicated.describe()
    if why_not := sharded.why_not_stored(part.whole for part in parts):
        raise fail_open.NotRepairableError(why_not)
    alike = [part for part in parts if part.place is None and not differing.holds(part.key)]
    alone = [part for part in parts if part.place is None and differing.holds(part.key)]
    sharded_parts = [part for part in parts if part.place is not None]
    if alone and sharded_parts:
        raise fail_open.NotRepairableError(BOTH_KINDS)
    owners = divide([part.tensor.nbytes for part in alike], of)
    mine = {part.key: part.tensor for part, owner in zip(alike, owners, strict=True) if owner == share}
    mine |= {differing.stored(part.key): part.tensor for part in alone if differing.is_mine(part.key)}
    common = [
        row
        for key, row in zip(replicated.keys(), replicated.without_gradients(header), strict=True)
        if key not in differing.owners
    ]
    described = Share(
        share,
        bytes=0,
        xxh3="",
        header_xxh3=xxhash.xxh3_64_hexdigest(json.dumps(common).encode()),
        digests=replicated.digests(),
        differing=version_of(differing.owners),
        header=header if differing.owners or share == 0 else [],
    )
    models: dict[str, dict[str, str]] = {}
    own: list[Part] = []
    if share == 0 or sharded_parts:
        models, own = _models(frame)
        sharded_parts += [part for part in own if part.place is not None]
    if share == 0:
        files = {part.key: file_of(owner) for part, owner in zip(alike, owners, strict=True)}
        files |= {part.key: file_of(0) for part in (*sharded_parts, *own)}  # the other files have further parts
        files |= {part.key: file_of(0) for part in alone}  # the lowest rank that writes is the first of its peers
        described = replace(
            described,
            model={
                name: {n: (files[key], differing.stored(key)) for n, key in names.items()}
                for name, names in models.items()
            },
            held=_held_by_all(models) if sharded_parts and of < torch.distributed.get_world_size() else [],
        )
        mine |= {part.key: part.tensor for part in own if part.place is None}
    mine |= {part.key: part.tensor for part in sharded_parts if part.tensor.numel()}
    chunks_of = {part.key: part.chunk for part in sharded_parts if part.chunk is not None}
    try:
        return described, *lay_out(mine, {"format": "pt"} | metadata_of(mine, chunks_of))
    except ValueError as error:
        raise fail_open.NotRepairableError(str(error)) from None


def load(header: list[Any], files: list[str], differing: Differing = NONE_DIFFERING) -> None:
    """Load the state in all shares.

    header  from `replicated.describe` in this rank, or in one that held the same
    files   paths of all shares
    differing   parameters that differed between the ranks that have written them

    Raises NotRepairableError, OSError.
    """
    if model_tensors.are_any(optimizer_registry.parameters()):
        if differing.owners:
            raise fail_open.NotRepairableError(BOTH_KINDS)
        _load_parts(header, files)
        return
    opened: list[Any] = [safetensors.safe_open(path, framework="pt") for path in files]
    holder = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 - not a mapping

    def fill(name: str, tensor: torch.Tensor) -> None:
        key = differing.stored(name)
        if key not in holder:
            raise fail_open.NotRepairableError(
                Reason("stored-state-unusable", f"{key} is in none of the checkpoint's files")
            )
        stored = holder[key].get_tensor(key)
        if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise fail_open.NotRepairableError(
                Reason("stored-state-unusable", f"{key} is {list(stored.shape)} of {stored.dtype} in the checkpoint")
            )
        with torch.no_grad():
            tensor.copy_(stored)

    replicated.take_over(header, fill, is_stored=True)


def _load_parts(header: list[Any], files: list[str]) -> None:
    """Load sharded tensors: each rank reads its parts, from any of the files."""
    targets: dict[str, torch.Tensor] = {}
    replicated.take_over(header, targets.__setitem__, is_stored=True)
    if why_not := sharded.why_not_stored(targets.values()):
        raise fail_open.NotRepairableError(why_not)
    parts = {key: sharded.chunk_of(whole) or Chunk.whole(whole.shape) for key, whole in targets.items()}
    try:
        needed = {key: (model_tensors.local_of(targets[key]), part) for key, part in parts.items() if part.count}
        load_resharded(needed, files)
    except CannotReshardError as error:
        raise fail_open.NotRepairableError(str(error)) from None
    sharded.forget_gathered()


def _models(frame: FrameType | None) -> tuple[dict[str, dict[str, str]], list[Part]]:
    """The modules in the user's variables: (variable -> name in its state_dict -> key, what has no key yet)."""
    models: dict[str, dict[str, str]] = {}
    own: list[Part] = []
    keys = {
        _place(tensor): key for key, tensor in replicated.live_tensors() if not model_tensors.is_distributed(tensor)
    }
    known_parameters = replicated.keys_of_parameters()
    for variable, module in modules_in(frame):
        names: dict[str, str] = {}
        for name, value in tensors_of(module):
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                continue
            tensor = model_tensors.local_of(value).detach()
            key = known_parameters.get(id(value)) or (keys.get(_place(tensor)) if tensor.numel() else None)
            if key is None:
                key = f"{variable}/{name}"
                own.append(Part(key, tensor, value))
            if tensor.numel():
                keys[_place(tensor)] = key
            names[name] = key
        if names:
            models[variable] = names
    return models, own


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The tensors of the module's state_dict, by name.

    state_dict() itself is not called: it may be the script's own, it reshards what FSDP2 has gathered, and another
    thread may be using the module.
    """
    managed = sharded.sharded_parameters(module)
    for path, part in parts_of(module, with_repeated=True):
        tables = tables_of(part)
        passing = tables["_non_persistent_buffers_set"]
        kept = {name: tensor for name, tensor in tables["_buffers"].items() if name not in passing}
        for name, tensor in (*tables["_parameters"].items(), *kept.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, managed.get((id(part), name), tensor)


def _held_by_all(models: dict[str, dict[str, str]]) -> list[Any]:
    """The name of each sharded weight, and the part of each rank: [name, [[rank, shape, offsets, sizes]]]."""
    named: dict[str, str] = {}
    for variable, names in models.items():
        for name, key in names.items():
            named.setdefault(key, name if len(models) == 1 else f"{variable}.{name}")
    return [
        [named.get(key, key), sharded.held_by_all(parameter)]
        for key, parameter in replicated.live_tensors()
        if key.endswith(f"/{replicated.WEIGHT}") and sharded.chunk_of(parameter) is not None
    ]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def modules_in(frame: FrameType | None) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules in the variables of the user's frames, and in attributes of objects there: ("model", ...), first few.

    Those that are parts of one in a frame farther out are left out: in its own `forward` a model is `self` as well.
    """
    modules: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()
    for user_frame in user_frames(frame):
        here: dict[str, torch.nn.Module] = {}
        for name, value in variables_of(user_frame).items():
            if name.startswith("__") or type(value) in SCALARS:
                continue
            if is_a(value, torch.nn.Module):
                here[name] = value
            elif module_of_class(type(value)) == "__main__":
                attributes = (dictionary_of(value) or {}).items()
                here |= {f"{name}.{key}": part for key, part in attributes if is_a(part, torch.nn.Module)}
        modules |= {name: module for name, module in here.items() if id(module) not in seen}
        seen |= {id(part) for module in here.values() for _, part in parts_of(module)}
    yield from list(modules.items())[:_MOST_MODULES]


# Snapshots: at a boundary each rank copies its records and its share of the weights into memory that outlives it.
#
# The agent requests one by a number on the board. The first rank of the node writes the boundary there before it
# records this boundary; the others read it after the commit, when all have recorded it. So all take the snapshot at
# the same boundary without waiting. The copy is made on the main thread, while nothing else changes the tensors; the
# agent does the rest in the background.

# Read in each step.
_ASKED = LEADER * ROW_FIELDS + Field.SNAPSHOT_ASKED
_TAKEN_AT = LEADER * ROW_FIELDS + Field.SNAPSHOT_AT
_QUIESCED = LEADER * ROW_FIELDS + Field.QUIESCE_ASKED


class SnapshotPart:
    """A rank's part in snapshots.

    buffers   for each place where a snapshot can be kept, the paths for this rank's records and for its share
    every     steps between two; 0: at the first boundary after a request
    turns     boundaries at which this rank alone keeps all that it holds, as its step is verified
    owners    of parameters that differ between ranks, see `Differing`; set by the agent
    verified_at   boundary of the newest snapshot from which another process takes this rank's step again
    """

    def __init__(
        self,
        board: Board,
        local_rank: int,
        buffers: Sequence[tuple[str, str]],
        every: int,
        recorder: Any,
        turns: Container[int] = (),
    ) -> None:
        self._recorder = recorder
        self._board = board
        self._is_leader = local_rank == LEADER
        self._buffers = [(Memory(records), Memory(share)) for records, share in buffers]
        self._every = every
        self._turns = turns
        self.owners: Mapping[str, Sequence[int]] = {}
        self.verified_at = -1
        self._seen = board.get(LEADER, Field.SNAPSHOT_NUMBER)
        self._put_off = 0  # boundaries at which it was due, and not taken
        self._newest = (0, 0)  # the newest request that was met, and the boundary then

    def report_size(self, channel: Channel) -> None:
        """After the first step: an estimate of each rank's copy, so that the agent can prepare the memory."""
        if self._is_leader:
            with contextlib.suppress(fail_open.NotRepairableError):  # reported when a snapshot is taken
                channel.send(SnapshotSize(self._whole_bytes() // self._board.n_ranks))

    def agree(self, channel: Channel, boundary: int, is_open: bool) -> None:
        """The first rank, before the record of `boundary` is announced: decide whether a snapshot is taken there.

        is_open   no run could resume from this boundary

        It is postponed, at most MOST_PUT_OFF times, if the boundary is open, or if nothing follows it that would show
        whether a replay of it is right.
        Without memory for all ranks' parts it is not taken, which is reported.
        """
        asked = self._board.cells[_ASKED]
        if asked == self._seen or (self._every and not self._put_off and boundary % self._every):
            return
        is_open = is_open or not self._recorder.evidence.is_likely(boundary)
        if is_open and self._put_off < MOST_PUT_OFF:
            self._put_off += 1
            return
        self._put_off = 0
        self._seen = asked
        why_not = self._why_no_room(asked)
        if why_not:
            channel.send(SnapshotTaken(asked, boundary, why_not))
            return
        self._board.set(LEADER, Field.SNAPSHOT_NUMBER, asked)
        self._board.set(LEADER, Field.SNAPSHOT_AT, boundary)

    def _why_no_room(self, number: int) -> str:
        """Why there is no memory for a snapshot, "" if there is. The ranks' shares have about the same size."""
        try:
            needed = self._whole_bytes()
            held_bytes = self._buffers[number % len(self._buffers)][1].held_bytes() * self._board.n_ranks
        except (fail_open.NotRepairableError, OSError):
            return ""  # reported when the snapshot is taken
        free = free_bytes()
        if free is None or needed - held_bytes <= free:
            return ""
        what = f"{needed >> 20} MiB of shared memory, and only {free >> 20} MiB more is free"
        return f"it takes {what}{pointer('memory-full')}"

    def _whole_bytes(self) -> int:
        """An estimate of the bytes that all ranks copy together; shards have about the same size in each."""
        parts = replicated.describe()[1]
        return sum(part.tensor.nbytes * (1 if part.place is None else self._board.n_ranks) for part in parts)

    def may_be_due(self, boundary: int) -> bool:
        """Whether the record of this boundary may become part of a snapshot, or of what the job resumes from.

        Asked of each boundary, before its record. A request counts for as long as it can be put off.
        """
        cells = self._board.cells
        if cells[_ASKED] != self._newest[0]:
            since = boundary if not self._every else -(-boundary // self._every) * self._every
            self._newest = cells[_ASKED], since
        return cells[_QUIESCED] != 0 or boundary in self._turns or 0 <= boundary - self._newest[1] <= MOST_PUT_OFF

    def is_due(self, boundary: int) -> bool:
        """Whether all ranks take a snapshot of `boundary`, or this one alone; valid when all have recorded it."""
        return boundary in self._turns or self._board.cells[_TAKEN_AT] == boundary

    @staticmethod
    def copy_all(frame: FrameType, memory: Memory | None) -> tuple[Memory, Share]:
        """Copy all that this rank holds into memory of its own process; returns that, and its description.

        frame    as for `take`
        memory   that an earlier call has returned, to be used again; None: new memory

        Raises NotRepairableError, OSError.
        """
        memory = memory or Memory(f"/proc/self/fd/{os.memfd_create('ttprun-step', os.MFD_CLOEXEC)}")
        return memory, copy(memory, 0, 1, frame)

    def take(self, session: Rank, boundary: int, frame: FrameType) -> None:
        """Copy this rank's part of the boundary that it has just reached, and report to the agent. Raises nothing.

        frame   innermost of the main thread's: its variables name the models
        """
        started_s = time.monotonic()
        number = self._board.get(LEADER, Field.SNAPSHOT_NUMBER)
        session.touch(Phase.SAVING)
        try:
            place = number % len(self._buffers)
            for_records, for_share = self._buffers[place]
            self._recorder.evidence.keep(boundary, place)
            is_alone = boundary in self._turns
            differing = Differing(self.owners, session.rank, range(session.world_size))
            which = (0, 1, frame) if is_alone else (session.local_rank, self._board.n_ranks, frame, differing)
            share = copy(for_share, *which)
            # Output after this boundary is not known yet: a rewind prints it again.
            records = msgpack.packb(self._recorder.export(boundary) | {"header": json.dumps(share.header)})
            for_records.fill(len(records), [memoryview(records)])
            took_s = time.monotonic() - started_s
            taken = SnapshotTaken(number, boundary, "", share, records_bytes=len(records), took_s=took_s)
            if is_alone or (session.options.verified and number % session.world_size == session.rank):
                self.verified_at = boundary
        except Exception as error:  # training continues
            taken = SnapshotTaken(number, boundary, why_not=f"rank {session.rank}: {error}")
        session.channel.send(taken)

    @staticmethod
    def digests_of_parts(raw: Any) -> str:
        """The digests of PARTS equal parts of a tensor's bytes, PART_DIGITS characters each."""
        ends = [len(raw) * at // PARTS for at in range(PARTS + 1)]
        return "".join(xxhash.xxh3_64_hexdigest(raw[at:end])[:PART_DIGITS] for at, end in pairwise(ends))

    def report_step(self, channel: Channel, boundary: int, why_not: str, **came_to: Any) -> None:
        """The step after a snapshot, which is verified, has ended; the arguments are those of `SnapshotTaken`."""
        channel.send(SnapshotTaken(0, boundary, why_not, **came_to))
