"""From which checkpoint a job goes on, and with which settings its state machine runs.

A new launch, or ranks that could not go on otherwise, resume from the newest checkpoint of the save directory that can
be used, or from the one that was named. Whether one can be used is asked here alone, so that nothing is promised of a
checkpoint which a later launch then refuses. Begin with `Resumption.find`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from ttprun import recovery
from ttprun.agent.base.stored_states import Stored, open_checkpoint, rank_file
from ttprun.capture.records.recorder import Recorder, RecordTooLargeError, records_up_to, why_not_replayable
from ttprun.capture.values.gaps import refusals
from ttprun.config import Config
from ttprun.errors import ConfigError, counted, in_short
from ttprun.observe.console import ProgressLog
from ttprun.observe.events import timestamp
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_status
from ttprun.recovery.replicas import Replicas
from ttprun.state.checkpoint import Checkpoint, fingerprint, inspect, note, why_passed_over
from ttprun.state.files import InvalidCheckpointError
from ttprun.state.store import CheckpointStore, last_written_first

logger = logging.getLogger("ttprun")

ENDED_NAME = "ended"  # a file of the save directory: the run that wrote its checkpoints has come to its end
_CHECKING = "checking a checkpoint"


class Resumption:
    """Finds and opens the checkpoints of one job.

    words                      the script and its arguments
    is_place_named             the next launch of the same command has the same save directory
    is_named                   one checkpoint was named: no other is tried
    is_of_leader               the agent that leads several nodes looks, once they have met
    is_found_by_same_command   the next launch of the same command goes on from what this one saves
    """

    def __init__(
        self,
        config: Config,
        store: CheckpointStore,
        world_size: int,
        words: Sequence[str],
        is_place_named: bool,
        is_of_leader: bool = False,
    ) -> None:
        self._config = config
        self._store = store
        self._world_size = world_size
        self._words = tuple(words)
        self.is_found_by_same_command = config.resume == "auto" and is_place_named
        self.is_of_leader = is_of_leader
        self.is_named = config.resume not in ("auto", "off")
        self._fingerprint = ""
        self._opened: Stored | None = None

    def resize(self, world_size: int) -> None:
        """The job has so many ranks from now on."""
        if world_size != self._world_size:
            self._world_size, self._opened, self._fingerprint = world_size, None, ""

    def find(self) -> tuple[recovery.Saved, ...]:
        """The checkpoint that `--resume` asks for, which is opened, and those to try if a rank refuses it.

        None at all: the script starts from its top. Says which checkpoints are passed over.

        Raises ConfigError: the checkpoint that was named is not valid, or none fits the job and the user can do
        something about it.
        """
        if self._config.resume == "off":
            return ()
        if self.is_named:
            return self._named(Path(os.path.expanduser(self._config.resume)).absolute())
        candidates = self._candidates()
        if candidates and (self._store.save_dir / ENDED_NAME).exists():
            logger.warning(
                "the run that wrote '%s' has ended, so this one starts anew (--resume %s resumes from it)",
                *(self._store.save_dir, candidates[0].path),
            )
            return ()
        of_user: ConfigError | None = None
        for place, candidate in enumerate(candidates):
            try:
                self.open(candidate.path)
            except InvalidCheckpointError as error:
                self._pass_over(candidate.name, error.reason)
            except ConfigError as error:
                of_user = of_user or error
                self._pass_over(candidate.name, str(error))
            else:
                self._say_found(candidate)
                return tuple(
                    recovery.Saved(checkpoint.boundary, str(checkpoint.path)) for checkpoint in candidates[place:]
                )
        if of_user is not None:
            raise of_user
        if self._store.checkpoints():
            logger.warning("no checkpoint in '%s' can be used, so the script starts anew", self._store.save_dir)
        else:
            self._say_found(None)
        return ()

    def _say_found(self, checkpoint: Checkpoint | None) -> None:
        """Say from which step this launch resumes, and how old that is: of a killed run nobody could save the end."""
        (killed, run_dir), where, end, when = self._store.killed, "", timestamp(), "ago"
        with contextlib.suppress(OSError, ValueError):  # it has run elsewhere, or its directory is gone
            status = read_status(RunDirectory(Path(run_dir or killed)).status) if killed else None
            if status is not None:
                saved_step = 0 if checkpoint is None else checkpoint.boundary  # the status is written later than that
                step = max((saved_step, *(rank.step or 0 for rank in status.ranks)))  # it may name no rank yet
                where, end, when = f" in step {step + 1}" if step else "", status.updated_at, "before"
        what = "it had saved nothing yet, so the script starts at its first step (--snapshot-every 5min)"
        if checkpoint is not None:
            made_at = datetime.fromisoformat(checkpoint.valid_manifest().created_at)
            age_s = max(int((datetime.fromisoformat(end) - made_at).total_seconds()), 0)
            what = f"step {checkpoint.boundary}, saved {timedelta(seconds=age_s)} {when}, {checkpoint.path}"
            what = f"this one resumes from its checkpoint of {what}" if killed else f"resuming from {what}"
        if killed or checkpoint is not None:
            logger.warning("%s%s", f"the launcher of run {killed} was killed{where}: " if killed else "", what)

    def _candidates(self) -> list[Checkpoint]:
        """The last written first; says which are passed over, if they could have been chosen."""
        checkpoints = self._store.checkpoints()
        valid = last_written_first(checkpoints)
        for checkpoint in checkpoints:
            if not checkpoint.is_valid and (not valid or checkpoint.boundary >= valid[0].boundary):
                self._pass_over(checkpoint.name, checkpoint.reason)
        return valid

    def _pass_over(self, name: str, why: str) -> None:
        logger.warning("checkpoint %s in '%s' is skipped: %s", name, self._store.save_dir, why)

    def _named(self, path: Path) -> tuple[recovery.Saved, ...]:
        checkpoint = inspect(path)
        if not checkpoint.is_valid:
            raise ConfigError(
                f"--resume: '{path}' is not a valid checkpoint ({checkpoint.reason})", "name another, or 'auto'"
            )
        try:
            self.open(path)
        except InvalidCheckpointError as error:
            raise ConfigError(f"--resume: '{path}' cannot be used: {error.reason}", "name another, or 'auto'") from None
        return (recovery.Saved(checkpoint.boundary, str(path)),)

    def opened(self, place: str, is_new: bool = False) -> Stored:
        """The checkpoint in a directory, which was checked before, or is now. Raises and `is_new` as in `open`."""
        opened = self._opened
        return opened if opened is not None and opened.place == place else self.open(Path(place), is_new)

    def open(self, path: Path, is_new: bool = False) -> Stored:
        """Open a checkpoint, once everything is checked that can be before a rank runs.

        is_new   it has just been written: its content need not be read for that

        Raises InvalidCheckpointError, with the reason, or ConfigError if the user can do something about it. Takes as
        long as the disk needs for it, unless it is new.
        """
        stored = self._opened = self._checked(path, is_new)
        return stored

    def _checked(self, path: Path, is_new: bool) -> Stored:
        began_s = time.monotonic()
        checkpoint = inspect(path)
        if not is_new:
            why_not = why_passed_over(path, self.fingerprint)
            if why_not:
                raise InvalidCheckpointError(why_not)
            checkpoint = self._store.verify(checkpoint, ProgressLog(_CHECKING).show)
        manifest = checkpoint.valid_manifest()
        stored = open_checkpoint(checkpoint, time.monotonic() - began_s)
        is_same = manifest.world_size == self._world_size and stored.arguments == self._words
        is_adapted = is_same and not is_new and self._config.resume_hyperparameters == "script"
        if is_same and not is_adapted:
            return replace(stored, without=check_records(stored, self._world_size, self._config))
        if script_of(stored.arguments) != script_of(self._words):
            raise ConfigError(
                f"checkpoint '{checkpoint.path}' is of '{shlex.join(stored.arguments)}', "
                f"and this is '{shlex.join(self._words)}'",
                "start the same script, or give --resume off to start anew",
            )
        what_differs = (
            f"is of {manifest.world_size} rank{'s' * (manifest.world_size > 1)}, and this job has {self._world_size}"
        )
        if stored.owners and manifest.world_size != self._world_size:
            raise ConfigError(
                f"checkpoint '{checkpoint.path}' {what_differs}; its ranks held different values of "
                f"{in_short(replicas_of(stored).all_names)}, and only the script knows how to divide them",
                f"start {counted(manifest.world_size, 'rank')}, or give --resume off to start anew",
            )
        from ttprun.elastic_resume.acceptance import adapted

        if is_adapted:
            what_differs = "is adapted to the script's hyperparameters (--resume-hyperparameters script)"
        elif manifest.world_size == self._world_size:
            what_differs = f"was made with other arguments ({difference_of(stored.arguments, self._words)})"
        paths = [str(checkpoint.file(rank_file(rank))) for rank in range(manifest.world_size)]
        return adapted(stored, paths, self._world_size, what_differs)

    def note_unusable(self, place: str, reason: str, is_refused: bool) -> None:
        """A rank has refused a checkpoint, or ranks were lost on the way to it: see `ttprun.state.checkpoint`.

        place        path of the checkpoint
        reason       a sentence
        is_refused   as for `checkpoint.note`
        """
        note(Path(place), self.fingerprint, reason, is_refused)

    @property
    def fingerprint(self) -> str:
        """Of this launch, for notes."""
        if not self._fingerprint:
            script = script_of(self._words)
            folder = Path.cwd() if len(script) > 1 else Path(script[0]).absolute().parent if script else Path.cwd()
            folders = [folder, *map(Path, self._config.user_paths)]
            self._fingerprint = fingerprint(self._words, self._world_size, folders)
        return self._fingerprint


def replicas_of(stored: Stored) -> Replicas:
    """Which ranks held the same, as far as a snapshot or checkpoint says so."""
    return Replicas(differing=stored.owners, names=stored.names)


def check_records(stored: Stored, world_size: int, config: Config) -> tuple[str, ...]:
    """Read the ranks' records as the ranks would read them.

    world_size   of the checkpoint, whose records are all read
    config       of this launch: limits and what counts as proof
    returns      what they do not hold, a sentence each

    Raises InvalidCheckpointError if a rank would refuse them, as far as they say so.
    """
    slot_bytes, without = config.record_limit_mib << 20, list[str]()
    for rank in range(world_size):
        fd = Recorder.create(slot_bytes)
        try:
            recorder = Recorder(fd, slot_bytes)
            recorder.restore(stored.rank_part(rank))
            records = records_up_to(recorder, stored.boundary)
            why_not = str(why_not_replayable(records))
            for sentence, is_needed in refusals(records[-1].fields):
                if sentence and (is_needed or config.proof == "strict"):
                    why_not = why_not or str(sentence)
                elif sentence:
                    without.append(str(sentence))
        except (RecordTooLargeError, ValueError, TypeError) as error:
            why_not = str(error)
        except KeyError as error:
            why_not = f"there is no record of step {error}"
        finally:
            os.close(fd)
        if why_not:
            raise InvalidCheckpointError(f"rank {rank}: {why_not}")
    return tuple(dict.fromkeys(without))


def difference_of(old: Sequence[str], new: Sequence[str]) -> str:
    """The arguments in which two command lines differ: "old: --lr 1e-3, new: --lr 2e-3"."""
    groups: list[list[tuple[str, ...]]] = []
    for words in (old, new):
        groups.append([])
        for word in words:
            if groups[-1] and not word.startswith("-") and groups[-1][-1][0].startswith("-"):
                groups[-1][-1] += (word,)
            else:
                groups[-1].append((word,))
    named = [
        shlex.join(word for group in mine if group not in others for word in group) or "none"
        for mine, others in (groups, groups[::-1])
    ]
    return "old: {:.80}, new: {:.80}".format(*named)


def script_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The script itself, or `-m` and the module."""
    return tuple(arguments[: 2 if tuple(arguments[:1]) == ("-m",) else 1])


