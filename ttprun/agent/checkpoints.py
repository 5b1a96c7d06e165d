"""Checkpoints of this run: the living ranks write their shares, the agent adds their own parts and makes one of it.

What takes long is done on a thread of its own, one checkpoint at a time. What goes wrong costs the checkpoint and
nothing else: a reason is told, and older checkpoints stay. Begin with `Checkpoints.persist`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from ttprun import recovery
from ttprun.agent.comparisons import Comparisons
from ttprun.agent.node import Node
from ttprun.agent.processes import command_of
from ttprun.agent.resume import ENDED_NAME, Resumption
from ttprun.agent.seat import Seat
from ttprun.agent.shelf import Shelf
from ttprun.agent.stored import STATE_FILE, rank_file
from ttprun.errors import ConfigError
from ttprun.observe.events import timestamp
from ttprun.observe.progress import ProgressLog
from ttprun.observe.status import CheckpointStatus
from ttprun.protocol import to_rank
from ttprun.protocol.snapshots import Dumped, Share
from ttprun.rank.weights.checkpoint_shards import file_of
from ttprun.recovery.replicas import Replicas
from ttprun.state.checkpoint import Checkpoint, in_short
from ttprun.state.chunks import held_of, what_is_missing
from ttprun.state.draft import Draft
from ttprun.state.errors import InvalidCheckpointError
from ttprun.state.files import FileEntry, Fill
from ttprun.state.manifest import Description
from ttprun.state.store import CheckpointStore

logger = logging.getLogger("ttprun")


@dataclass
class _Writing:
    """A checkpoint for which the ranks are writing their shares.

    waiting   ranks that have not said yet that they are done
    told      what the others have said, by rank
    """

    draft: Draft
    order: recovery.Persist
    waiting: set[int]
    began_s: float
    told: dict[int, Dumped] = field(default_factory=dict)

    @property
    def shares(self) -> dict[int, Share]:
        """What each rank has written, by rank, of those that could."""
        return {rank: told.share for rank, told in self.told.items() if told.share is not None}


@dataclass(frozen=True)
class _Apart:
    """What a checkpoint must say of ranks that hold different things.

    headers   rank -> what it holds; empty if all hold the same
    replicas  which ranks hold the same
    """

    headers: Mapping[int, list[Any]]
    replicas: Replicas

    @property
    def fields(self) -> dict[str, Any]:
        """For the checkpoint's state file."""
        if not self.replicas.parted:
            return {}
        owners = {key: list(ranks) for key, ranks in self.replicas.parted.items()}
        return {"headers": dict(self.headers), "owners": owners, "names": dict(self.replicas.names)}


@dataclass(frozen=True)
class _Written:
    """What has become of a checkpoint.

    checkpoint     None if there is none
    why_not        why there is none
    why_unusable   why no run can go on from it
    """

    checkpoint: Checkpoint | None
    why_not: str
    why_unusable: str


