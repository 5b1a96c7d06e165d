"""What a checkpoint of this run is made of: the living ranks write their shares, the agent adds their own parts.

Begin with `Checkpoints.persist`; how it gets to disk is in `writer.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgpack

from ttprun import recovery
from ttprun.agent.base import stored_states
from ttprun.agent.base.stored_states import NO_RECORD, Stored, rank_file
from ttprun.agent.lead.comparisons import Comparisons
from ttprun.agent.lead.resume import replicas_of
from ttprun.agent.lead.rows import Lead, Row, Wire
from ttprun.agent.lead.writer import CheckpointWriter, Written, differences_of
from ttprun.errors import ConfigError, in_short
from ttprun.protocol import node_messages, to_rank
from ttprun.protocol.snapshot_messages import Dumped, MirroredShare, Share, SnapshotTaken
from ttprun.recovery.replicas import Replicas
from ttprun.state.chunks import held_of, what_is_missing
from ttprun.state.files import FileEntry, Fill
from ttprun.state.store import Draft
from ttprun.tensors.shares import file_of


@dataclass
class SnapshotBuffer:
    """Memory for one snapshot: two memfds for each rank.

    records, shares   by local rank: its own part, and its share of what replicas hold
    reports           what the ranks have reported of it
    replicas          which ranks held the same when it was taken
    is_asked          ranks have the order to write here, and may do so at any moment
    is_read           it is being written to disk
    """

    records: list[int]
    shares: list[int]
    boundary: int = 0
    reports: dict[int, SnapshotTaken] = field(default_factory=dict)
    replicas: Replicas = field(default_factory=Replicas)
    is_asked: bool = False
    is_read: bool = False

    @property
    def written(self) -> dict[int, Share]:
        """The ranks' shares, by local rank."""
        return {rank: report.share for rank, report in self.reports.items() if report.share is not None}

    @property
    def first(self) -> Share:
        """The first share, which has what only one rank writes."""
        return next(share for share in self.written.values() if share.share == 0)

    @property
    def size_bytes(self) -> int:
        """Of the whole snapshot."""
        return sum(report.records_bytes + self.written[rank].bytes for rank, report in self.reports.items())

    @property
    def headers(self) -> dict[int, list[Any]]:
        """By rank, what they hold; empty if all hold the same."""
        return {rank: share.header for rank, share in self.written.items()} if self.replicas.differing else {}

    def as_stored(self) -> Stored:
        """What ranks can go back to. They read it through this process, which holds the descriptors."""
        files = tuple(stored_states.path_of(fd) for fd in self.shares)
        return Stored(
            self.boundary,
            "shared memory",
            (),
            self.first.header,
            files,
            lambda rank: stored_states.part_in(self.records[rank]),
            headers=self.headers,
            owners=self.replicas.differing,
            names=self.replicas.names,
        )

    def close(self) -> None:
        """Give the memory back."""
        for fd in (*self.records, *self.shares):
            os.close(fd)


@dataclass
class _Writing:
    """A checkpoint for which the ranks are writing their shares.

    waiting   ranks that have not said yet that they are done
    reports   what the others have said, by rank
    elsewhere  ranks of other nodes whose own parts are not written yet
    missing   ranks whose own parts there are no records for
    held      whose records this node has: its own ranks, and those of a lost node of which it keeps copies
    """

    draft: Draft
    order: recovery.Persist
    waiting: set[int]
    began_s: float
    elsewhere: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    held: list[Row] = field(default_factory=list)
    reports: dict[int, Dumped] = field(default_factory=dict)

    @property
    def mirrored(self) -> dict[int, Share]:
        """What was written from the mirrors of lost ranks, by rank."""
        return {rank: share for report in self.reports.values() for rank, share in report.mirrored.items()}

    @property
    def shares(self) -> dict[int, Share]:
        """What each rank has written, by rank, of those that could."""
        return {rank: report.share for rank, report in self.reports.items() if report.share is not None}