def settings_of(
    config: Config, world_size: int, is_python: bool, max_restarts: int, resumption: Resumption
) -> recovery.Settings:
    """What the state machine must know of a job.

    is_python      False: the ranks run the user's own program, and none can be repaired
    max_restarts   how often torch may restart all ranks
    """
    limits = recovery.PhaseLimits(
        freeze_s=config.freeze_timeout_s,
        replay_s=config.replay_timeout_s,
        transfer_s=config.transfer_timeout_s,
        resume_s=config.resume_timeout_s,
        persist_s=config.persist_timeout_s,
        # A rank that must reach its next collective to quiesce needs more time.
        halt_s=config.freeze_timeout_s if config.mindio else recovery.PhaseLimits().halt_s,
    )
    is_one = world_size == 1 and not config.elastic
    rungs = config.without_repair() if not is_python else config.for_one_rank() if is_one else config
    return recovery.Settings(
        world_size=world_size,
        is_alone=world_size == 1 and is_python and not config.mindio and not config.elastic,
        rungs=frozenset(rungs.rungs),
        exception_retries=config.exception_retries,
        max_incidents_per_hour=config.max_incidents_per_hour,
        max_restarts=max_restarts,
        saves_before_restart=config.mindio,
        begins_anew=not resumption.is_named,
        same_command_goes_on=resumption.is_found_by_same_command,
        are_replicas_declared=config.mindio,
        is_elastic=config.elastic,
        limits=limits,
    )
