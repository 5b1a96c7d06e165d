"""A copy of a standby that imports what the ranks have imported by their first step, so that a replay need not.

The standby itself stays as it is, with torch alone: it serves a rank that is lost meanwhile, and makes the next copy if
this one comes to nothing. A module that a copy reports, dies of or hangs in is left out by the next one, and with it
whatever imports it: that costs a replay the time of their import, and nothing else. Begin with `Preloads.look`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ttprun.agent.node.node import Process
from ttprun.agent.node.rank_processes import Standby, StandbyCopy, command_of, kill_session, other_devices
from ttprun.observe.status import IMPORTS_FOLLOW
from ttprun.protocol import standby_messages
from ttprun.protocol.codec import encode
from ttprun.protocol.standby_messages import Imported, PreloadPlan, Ready

HANG_S = 300.0  # in one module, at a low priority on a busy machine
MAX_ROUNDS = 6
# These differ from rank to rank, or from one of its processes to the next.
_OWN = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"}) | {
    "TORCHELASTIC_ERROR_FILE"
}
_NAMED_AT_MOST = 3


def plan_of(reports: Sequence[Imported], starts: Sequence[dict[str, Any]]) -> PreloadPlan | str:
    """What all ranks of this node have imported; or why a standby must not import it.

    reports   of each local rank, the leader's first
    starts    with what each was started: arguments and environment
    """
    arguments = [command_of(start) for start in starts]
    if any(other != arguments[0] for other in arguments):
        return "the ranks have different arguments"
    if any(report.directory != os.getcwd() for report in reports):
        return "the script changes its working directory"
    environments = [start["env"] for start in starts]
    names = set().union(*environments)
    own = {name for name in names if len({environment.get(name) for environment in environments}) > 1}
    histories = [_history(report) for report in reports]
    changed = set().union(*histories)
    own |= {name for name in changed if any(other.get(name) != histories[0].get(name) for other in histories)}
    own |= _OWN
    common = set.intersection(*({(name, file) for name, file, _ in report.modules} for report in reports))
    modules = tuple(
        (name, file if (name, file) in common else "", {key: changes[key] for key in changes if key not in own})
        for name, file, changes in reports[0].modules
    )
    is_module = arguments[0][:1] == ["-m"]
    words = arguments[0][1:] if is_module else arguments[0]
    return PreloadPlan(modules, tuple(sorted(own)), words, given=tuple(sorted(own - changed)))


def _history(report: Imported) -> dict[str, list[str | None]]:
    """The values that a rank's script has given to each variable, one after the other."""
    history: dict[str, list[str | None]] = defaultdict(list)
    for _, _, changes in report.modules:
        for name, value in changes.items():
            history[name].append(value)
    return dict(history)


class Preloaded(Standby):
    """A copy of a standby that imports more.

    files     two empty ones in memory, of which it closes the first
    refused   modules that it should not have imported, and why; it must not become a rank then
    count     modules that it imports
    """

    def __init__(
        self, copy: StandbyCopy, plan: PreloadPlan, asked: standby_messages.Preload, files: Sequence[int]
    ) -> None:
        self.become(copy)
        self.refused: dict[str, str] = {}
        fd, self._notebook = files
        self._seen, self._seen_at_s = b"", time.monotonic()
        self.count = plan.count
        # By a file: it reads at its low priority, and a message of this size would have to wait for it.
        with open(fd, "wb") as file:
            file.write(encode(plan))
            file.flush()
            self.channel.send(asked, [fd, self._notebook])

    def take(self, message: Ready) -> None:
        """It has imported all."""
        super().take(message)
        self.refused = message.refused

    def running(self) -> list[str]:
        """The modules whose code runs, the innermost last."""
        size = int.from_bytes(os.pread(self._notebook, 4, 0), "little")
        return os.pread(self._notebook, size, 4).decode(errors="replace").split("\n") if size else []

    def hangs(self) -> bool:
        """It has been in one module for too long."""
        noted = os.pread(self._notebook, 1 << 16, 0)
        if noted != self._seen:
            self._seen, self._seen_at_s = noted, time.monotonic()
        return not self.is_ready and time.monotonic() - self._seen_at_s > HANG_S

    def close_notebook(self) -> None:
        """Nobody reads in it any more."""
        with contextlib.suppress(OSError):
            os.close(self._notebook)


