"""The settings of the state machine: what the configuration comes to for one job."""

from __future__ import annotations

from ttprun import recovery
from ttprun.agent.launcher.resume import Resumption
from ttprun.config import Config


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