@dataclass
class Checkpoints:
    """Composes checkpoints of what the ranks hold, or have held at a snapshot.

    writer     has them written to disk
    why_never  why none can be written in this job, "" if they can
    """

    _node: Lead
    _wire: Wire
    writer: CheckpointWriter
    _comparisons: Comparisons
    why_never: str = ""
    _writing: _Writing | None = None

    @property
    def is_busy(self) -> bool:
        """One is being written to disk."""
        return self.writer.is_busy

    # A checkpoint of the boundary at which all survivors are quiesced.

    def persist(self, order: recovery.Persist) -> None:
        """Have the ranks write their shares; the answer is StatePersisted."""
        self.drop()
        if self._comparisons.why_not_stored:
            self.fail(order, self._comparisons.why_not_stored)
            return
        try:
            if self.why_never:
                raise ConfigError(self.why_never, "name one that all nodes share (--save-dir)")
            draft = self.writer.begin(order.boundary)
        except ConfigError as error:
            self.fail(order, str(error))
            return
        self._writing = _Writing(draft, order, set(order.ranks), time.monotonic())
        self._order_parts(self._writing)
        owners = {key: list(ranks) for key, ranks in self._node.job.replicas.differing.items()}
        writers = list(order.ranks)
        mirrored = self._mirrored(draft, order)
        for share, rank in enumerate(order.ranks):
            path, mirrors = str(draft.path(file_of(share))), mirrored.get(rank, [])
            dump = to_rank.Dump(order.generation, order.boundary, path, share, len(writers), owners, writers, mirrors)
            self._node.slots[rank].send(dump)

    def _mirrored(self, draft: Draft, order: recovery.Persist) -> dict[int, list[MirroredShare]]:
        """What is to be written from the mirrors of lost ranks that no living one replicates, by the rank to write it.

        That is one of the node that would keep the mirror: its agent knows whether there is one of that boundary.
        """
        replicas, peers, shares = self._node.job.replicas, self._node.peers, dict[int, list[MirroredShare]]()
        number = len(order.ranks)
        for lost in range(len(self._node.slots)):
            if lost in order.ranks or replicas.peers(lost, order.ranks):
                continue
            holder = peers.holder_of(lost)
            near = [rank for rank in order.ranks if peers.node_of(rank) == holder]
            if near:
                share = MirroredShare(lost, str(draft.path(file_of(number))), number)
                shares.setdefault(near[number % len(near)], []).append(share)
                number += 1
        return shares

    def _order_parts(self, writing: _Writing) -> None:
        """What is a rank's own is written by the agent that has its records: of its node, or of the next one."""
        peers = self._node.peers
        for slot in self._node.slots:
            holder = peers.holder_of(slot.rank)
            if holder is None:
                writing.missing.add(slot.rank)
            elif holder == peers.node:
                writing.held.append(slot)
            else:
                path = str(writing.draft.path(rank_file(slot.rank)))
                writing.elsewhere.add(slot.rank)
                self._wire.order_on(holder, node_messages.StorePart(slot.rank, writing.order.boundary, path))

    def take_part(self, message: node_messages.PartStored) -> None:
        """The agent of another node has written what is a rank's own, or could not."""
        writing = self._writing
        if writing is None or message.boundary != writing.order.boundary or message.rank not in writing.elsewhere:
            return
        writing.elsewhere.discard(message.rank)
        if not message.why_not:
            writing.draft.record(rank_file(message.rank), FileEntry(bytes=message.bytes, xxh3=message.xxh3))
        elif message.why_not == NO_RECORD:
            writing.missing.add(message.rank)
        else:
            self._writing = None
            self.writer.drop(writing.draft)
            self.fail(writing.order, message.why_not)
            return
        self._finish_if_all_is_there(writing)

    def take_dumped(self, slot: Row, message: Dumped) -> None:
        """A rank has written its share, or could not; after the last one the rest is done in the background."""
        writing = self._writing
        if writing is None or message.generation != writing.order.generation:
            return
        writing.waiting.discard(slot.rank)
        writing.reports[slot.rank] = message
        self._finish_if_all_is_there(writing)

    def _finish_if_all_is_there(self, writing: _Writing) -> None:
        if writing.waiting or writing.elsewhere:
            return
        self._writing = None
        why_not = next((report.why_not for report in writing.reports.values() if report.why_not), "")
        why_not = why_not or self._comparisons.why_not_alike(self._node.job.replicas, writing.shares)
        shares = writing.shares | writing.mirrored
        if not why_not and len({share.header_xxh3 for share in shares.values()}) > 1:
            why_not = "the ranks hold different parameters"
        if why_not:
            self.writer.drop(writing.draft)
            self.fail(writing.order, why_not, is_handled=any(report.is_handled for report in writing.reports.values()))
            return
        boundary = writing.order.boundary
        replicas = self._node.job.replicas
        first = next(share for share in writing.shares.values() if share.share == 0)
        parts, missing = self._rank_parts(boundary, writing.held)
        missing += [_what_is_lost(rank, boundary) for rank in sorted(writing.missing)]
        saved = [*writing.order.ranks, *writing.mirrored]
        held_still = [rank for rank in range(len(self._node.slots)) if replicas.peers(rank, saved)]
        missing += what_is_missing(held_of(first.held), [*saved, *held_still])
        missing += self._held_by_nobody(replicas, saved)
        for share in shares.values():
            writing.draft.record(file_of(share.share), FileEntry(bytes=share.bytes, xxh3=share.xxh3))

        is_handled = any(report.is_handled for report in writing.reports.values())
        done = partial(self._report, writing.order, missing=missing, is_handled=is_handled)
        headers = {rank: share.header for rank, share in shares.items()} if replicas.differing else {}
        for rank in range(len(self._node.slots)) if headers else ():
            peer = next(iter(replicas.peers(rank, writing.reports)), None)
            if rank not in headers and peer is not None:
                headers[rank] = headers[peer]
        differences = differences_of(headers, replicas)
        self.writer.submit(
            writing.draft, parts.items(), first, differences, writing.order.cause, missing, writing.began_s, done
        )

    def _report(
        self, order: recovery.Persist, written: Written, missing: Sequence[str] = (), is_handled: bool = False
    ) -> None:
        checkpoint, place, why_not = written.checkpoint, "", written.why_not
        if checkpoint is not None and checkpoint.is_valid:
            place = str(checkpoint.path)
        elif checkpoint is not None:
            why_not = f"it would lack {in_short(missing)}; what there is was written to {checkpoint.path}"
        self._node.advance(
            recovery.StatePersisted(
                at_s=time.monotonic(),
                generation=order.generation,
                place=place,
                why_not=why_not,
                why_unusable=written.why_unusable,
                without=in_short(written.without, 1),
                is_handled=is_handled,
            )
        )

    def _held_by_nobody(self, replicas: Replicas, writers: Sequence[int]) -> list[str]:
        """What is missing of the lost ranks' own weights and optimizer state, shards aside."""
        replicas, missing = replace(replicas, shards={}), []
        for rank in range(len(self._node.slots)):
            if rank in writers or not replicas.why_no_source(rank, writers):
                continue
            names = replicas.missing(rank, writers)
            missing += [f"{name} (rank {rank})" for name in names]
            if not names:
                missing.append(str(replicas.why_no_source(rank, writers)))
        return missing

    def drop(self) -> None:
        """Remove what the ranks have written of a checkpoint that is not complete."""
        if self._writing is not None:
            self.writer.drop(self._writing.draft)
            self._writing = None

    def give_up(self, order: recovery.GiveUpCheckpoint) -> None:
        """The checkpoint that was asked for is not made."""
        self.drop()
        self.writer.note_failure(order.boundary, "asked", order.reason)

    def fail(self, order: recovery.Persist, why_not: str, is_handled: bool = False) -> None:
        """Nothing can be made of what was ordered."""
        self.writer.note_failure(order.boundary, order.cause, why_not)
        at_s, generation = time.monotonic(), order.generation
        self._node.advance(
            recovery.StatePersisted(at_s=at_s, generation=generation, why_not=why_not, is_handled=is_handled)
        )

    def _rank_parts(self, boundary: int, slots: Sequence[Row]) -> tuple[dict[int, bytes], list[str]]:
        """(each own part of these ranks, what is missing): the records outlive their ranks."""
        parts, missing = {}, []
        for slot in slots:
            try:
                parts[slot.rank] = self._node.eyes.own_part(slot.rank, boundary)
            except KeyError:
                missing.append(_what_is_lost(slot.rank, boundary))
        return parts, missing

    # A checkpoint of a snapshot, or of what lost ranks have kept.

    def save(self, order: recovery.Persist, stored: Stored) -> None:
        """Write what is kept in shared memory of ranks that live no more; the answer is StatePersisted."""
        try:
            draft = self.writer.begin(order.boundary)
        except ConfigError as error:
            self.fail(order, str(error))
            return
        parts = [
            (slot.rank, self._node.eyes.own_part(slot.rank, order.boundary))
            if stored.is_in_recorder
            else (slot.rank, msgpack.packb(stored.rank_part(slot.rank)))
            for slot in self._node.slots
        ]
        first = Share(0, 0, "", "", {}, "", header=stored.header)
        differences = differences_of(stored.headers, replicas_of(stored))
        began_s, files, done = time.monotonic(), _readers_of(stored.files), partial(self._report, order)
        self.writer.submit(draft, parts, first, differences, order.cause, [], began_s, done, files)

    def write_snapshot(self, buffer: SnapshotBuffer, done: Callable[[], None]) -> None:
        """Write a snapshot to disk in the background; `done` is called by the supervisor's thread at the end."""
        try:
            draft = self.writer.begin(buffer.boundary)
        except ConfigError as error:
            self.writer.note_failure(buffer.boundary, "periodic", str(error))
            done()
            return
        parts = [(rank, _reader_of(fd, buffer.reports[rank].records_bytes)) for rank, fd in enumerate(buffer.records)]
        shares = [(rank, _reader_of(fd, buffer.written[rank].bytes)) for rank, fd in enumerate(buffer.shares)]
        differences = differences_of(buffer.headers, buffer.replicas)
        self.writer.submit(
            draft, parts, buffer.first, differences, "periodic", [], time.monotonic(), lambda _: done(), shares
        )


def _what_is_lost(rank: int, boundary: int) -> str:
    return f"variables and random states of rank {rank} at step {boundary}"


def _readers_of(paths: Sequence[str]) -> Iterator[tuple[int, Fill]]:
    """(number, gives its bytes) of each file."""
    for share, path in enumerate(paths):
        with open(path, "rb", buffering=0) as file:
            yield share, file.readinto


def _reader_of(fd: int, size_bytes: int) -> Fill:
    """Gives so many bytes of a file from its beginning; raises ValueError if there are fewer."""
    at = 0

    def fill(buffer: memoryview) -> int:
        nonlocal at
        count = os.preadv(fd, [buffer[: size_bytes - at]], at)
        at += count
        if not count and at < size_bytes:
            raise ValueError(f"{size_bytes - at} bytes of a snapshot are missing")
        return count

    return fill
