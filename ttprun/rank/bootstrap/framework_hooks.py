"""The hooks for --mindio, where the framework owns the train function: process groups, and little else."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ttprun.capture import installing
from ttprun.chaos import strikes
from ttprun.groups import script_calls
from ttprun.groups.journal import Journal
from ttprun.introspect import stages
from ttprun.introspect.current_rank import begin, current, leave_in_children
from ttprun.protocol import from_rank, mindio
from ttprun.rank.bootstrap import patch_table
from ttprun.rank.bootstrap.hooks import listen, make_session
from ttprun.rank.bootstrap.presence import Presence
from ttprun.rank.framework.callback_recovery import CallbackRecovery
from ttprun.rank.framework.framework import Framework


def install(presence: Presence) -> None:
    """Install what lasts as long as the process."""
    installing.leave_us_alone()
    script_calls.register()
    missing = patch_table.apply_for_frameworks()
    if missing:
        presence.channel.send(from_rank.Note(f"not protected on this torch version: {', '.join(missing)}"))
    leave_in_children()
    if presence.welcome.options.allow_faults:
        stages.listener = strikes
        strikes.begin(presence.welcome.faults, presence.channel)


def begin_run(presence: Presence, is_replacement: bool) -> None:
    """The script has just imported torch.

    is_replacement   this process replaces a lost one
    """
    session = make_session(presence)
    order = presence.order
    if is_replacement and isinstance(order, mindio.Prepare):
        framework = Framework(session, order.boundary, order.reboot_type)
    else:
        framework = Framework(session, None, "arf")
    session.framework = framework
    session[Journal].admit = framework.admit
    begin(session)
    listen(presence, session, CallbackRecovery(session, framework))


def wrap_process_group_name(original: Any) -> Any:
    """_process_group_name: give a group that is made during a repair the same name in all its members.

    torch derives the name from the number of groups that a process has made; a replacement has made fewer than the
    other ranks. Groups of the script's setup, which all ranks make alike, keep their names.
    """
    made: Counter[tuple[int, str]] = Counter()

    def process_group_name(ranks: Any, use_hashed_name: Any) -> Any:
        session = current()
        framework = session.framework if session is not None else None
        if session is None or not isinstance(framework, Framework) or not framework.is_past_setup:
            return original(ranks, use_hashed_name)
        of = "_".join(map(str, ranks)) if use_hashed_name else "all"
        made[session.generation, of] += 1
        return f"repair {session.generation} of {of}, {made[session.generation, of]}"

    return process_group_name
