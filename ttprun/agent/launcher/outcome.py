"""The outcome of a job as a file beside its checkpoints, for whoever starts it again: `outcome-RUN_ID.json`.

A scheduler sees the exit codes of many launchers, and the highest of them is not the job's: a launcher whose node was
lost ends with 137, and the job may be done without it. So the launcher that leads writes how the job stands: when its
ranks start, and at its end. Jobs without a name of their own (`--run-id`) have none. Begin with `Outcomes.judge`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ttprun.early_signals import ENDED_BY_SIGNAL
from ttprun.observe.events import timestamp
from ttprun.state.store import CheckpointStore, last_written_first

DO_NOT_RESTART = 93
RESTARTS = "SLURM_RESTART_COUNT"  # how often Slurm has queued the job again; not set at its first start
_MOST_STARTS = 3  # in a row that have left no newer checkpoint
_INTERRUPTED = ENDED_BY_SIGNAL + signal.SIGINT


@dataclass(frozen=True)
class Outcome:
    """How a job stands.

    run_id     its name
    state      "running", also if all its launchers were killed since; "ended"
    exit_code  None while it runs
    step       optimizer steps that it has done
    reason     why it has ended, a sentence; "" if it is done
    restart    whether the same command, started again, would go on
    command    the script and its arguments
    start      how often the scheduler had started it again
    idle_starts  starts before this one, in a row, that have left no newer checkpoint
    checkpoint   the newest one at this start; "": there was none
    at         when this was written
    """

    run_id: str
    state: str
    exit_code: int | None = None
    step: int = 0
    reason: str = ""
    restart: bool = True
    command: list[str] = field(default_factory=list)
    start: int = 0
    idle_starts: int = 0
    checkpoint: str = ""
    at: str = ""

    @property
    def is_done(self) -> bool:
        """The script has come to its end."""
        return self.state == "ended" and self.exit_code == 0


def path_of(save_dir: str | Path, run_id: str) -> Path:
    """The file in which a job's outcome is."""
    return Path(os.path.expanduser(save_dir)).absolute() / f"outcome-{run_id}.json"


def read(path: Path) -> Outcome | None:
    """What is in such a file; None if it is not there, or is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Outcome(**{entry.name: content[entry.name] for entry in fields(Outcome) if entry.name in content})
    return None


def _idle_starts(before: Outcome | None, start: int, newest: str) -> int:
    """Starts before this one, in a row, that have come to nothing.

    before   what the last one has left that came as far as its ranks
    start    how often the scheduler has started the job again; 0: somebody starts it by hand, who sees what happens
    newest   checkpoint
    """
    if start == 0:
        return 0
    if before is None:
        return 0 if newest else start
    # Without any checkpoint of ours, the script may have its own: then its steps are progress.
    may_have_own = not newest and (before.state == "running" or before.step > 0)
    if before.checkpoint != newest or may_have_own:
        return 0
    return before.idle_starts + max(0, start - before.start)


class Outcomes:
    """The outcome of one job, as the launcher of one node knows it.

    Made before the nodes meet, so that all their launchers judge by the same file.
    """

    def __init__(self, save_dir: str | Path, run_id: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """`command`: the script and its arguments. Reads the directory; nothing is written."""
        self.path = path_of(save_dir, run_id)
        self._before = before = read(self.path)
        valid = last_written_first(CheckpointStore(save_dir).checkpoints())
        newest = valid[0].name if valid else ""
        restarts = environ.get(RESTARTS, "")
        start = int(restarts) if restarts.isdecimal() else 0
        idle = _idle_starts(before, start, newest)
        self.own = Outcome(run_id, "running", command=list(command), start=start, idle_starts=idle, checkpoint=newest)

    def judge(self) -> tuple[int, str] | None:
        """The exit code with which a launcher ends that has nothing to do, and why; None: the job starts.

        The job is done (0), or the scheduler starts it again and again and it gets no further (93).
        """
        before, own = self._before, self.own
        if before is not None and before.is_done and before.command == own.command:
            return 0, (
                f"job {own.run_id} is done: {before.step} steps, {before.at} ({self.path}). To train again, name "
                "another --run-id, or remove that file"
            )
        if own.idle_starts < _MOST_STARTS:
            return None
        since = f"the checkpoint is still {own.checkpoint}" if own.checkpoint else "there is no checkpoint"
        reason = (
            f"job {own.run_id} was started {own.idle_starts} times, and {since}: each start has ended before it "
            "could save, so a further one would not help. Give it more time (Slurm: --time, and more seconds in "
            f"--signal=B:USR1@), see the output above for what ended it, and remove {self.path}"
        )
        self._write(replace(own, state="ended", exit_code=DO_NOT_RESTART, reason=reason, restart=False))
        return DO_NOT_RESTART, reason

    def ended_meanwhile(self) -> Outcome | None:
        """How the job has ended since this was made; None if it has not."""
        now = read(self.path)
        has_ended = now is not None and now != self._before and now.state == "ended" and now.command == self.own.command
        return now if has_ended else None

    def begin(self) -> None:
        """The ranks are about to start, and this launcher leads."""
        self._write(self.own)

    def end(self, exit_code: int, step: int, reason: str) -> None:
        """The job has ended, and this launcher leads. If others say since that it is done, it was cut off from them."""
        meanwhile = self.ended_meanwhile()
        if meanwhile is not None and meanwhile.is_done:
            return
        restart = exit_code >= ENDED_BY_SIGNAL and exit_code != _INTERRUPTED
        self._write(replace(self.own, state="ended", exit_code=exit_code, step=step, reason=reason, restart=restart))

    def _write(self, outcome: Outcome) -> None:
        """Replace the file at once. A disk that is full or read-only costs the file: then the exit codes are left."""
        draft = self.path.with_name(f".{self.path.name}-{secrets.token_hex(4)}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = json.dumps(asdict(replace(outcome, at=timestamp())), indent=1)
            draft.write_text(text + "\n", encoding="utf-8")
            draft.replace(self.path)