class Checkpoints:
    """The checkpoints that this run has written.

    status   of the newest one that was tried, for `ttprun status`
    """

    def __init__(self, node: Node, store: CheckpointStore, resumption: Resumption, comparisons: Comparisons) -> None:
        self._node = node
        self._store = store
        self._resumption = resumption
        self._comparisons = comparisons
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]]] = queue.SimpleQueue()
        # A daemon: a disk that does not answer must not keep the launcher from its end.
        self._worker = threading.Thread(target=self._work, name="ttprun-checkpoint", daemon=True)
        self._worker.start()
        self._writing: _Writing | None = None
        self._filling: tuple[Path, ProgressLog] | None = None
        self.is_busy = False
        self.status: CheckpointStatus | None = None
        self._count = 0

    def _work(self) -> None:
        while (work := self._works.get()) is not None:
            work()

    def lock(self) -> None:
        """Take the directory for this run. Raises ConfigError: another job has it, or it cannot be written."""
        if not self._store.is_locked:
            self._store.lock(self._node.config.run_id or "")

    def end(self, is_done: bool) -> None:
        """Wait for what is being written; note it if the script has come to its end: nothing goes on from there.

        The note stands until another run has a checkpoint of its own.
        """
        self._works.put(None)
        limit_s = self._node.config.persist_timeout_s
        self._worker.join(limit_s)
        if self._worker.is_alive():
            logger.warning("a checkpoint is still being written after %.0f s (persist_timeout_s): abandoned", limit_s)
        self._take_outcomes(is_over=True)
        if self._store.is_locked:
            if is_done:
                self._note_end()
            self._store.unlock()

    def _note_end(self) -> None:
        try:
            (self._store.save_dir / ENDED_NAME).touch()
        except OSError as error:
            logger.warning(
                "that this run is done could not be noted in '%s' (%s): the next one resumes from its last checkpoint",
                *(self._store.save_dir, error.strerror),
            )

    # A checkpoint of the boundary at which all survivors are quiesced.

    def persist(self, order: recovery.Persist) -> None:
        """Have the ranks write their shares; the answer is StatePersisted."""
        if self._writing is not None:
            self._writing.draft.discard()
            self._writing = None
        try:
            self.lock()
            draft = self._store.begin(order.boundary)
        except ConfigError as error:
            self._fail(order, str(error))
            return
        self._writing = _Writing(draft, order, set(order.ranks), time.monotonic())
        self._begin(draft.folder)
        owners = {key: list(ranks) for key, ranks in self._node.job.replicas.parted.items()}
        writers = list(order.ranks)
        for share, rank in enumerate(order.ranks):
            path = str(draft.path(file_of(share)))
            dump = to_rank.Dump(order.generation, path, share, len(writers), owners, writers)
            self._node.seats[rank].tell(dump)

    def take_dumped(self, seat: Seat, message: Dumped) -> None:
        """A rank has written its share, or could not; after the last one the rest is done in the background."""
        writing = self._writing
        if writing is None or message.generation != writing.order.generation:
            return
        writing.waiting.discard(seat.rank)
        writing.told[seat.rank] = message
        if writing.waiting:
            return
        self._writing = None
        why_not = next((told.why_not for told in writing.told.values() if told.why_not), "")
        why_not = why_not or self._why_not_alike(writing)
        if not why_not and len({share.header_xxh3 for share in writing.shares.values()}) > 1:
            why_not = "the ranks hold different parameters"
        if why_not:
            writing.draft.discard()
            self._fail(writing.order, why_not, is_handled=any(told.is_handled for told in writing.told.values()))
            return
        boundary = writing.order.boundary
        replicas = self._node.job.replicas
        first = next(share for share in writing.shares.values() if share.share == 0)
        parts, missing = self._rank_parts(boundary)
        missing += what_is_missing(held_of(first.held), writing.order.ranks)
        missing += self._held_by_nobody(replicas, writing.order.ranks)
        for share in writing.shares.values():
            writing.draft.record(file_of(share.share), FileEntry(bytes=share.bytes, xxh3=share.xxh3))

        def done(written: _Written) -> None:
            checkpoint, place, why_not = written.checkpoint, "", written.why_not
            if checkpoint is not None and checkpoint.is_valid:
                place = str(checkpoint.path)
            elif checkpoint is not None:
                why_not = f"it would lack {in_short(missing)}; what there is was written to {checkpoint.path}"
            is_handled = any(told.is_handled for told in writing.told.values())
            self._tell_machine(writing.order.generation, place, why_not, written.why_unusable, is_handled)

        headers = {rank: share.header for rank, share in writing.shares.items()} if replicas.parted else {}
        for rank in range(len(self._node.seats)) if headers else ():
            peer = next(iter(replicas.peers(rank, writing.told)), None)
            if rank not in headers and peer is not None:
                headers[rank] = headers[peer]
        apart = _Apart(headers, replicas)
        self._submit(writing.draft, parts.items(), first, apart, writing.order.cause, missing, writing.began_s, done)

    def _why_not_alike(self, writing: _Writing) -> str:
        """Why what replicas have shared out among them is not one state; "" if it is."""
        digests = {rank: share.digests for rank, share in writing.shares.items()}
        keys = self._node.job.replicas.contradicted_by(digests)
        names = self._comparisons.names_of(keys)
        return f"ranks that were replicas of each other hold different values of {names}" if keys else ""

    def _held_by_nobody(self, replicas: Replicas, writers: Sequence[int]) -> list[str]:
        """What is missing of the lost ranks' own weights and optimizer state."""
        missing = []
        for rank in range(len(self._node.seats)):
            if rank in writers or not replicas.why_no_source(rank, writers):
                continue
            names = replicas.missing(rank, writers)
            missing += [f"{name} (rank {rank})" for name in names]
            if not names:
                missing.append(replicas.why_no_source(rank, writers))
        return missing

    def give_up(self, boundary: int, why_not: str) -> None:
        """The checkpoint that was asked for is not made; what the ranks have written of it is removed."""
        if self._writing is not None:
            self._writing.draft.discard()
            self._writing = self._filling = None
        self._note_failure(boundary, "asked", why_not)

    def _fail(self, order: recovery.Persist, why_not: str, is_handled: bool = False) -> None:
        """Nothing can be made of what was ordered."""
        self._filling = None
        self._note_failure(order.boundary, order.cause, why_not)
        self._tell_machine(order.generation, why_not=why_not, is_handled=is_handled)

    def _rank_parts(self, boundary: int) -> tuple[dict[int, bytes], list[str]]:
        """(each rank's own part, what is missing): the records outlive their ranks."""
        parts, missing = {}, []
        for seat in self._node.seats:
            try:
                exported = self._node.recorder_of(seat).export(boundary)
                parts[seat.rank] = msgpack.packb(exported | {"lines": self._node.lines_since(seat, boundary)})
            except KeyError:
                missing.append(f"variables and random states of rank {seat.rank} at step {boundary}")
        return parts, missing

    # A checkpoint of a snapshot.

    def write_snapshot(self, shelf: Shelf, done: Callable[[], None]) -> None:
        """Write a snapshot to disk in the background; `done` is called by the supervisor's thread at the end."""
        try:
            self.lock()
            draft = self._store.begin(shelf.boundary)
        except ConfigError as error:
            self._note_failure(shelf.boundary, "periodic", str(error))
            done()
            return
        self._begin(draft.folder)

        def finish(written: _Written) -> None:
            done()

        parts = [(rank, _reader_of(fd, shelf.told[rank].records_bytes)) for rank, fd in enumerate(shelf.records)]
        shares = [(rank, _reader_of(fd, shelf.written[rank].bytes)) for rank, fd in enumerate(shelf.shares)]
        apart = _Apart(shelf.headers, shelf.replicas)
        self._submit(draft, parts, shelf.first, apart, "periodic", [], time.monotonic(), finish, shares)

    # The common part.

    def _submit(
        self,
        draft: Draft,
        parts: Iterable[tuple[int, Any]],
        first: Share,
        apart: _Apart,
        cause: str,
        missing: list[str],
        began_s: float,
        done: Callable[[_Written], None],
        shares: Iterable[tuple[int, Fill]] = (),
    ) -> None:
        """Write what is missing in a draft and make it a checkpoint, on the worker's thread.

        parts   ranks' own parts
        first   what the rank with the first share has told: header and names of the tensors
        apart   what not all ranks hold alike
        shares  files of tensors that no rank writes itself
        done    called on the supervisor's thread
        """
        start = self._node.seats[0].handler.start
        words = command_of(start)
        script = " ".join(words[:2]) if words[:1] == ["-m"] else "".join(words[:1])
        description = Description(world_size=len(self._node.seats), cause=cause, script=script, model=first.model)

        def work() -> None:
            checkpoint, why_not, why_unusable = None, "", ""
            try:
                for share, content in shares:
                    draft.add(file_of(share), content)
                for rank, part in parts:
                    draft.add(rank_file(rank), part)
                state = {"header": first.header, "arguments": words, **apart.fields}
                draft.add(STATE_FILE, msgpack.packb(state))
                checkpoint = draft.keep_incomplete(description, missing) if missing else draft.commit(description)
                if checkpoint.is_valid:
                    with contextlib.suppress(OSError):  # then the next run begins anew, and says so
                        (self._store.save_dir / ENDED_NAME).unlink(missing_ok=True)
                    why_unusable = self._why_unusable(checkpoint)
            except ConfigError as error:
                why_not = str(error)
            except Exception as error:  # whatever it is, training must not feel it
                logger.exception("a checkpoint could not be written")
                why_not = repr(error)
                draft.discard()
            written = _Written(checkpoint, why_not, why_unusable)
            self._outcomes.put((lambda: note(written), lambda: done(written)))
            self._node.call(self._take_outcomes)

        def note(written: _Written) -> None:
            self.is_busy, self._filling = False, None
            if written.checkpoint is None:
                self._note_failure(draft.boundary, cause, written.why_not)
            else:
                reason = written.checkpoint.reason or written.why_unusable
                self._note(written.checkpoint, reason, cause, time.monotonic() - began_s)

        self.is_busy = True
        self._works.put(work)

    def _take_outcomes(self, is_over: bool = False) -> None:
        """Note what has become of checkpoints, and pass it on unless the run is over."""
        with contextlib.suppress(queue.Empty):
            while True:
                note, done = self._outcomes.get_nowait()
                note()
                if not is_over:
                    done()

    def _begin(self, folder: Path) -> None:
        self._filling = folder, ProgressLog("writing a checkpoint")

    def look(self) -> None:
        """Say how far it is, if a checkpoint takes long."""
        if self._filling is not None and self._filling[1].is_due:
            folder, progress = self._filling
            with contextlib.suppress(OSError):  # it has just become a checkpoint, or has been given up
                progress.show(sum(entry.stat().st_size for entry in os.scandir(folder)))

    def _why_unusable(self, checkpoint: Checkpoint) -> str:
        """Why a launch would not go on from what has just been written: whoever says so must have asked."""
        try:
            self._resumption.open(checkpoint.path, is_new=True)
        except (ConfigError, InvalidCheckpointError) as error:
            return str(error)
        return ""

    def _note(self, checkpoint: Checkpoint, reason: str, cause: str, took_s: float) -> None:
        size = checkpoint.manifest.size_bytes if checkpoint.manifest is not None else 0
        self._count += 1
        self.status = CheckpointStatus(
            number=self._count,
            boundary=checkpoint.boundary,
            cause=cause,
            path=str(checkpoint.path),
            bytes=size,
            took_s=took_s,
            written_at=timestamp(),
            reason=reason,
        )
        fields = {"boundary": checkpoint.boundary, "cause": cause, "path": str(checkpoint.path), "bytes": size}
        self._node.log("checkpoint_written", **fields, took_s=took_s, reason=reason)
        logger.log(
            logging.INFO if cause == "periodic" else logging.WARNING,
            "checkpoint of step %d: %.1f MiB in %.2f s, %s%s",
            *(checkpoint.boundary, size / (1 << 20), took_s, checkpoint.path),
            f" ({reason})" if reason else "",
        )

    def _note_failure(self, boundary: int, cause: str, why_not: str) -> None:
        self._count += 1
        self.status = CheckpointStatus(
            number=self._count, boundary=boundary, cause=cause, written_at=timestamp(), reason=why_not
        )
        self._node.log("checkpoint_failed", boundary=boundary, cause=cause, reason=why_not)
        logger.warning("no checkpoint%s: %s", f" of step {boundary}" if boundary else "", why_not)

    def _tell_machine(
        self, generation: int, place: str = "", why_not: str = "", why_unusable: str = "", is_handled: bool = False
    ) -> None:
        self._node.advance(
            recovery.StatePersisted(
                at_s=time.monotonic(),
                generation=generation,
                place=place,
                why_not=why_not,
                why_unusable=why_unusable,
                is_handled=is_handled,
            )
        )


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
