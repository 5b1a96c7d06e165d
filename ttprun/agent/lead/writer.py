"""The thread on which checkpoints are written to disk, one at a time, and what has become of the newest.

What goes wrong costs the checkpoint and nothing else: a reason is given, and older checkpoints stay.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from ttprun.agent.base.stored_states import STATE_FILE, rank_file
from ttprun.agent.lead.resume import ENDED_NAME, Resumption
from ttprun.agent.lead.rows import Lead
from ttprun.errors import ConfigError
from ttprun.observe.console import ProgressLog
from ttprun.observe.events import timestamp
from ttprun.observe.status import CheckpointStatus
from ttprun.protocol.snapshot_messages import Share
from ttprun.recovery.replicas import Replicas
from ttprun.state.checkpoint import Checkpoint, Description
from ttprun.state.files import Fill, InvalidCheckpointError
from ttprun.state.store import CheckpointStore, Draft
from ttprun.tensors.shares import file_of

logger = logging.getLogger("ttprun")
_TO_END_S = 1.0  # that the launcher needs behind its last checkpoint
_LEAST_S = 0.2  # a thread that has nothing to do has ended by then


def differences_of(headers: Mapping[int, list[Any]], replicas: Replicas) -> dict[str, Any]:
    """What a checkpoint's state file says of ranks that hold different things.

    headers   rank -> what it holds; empty if all hold the same
    replicas  which ranks hold the same
    """
    if not replicas.differing:
        return {}
    owners = {key: list(ranks) for key, ranks in replicas.differing.items()}
    return {"headers": dict(headers), "owners": owners, "names": dict(replicas.names)}


@dataclass(frozen=True)
class Written:
    """What has become of a checkpoint.

    checkpoint     None if there is none
    why_not        why there is none
    why_unusable   why no run can resume from it
    without        what a run that resumes has as its set-up makes it, a sentence each
    """

    checkpoint: Checkpoint | None
    why_not: str
    why_unusable: str
    without: tuple[str, ...] = ()


class CheckpointWriter:
    """Writes checkpoints on a thread of its own.

    status    of the newest one that was tried, for `ttprun status`
    is_busy   one is being written
    count     checkpoints that were tried
    """

    def __init__(self, node: Lead, store: CheckpointStore, resumption: Resumption) -> None:
        self._node = node
        self._store = store
        self._resumption = resumption
        self._works: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]]] = queue.SimpleQueue()
        # A daemon: a disk that does not answer must not keep the launcher from its end.
        self._worker = threading.Thread(target=self._work, name="ttprun-checkpoint", daemon=True)
        self._worker.start()
        self._filling: tuple[Path, ProgressLog] | None = None
        self.is_busy = False
        self.status: CheckpointStatus | None = None
        self.count = 0

    def _work(self) -> None:
        while (work := self._works.get()) is not None:
            work()

    def lock(self) -> None:
        """Take the directory for this run. Raises ConfigError: another job has it, or it cannot be written."""
        if not self._store.is_locked:
            self._store.lock(self._node.config.run_id or "", self._node.config.run_dir or "")

    def end(self, is_done: bool, left_s: float = math.inf) -> None:
        """Wait for what is being written; note it if the script has come to its end: nothing resumes from there.

        left_s   seconds until the scheduler kills this process

        The note stands until another run has a checkpoint of its own.
        """
        self._works.put(None)
        limit_s = min(self._node.config.persist_timeout_s, max(_LEAST_S, left_s - _TO_END_S))
        self._worker.join(limit_s)
        if self._worker.is_alive():
            which = "persist_timeout_s" if limit_s == self._node.config.persist_timeout_s else "grace_s"
            logger.warning("a checkpoint is still being written after %.0f s (%s): abandoned", limit_s, which)
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

    def submit(
        self,
        draft: Draft,
        parts: Iterable[tuple[int, Any]],
        first: Share,
        differences: dict[str, Any],
        cause: str,
        missing: list[str],
        began_s: float,
        done: Callable[[Written], None],
        shares: Iterable[tuple[int, Fill]] = (),
    ) -> None:
        """Write what is missing in a draft and make it a checkpoint, on the worker's thread.

        parts   ranks' own parts
        first   what the rank with the first share has reported: header and names of the tensors
        differences  what not all ranks hold alike
        shares  files of tensors that no rank writes itself
        done    called on the supervisor's thread
        """
        words = self._node.eyes.command()
        script = " ".join(words[:2]) if words[:1] == ["-m"] else "".join(words[:1])
        description = Description(world_size=len(self._node.slots), cause=cause, script=script, model=first.model)

        def work() -> None:
            checkpoint, why_not, why_unusable = None, "", ""
            without: tuple[str, ...] = ()
            try:
                for share, content in shares:
                    draft.add(file_of(share), content)
                for rank, part in parts:
                    draft.add(rank_file(rank), part)
                state = {"header": first.header, "arguments": words, **differences}
                draft.add(STATE_FILE, msgpack.packb(state))
                checkpoint = draft.keep_incomplete(description, missing) if missing else draft.commit(description)
                if checkpoint.is_valid:
                    why_unusable, without = self._read_back(checkpoint)
            except ConfigError as error:
                why_not = str(error)
            except Exception as error:  # whatever it is, training must not feel it
                logger.exception("a checkpoint could not be written")
                why_not = repr(error)
                draft.discard()
            written = Written(checkpoint, why_not, why_unusable, without)
            self._outcomes.put((lambda: note(written), lambda: done(written)))
            self._node.call(self._take_outcomes)

        def note(written: Written) -> None:
            self.is_busy, self._filling = False, None
            if written.checkpoint is None:
                self.note_failure(draft.boundary, cause, written.why_not)
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

    def begin(self, boundary: int) -> Draft:
        """A checkpoint to write. Raises ConfigError: there is no place for it."""
        self.lock()
        draft = self._store.begin(boundary)
        self._filling = draft.folder, ProgressLog("writing a checkpoint")
        return draft

    def drop(self, draft: Draft) -> None:
        """It will not be submitted."""
        draft.discard()
        self._filling = None

    def look(self) -> None:
        """Say how far it is, if a checkpoint takes long."""
        if self._filling is not None and self._filling[1].is_due:
            folder, progress = self._filling
            with contextlib.suppress(OSError):  # it has just become a checkpoint, or has been given up
                progress.show(sum(entry.stat().st_size for entry in os.scandir(folder)))

    def _read_back(self, checkpoint: Checkpoint) -> tuple[str, tuple[str, ...]]:
        """(why a launch would not resume from what has just been written, what it would lack then)."""
        try:
            (self._store.save_dir / ENDED_NAME).unlink(missing_ok=True)
            return "", self._resumption.open(checkpoint.path, is_new=True).without
        except OSError as error:
            return f"'{ENDED_NAME}' beside it, by which a launch starts anew, stays ({error.strerror})", ()
        except (ConfigError, InvalidCheckpointError) as error:
            return str(error), ()

    def _note(self, checkpoint: Checkpoint, reason: str, cause: str, took_s: float) -> None:
        size = checkpoint.manifest.size_bytes if checkpoint.manifest is not None else 0
        self.count += 1
        self.status = CheckpointStatus(
            number=self.count,
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

    def note_failure(self, boundary: int, cause: str, why_not: str) -> None:
        """There is no checkpoint, and why: for the status, the event log and the console.

        boundary   which it would have held; 0 if that is not known
        cause      why it was to be taken, as in Manifest
        why_not    completes "no checkpoint:"
        """
        self.count += 1
        self.status = CheckpointStatus(
            number=self.count, boundary=boundary, cause=cause, written_at=timestamp(), reason=why_not
        )
        self._node.log("checkpoint_failed", boundary=boundary, cause=cause, reason=why_not)
        logger.warning("no checkpoint%s: %s", f" of step {boundary}" if boundary else "", why_not)
