"""From which checkpoint a new launch goes on: the newest valid one of the save directory, or the one that was named."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from ttprun.agent.checkpoints import ENDED_NAME
from ttprun.agent.stored import Stored, open_checkpoint
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
    if manifest.world_size != world_size:
        raise ConfigError(
            f"checkpoint '{checkpoint.path}' is of {manifest.world_size} ranks, and this job has {world_size}",
            f"start {manifest.world_size} ranks, or give --resume off to begin anew",
        )
    try:
        stored = open_checkpoint(checkpoint, checked_s)
    except InvalidCheckpointError as error:
        raise ConfigError(f"checkpoint '{checkpoint.path}': {error.reason}", "name another with --resume") from None
    if stored.arguments != tuple(arguments):
        # The script's variables will have the values that they had, so new arguments would be passed over in silence.
        raise ConfigError(
            f"checkpoint '{checkpoint.path}' is of '{shlex.join(stored.arguments)}', "
            f"and this is '{shlex.join(arguments)}'",
            "give the same arguments, or --resume off to begin anew",
        )
    return stored


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
