"""From which checkpoint a new launch goes on: the newest valid one of the save directory, or the one that was named."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ttprun.agent.adapt import adapted
from ttprun.agent.checkpoints import ENDED_NAME
from ttprun.agent.stored import Stored, open_checkpoint, rank_file
from ttprun.config import Config
from ttprun.errors import ConfigError
from ttprun.observe.progress import ProgressLog
from ttprun.state.checkpoint import Checkpoint, inspect, verify
from ttprun.state.errors import InvalidCheckpointError
from ttprun.state.store import CheckpointStore

logger = logging.getLogger("ttprun")

_CHECKING = "checking a checkpoint"


def find(config: Config, store: CheckpointStore, world_size: int, arguments: Sequence[str]) -> Stored | None:
    """What `--resume` asks for; None: the script starts from its top.

    world_size   ranks of this launch
    arguments    of this launch: the script and its own

    Raises ConfigError: the checkpoint that was named is not valid, or does not fit the job.
    """
    if config.resume == "off":
        return None
    began_s = time.monotonic()
    checkpoint = _newest(store) if config.resume == "auto" else _named(Path(config.resume))
    if checkpoint is None:
        return None
    checked_s = time.monotonic() - began_s
    manifest = checkpoint.valid_manifest()
    try:
        stored = open_checkpoint(checkpoint, checked_s)
        if manifest.world_size == world_size and stored.arguments == tuple(arguments):
            return stored
        if script_of(stored.arguments) != script_of(arguments):
            raise ConfigError(
                f"checkpoint '{checkpoint.path}' is of '{shlex.join(stored.arguments)}', "
                f"and this is '{shlex.join(arguments)}'",
                "start the same script, or give --resume off to begin anew",
            )
        what_differs = (
            f"is of {manifest.world_size} rank{'s' * (manifest.world_size > 1)}, and this job has {world_size}"
        )
        if manifest.world_size == world_size:
            what_differs = f"was made with other arguments ('{shlex.join(stored.arguments)}')"
        paths = [str(checkpoint.file(rank_file(rank))) for rank in range(manifest.world_size)]
        return adapted(stored, paths, world_size, what_differs)
    except InvalidCheckpointError as error:
        raise ConfigError(f"checkpoint '{checkpoint.path}': {error.reason}", "name another with --resume") from None


def script_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The script itself, or `-m` and the module."""
    return tuple(arguments[: 2 if tuple(arguments[:1]) == ("-m",) else 1])


def _newest(store: CheckpointStore) -> Checkpoint | None:
    checkpoint, skipped = store.newest_valid(ProgressLog(_CHECKING).tell)
    for name, reason in skipped:
        logger.warning("checkpoint %s in '%s' is passed over: %s", name, store.save_dir, reason)
    if checkpoint is not None and (store.save_dir / ENDED_NAME).exists():
        logger.warning(
            "the run that wrote '%s' has come to its end, so this one begins anew (--resume %s goes on from there)",
            *(store.save_dir, checkpoint.path),
        )
        return None
    return checkpoint


def _named(path: Path) -> Checkpoint:
    checkpoint = inspect(path.expanduser().absolute())
    if checkpoint.is_valid:
        checkpoint = verify(checkpoint, ProgressLog(_CHECKING).tell)
    if not checkpoint.is_valid:
        raise ConfigError(f"--resume: '{path}' is no valid checkpoint ({checkpoint.reason})", "name another, or 'auto'")
    return checkpoint