class Preloads:
    """The copy that imports what the ranks of one group import, and what is known of modules that it must not import.

    follow    names of modules whose loops are followed, beside those of known frameworks
    loops     files in which earlier runs have met a training loop; None: on several nodes they may differ
    refusals  modules that it must not import, and why
    why_not   why there is none, "" if there is one or will be
    devices   which one each local rank uses, by its index in this node's processes
    moved     of `devices` those of ranks for which this index means another device now
    may_move  processes that use other devices than their ranks come to their ends
    given     what the environment of local ranks' next processes has, so that they have other devices
    """

    def __init__(
        self, follow: Sequence[str] = (), loops: list[str] | None = None, refusals: Mapping[str, str] | None = None
    ) -> None:
        self.why_not = ""
        self._follow = list(follow)
        self.loops = loops
        self._reports: dict[int, Imported] = {}
        self.devices: dict[int, int] = {}
        self.moved: dict[int, int] = {}
        self.may_move = True
        self._suspected, self._deserted = set[str](), set[str]()  # devices; "": this machine, which has none
        self.given: dict[int, dict[str, str]] = {}
        self._plan: PreloadPlan | None = None
        self.refusals = dict(refusals or {})
        self._rounds = 0
        self._current: Preloaded | None = None

    def note(self, local_rank: int, message: Imported, starts: Sequence[dict[str, Any]]) -> None:
        """A rank has reported after its first step what it has imported; a replacement's report changes nothing.

        local_rank   of the rank
        message      its report
        starts       with what each local rank was started: arguments and environment

        When all have reported, it is decided what the copy imports, or why nothing.
        """
        if self._plan is not None or self.why_not:
            return
        self._reports[local_rank] = message
        if len(self._reports) == len(starts):
            reports = [self._reports[rank] for rank in range(len(starts))]
            self._reports = {}
            plan = plan_of(reports, starts)
            # Else an index means another device in each of them.
            if not isinstance(plan, PreloadPlan) or not any(name.endswith("VISIBLE_DEVICES") for name in plan.own):
                self.devices = {rank: used for rank, one in enumerate(reports) if (used := one.device) is not None}
            if isinstance(plan, PreloadPlan):
                self._plan = plan
            else:
                self.why_not = plan

    def others(self, start: dict[str, Any]) -> tuple[str, dict[str, dict[str, str]]]:
        """As `other_devices`, of a process that is started so, without those that are not used again."""
        start, local_rank, indices = self.start_of(start), start["local_rank_id"], [*self.devices.values()]
        # Those that are alike are no rank's choice: a script may name devices without ever making one the current one.
        at = self.devices.get(local_rank) if len({*indices}) == len(indices) else local_rank
        device, others = other_devices(os.environ | start["env"], at)
        return device, {to: others[to] for to in others if self.may_move and to not in self._deserted}

    def note_suspect(self, slot: Process, here: Sequence[Process]) -> str:
        """A rank is suspect: if its device was before, its next process gets one that no rank has, if there is one.

        here      all ranks of this node
        returns   what was done, for people; "": nothing
        """
        device, _ = self.others(slot.handler.start)
        if device not in self._suspected:
            self._suspected.add(device)
            return ""
        name = f"device {device}" if device else "this machine"
        if not (to := self.give(slot, here)):
            return f"{name} was suspect before, and no other device is free: take {name} out of the job"
        self._deserted.add(device)
        return f"{name} was suspect before and is not used again: the rank uses device {to} from now on"

    def give(self, slot: Process, here: Sequence[Process], wanted: str = "") -> str:
        """Give a rank's next process a device that no rank has; returns which, "": none.

        here     all ranks of this node
        wanted   the only one that it may be; "": any
        """
        _, others = self.others(slot.handler.start)
        used = {self.others(each.handler.start)[0] for each in here}
        free = next((other for other in others if other not in used and wanted in ("", other)), "")
        if free:
            self.given[slot.local_rank] = others[free]
            self.moved[slot.local_rank] = self.devices.get(slot.local_rank, -1)
        return free

    def start_of(self, start: dict[str, Any]) -> dict[str, Any]:
        """With what a rank's next process is started, if the one before was started so."""
        return start | {"env": start["env"] | self.given.get(start["local_rank_id"], {})}

    def look(self, standby: Standby | None, watch: Callable[[Preloaded], None]) -> None:
        """Have a copy made if there should be one; end one that hangs.

        standby   one that can be copied now
        watch     called with a new copy
        """
        if self._current is not None:
            if self._current.hangs():
                self._refuse(self._current.running(), "its import does not end")
                kill_session(self._current.process.pid)
            return
        if standby is None or self._plan is None or self.why_not:
            return
        plan = self._plan.without(self.refusals)
        if not plan.count:
            self.why_not = "the ranks have imported nothing else that it could"
            return
        if self._rounds == MAX_ROUNDS:
            self.why_not = f"{MAX_ROUNDS} attempts to import what the ranks have imported failed"
            return
        files: list[int] = []
        try:
            for name in ("ttprun-plan", "ttprun-preload"):
                files.append(os.memfd_create(name))
            copy = standby.copy()
        except OSError:  # the launcher can open no more files: the next look may find some
            copy = None
        if copy is None:
            for fd in files:
                os.close(fd)
            return
        self._rounds += 1
        self._current = Preloaded(copy, plan, standby_messages.Preload(self._follow, self.loops), files)
        watch(self._current)

    def came(self, preloaded: Preloaded) -> bool:
        """It has answered; returns whether it can be used. If not, it has been killed."""
        if preloaded is not self._current:
            return False
        if not preloaded.refused and preloaded.is_copyable:
            return True
        for name, why in preloaded.refused.items():
            self._refuse([name], why)
        if not preloaded.refused:
            self.why_not = "what the ranks have imported leaves a thread or a device in use"
        kill_session(preloaded.process.pid)
        return False

    def lost(self, preloaded: Preloaded) -> None:
        """It has ended, and is to be buried."""
        if preloaded is not self._current:
            return  # of an earlier group
        if not preloaded.is_ready:
            self._refuse(preloaded.running(), "its import ends the process")
        elif not preloaded.refused:
            self._rounds -= 1  # somebody has killed it; that says nothing of the modules
        preloaded.close_notebook()
        self._current = None

    def _refuse(self, names: Sequence[str], why: str) -> None:
        for name in names:
            self.refusals.setdefault(name, why)

    @property
    def ready(self) -> Preloaded | None:
        """The copy, if a rank can be made of it."""
        copy = self._current
        is_there = copy is not None and copy.is_ready and copy.is_copyable and not copy.refused
        return copy if is_there and copy is not None and copy.is_alive else None

    @property
    def refused(self) -> dict[str, str]:
        """Why modules are left to a replay; of a package only itself, if all of it is."""
        return {
            name: why
            for name, why in sorted(self.refusals.items())
            if not any(name.startswith(other + ".") for other in self.refusals)
        }

    @property
    def state(self) -> str:
        """How it stands, for people."""
        preloaded = self.ready
        if preloaded is not None:
            text = f"{preloaded.count} modules loaded"
            refusals = [f"{name} ({why})" for name, why in self.refused.items()]
            more = len(refusals) - _NAMED_AT_MOST
            if refusals:
                text += f"; left to a replay: {', '.join(refusals[:_NAMED_AT_MOST])}" + (
                    f" and {more} more" if more > 0 else ""
                )
            return text
        if self.why_not:
            return f"torch loaded, nothing else: {self.why_not}"
        return f"torch loaded; {IMPORTS_FOLLOW}" if self._current is not None else "torch loaded"

    def give_up(self) -> Preloaded | None:
        """Know nothing of the present copy from now on."""
        current, self._current = self._current, None
        if current is not None:
            current.close_notebook()
        return current

    def end(self) -> None:
        """Kill it."""
        current = self.give_up()
        if current is not None:
            current.end()
