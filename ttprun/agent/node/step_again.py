"""A step of one rank, taken again in a process of its own: a kept one (rank/replay/kept_steps.py), or one of a job that
runs and has its steps verified.

That process is welcomed as that rank of that job, and gets the orders of a rank that resumes from a stored state; there
are no other ranks. Begin with `take_again`, or with `Again`.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
from msgspec.structs import replace

from ttprun.agent.base import stack_dumps
from ttprun.agent.base.loop import unwatch
from ttprun.agent.base.stored_states import Stored
from ttprun.agent.node.node import Node
from ttprun.agent.node.process_watch import ProcessWatch, take_code
from ttprun.agent.node.rank_processes import (
    RankHandler,
    StandbyHandler,
    kill_session,
    lower_priority,
    rank_environment,
)
from ttprun.agent.node.standbys import Standbys
from ttprun.capture.records.recorder import Recorder
from ttprun.errors import ConfigError, in_short
from ttprun.protocol import channel, from_rank, rank_events, to_rank
from ttprun.protocol.board import Board
from ttprun.protocol.node_messages import Said, TakeAgain
from ttprun.protocol.snapshot_messages import SnapshotTaken
from ttprun.rank.bootstrap.install import CHANNEL_VARIABLE
from ttprun.rank.replay.kept_steps import FOLDER, RESULT, STATE, read_step

_GENERATION = 1  # that of its only order
_WRITTEN = "which writes steps when the script ends or raises, not when a signal ends it"


@dataclass(frozen=True)
class Outcome:
    """What has come of it.

    equal      what was compared and equal, a noun with its number each
    differing  what differs from the run, the first first; a phrase each
    why_not    why it cannot be taken again, or not to its end; "": it was
    """

    equal: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()
    why_not: str = ""


def chosen(run_dir: Path, rank: int | None, step: str) -> Path:
    """The folder of a kept step of a run.

    rank   None: the only one of which a step is kept
    step   its number, or "last"

    Raises ConfigError if there is none.
    """
    kept = sorted(place for place in (run_dir / FOLDER).glob("rank-*-step-*"))
    by_rank: dict[int, dict[str, Path]] = {}
    for place in kept:
        _, of_rank, _, number = place.name.split("-")
        by_rank.setdefault(int(of_rank), {})[str(int(number))] = place
    if not kept:
        raise ConfigError(f"run '{run_dir}' has kept no step", f"start it with --keep-steps 1, {_WRITTEN}")
    if rank is None and len(by_rank) > 1:
        raise ConfigError(f"steps of ranks {in_short([*map(str, by_rank)])} are kept", "name one with --rank")
    steps = by_rank.get(next(iter(by_rank)) if rank is None else rank, {})
    place_of = steps.get(next(reversed(steps), "") if step == "last" else step)
    if place_of is None:
        what = f"of rank {rank} no step is kept" if not steps else f"only steps {', '.join(steps)} are kept"
        raise ConfigError(f"run '{run_dir}': {what}", "choose another, ask on its node, or keep more (--keep-steps)")
    return place_of


def save(folder: Path, to: Path) -> None:
    """Copy a kept step, to be taken again elsewhere, with the script. Raises ConfigError."""
    try:
        shutil.copytree(folder, to)
    except OSError as error:
        raise ConfigError(f"the step cannot be saved in '{to}': {error}", "name a new folder") from None


def opened(folder: Path) -> dict[str, Any]:
    """As `read_step`. Raises ConfigError."""
    try:
        return read_step(folder)
    except (OSError, ValueError, LookupError) as error:
        raise ConfigError(f"the kept step '{folder}' cannot be read: {error}", "name another") from None


def take_again(folder: Path, debug: str = "") -> Outcome:
    """Take a kept step again; input and output are those of this process.

    debug   see `to_rank.Replay`

    Blocks until the process has ended. Raises ConfigError.
    """
    kept = opened(folder)
    words = kept["arguments"]
    if not words:
        return Outcome(why_not="the run's command is no Python script")
    script = Path(kept["cwd"], "" if words[0].startswith("-") else words[0])
    if not script.exists():  # records say by the path where the rank was
        raise ConfigError(f"'{script}' is not on this machine", "put the script at the same path as in the run")
    with TemporaryDirectory(prefix="ttprun-replay-", ignore_cleanup_errors=True) as name, ExitStack() as owned:
        place = Path(name)
        (place / "logs").mkdir()
        ours, theirs = channel.pair()
        owned.callback(ours.close)
        slot_bytes = kept["record_limit_mib"] << 20
        fds = [Board.create(kept["world_size"])[0], Recorder.create(slot_bytes), stack_dumps.create()]
        for fd in fds:
            owned.callback(os.close, fd)
        Recorder(fds[1], slot_bytes).restore(msgpack.unpackb(kept["records"], strict_map_key=False))
        environment = rank_environment(os.environ | kept["environment"] | _rendezvous(owned), str(place))
        process = subprocess.Popen(
            [sys.executable, "-u", *words],
            env=environment | {CHANNEL_VARIABLE: str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            cwd=kept["cwd"],
        )
        theirs.close()
        try:
            ours.send(_welcome(kept, words, str(place)), fds)
            why_not, error = _lead(ours, kept, folder, debug)
        finally:
            if process.poll() is None and sys.exc_info()[0] is not None:
                kill_session(process.pid)
        if why_not:
            process.kill()
        process.wait()
        return Outcome(why_not=why_not) if why_not else _result(place, error or f"exit code {process.returncode}")


def _rendezvous(owned: ExitStack) -> dict[str, str]:
    """A store of our own, for a script that looks for the others."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    owned.callback(lambda: store)
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _welcome(kept: dict[str, Any], words: list[str], run_dir: str) -> to_rank.Welcome:
    options = to_rank.Options(
        allow_faults=False,
        keeps_state=True,
        mirror=[],
        mirror_copies=[],
        mirror_copies_bytes=0,
        own_state=[],
        buffers=[],
        snapshot_every_steps=0,
        record_limit_mib=kept["record_limit_mib"],
        journal_limit_mib=0,
        commit_timeout_s=0.0,
        is_replaced=False,
        verify_every=0,
        overhead_budget=0.0,
        nan_limit_s=None,
        user_paths=kept["user_paths"],
        follow=kept["follow"],
        loops=None,
        may_rerun=False,
        retry_on=[],
        device_errors={},
        mindio=False,
        is_strict=False,
        prints_traceback=True,
    )
    return to_rank.Welcome(
        rank=kept["rank"],
        local_rank=kept["local_rank"],
        world_size=kept["world_size"],
        local_world_size=kept["local_world_size"],
        generation=0,
        run_dir=run_dir,
        is_replacement=True,
        options=options,
        had_torch=True,
        arguments=words,
    )


def _lead(ours: channel.Channel, kept: dict[str, Any], folder: Path, debug: str) -> tuple[str, str]:
    """Give the process its orders, until it has closed its line.

    returns   why the step cannot be taken again, and the error that has ended the script; "": none
    """
    boundary, error, place = kept["boundary"], "", folder.absolute()
    ours.send(to_rank.Replay(kept["rank"], _GENERATION, boundary, None, given=str(place), debug=debug))
    for message in ours.messages():
        match message:
            case from_rank.RankReplayed():
                header, state = json.loads(kept["header"]), (str(place / STATE),)
                ours.send(to_rank.LoadState((), _GENERATION, boundary, state, {}, header))
            case from_rank.RankRepaired():
                ours.send(to_rank.Resume((), _GENERATION, boundary))
            case rank_events.MismatchFound(reason=reason) | from_rank.RankUnprotected(reason=reason):
                return str(reason), error
            case from_rank.ScriptError():
                error = message.error
    return "", error


def _result(place: Path, ending: str) -> Outcome:
    try:
        result = json.loads((place / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Outcome(why_not=f"the script has ended before the step was over: {ending}")
    equal = [_named(name, count) for name, count in result["equal"].items()]
    equal += [result["met"]] if result["met"] else []
    return Outcome(tuple(equal), tuple(result["differing"]), result["why_not"])


def _named(name: str, count: int) -> str:
    several = "" if count == 1 else "es" if name.endswith(("h", "s")) else "s"
    return f"{count} {name}{several}" if name != "weights" else "weights and optimizer state after the step"


class Again:
    """Has a step of a rank taken again, by a copy of a standby that is told to be that rank, and by nobody else.

    It gets the orders of a rank that goes back to a snapshot; its board, records and stacks are its own.

    stored_of   what the rank began its step with
    """

    def __init__(
        self, node: Node, watch: ProcessWatch, standbys: Standbys, stored_of: Callable[[int], Stored | None]
    ) -> None:
        self._node, self._watch, self._standbys, self._stored_of = node, watch, standbys, stored_of
        self._handler: RankHandler | None = None

    def note_suspect(self, rank: int) -> str:
        """A rank is suspect; returns what was done with its device, for people, "" if nothing was."""
        return self._standbys.preloads.note_suspect(self._node.process(rank), self._node.here)

    def carry_out(self, order: TakeAgain) -> None:
        """As `TakeAgain` says. Whoever waits for it waits no longer than for any other step, whatever fails here."""
        self.end()
        if order.number:
            self._node.domains.run("snapshots", partial(self._begin, order))

    def _begin(self, order: TakeAgain) -> None:
        """Have it taken, each time on another device, if there are such; of two, the second time on the rank's own."""
        node, rank, number = self._node, order.rank, order.number
        slot, stored = node.process(rank), self._stored_of(rank)
        done = partial(self._report, order, slot.pid)
        if stored is None or (copy := self._standbys.copy()) is None:
            done(SnapshotTaken(0, order.boundary, "no standby is ready", rows=()))
            return
        lower_priority(copy.process.pid)
        own = [Board.create(node.world_size)[0], Recorder.create(node.slot_bytes), stack_dumps.create()]
        start = slot.handler.start | dict.fromkeys(("stdout", "stderr"), os.devnull)
        elsewhere = [*self._standbys.preloads.others(start)[1].values(), {}]
        start["env"] = start["env"] | elsewhere[(number - 1) % len(elsewhere)]
        handler = self._handler = StandbyHandler(start, copy)
        try:
            Recorder(own[1], node.slot_bytes).restore(stored.rank_part(rank))
            welcome, fds = self._watch.introduction(slot, handler, is_replacement=True)
            nothing: dict[str, Any] = {key: [] for key in ("mirror", "mirror_copies", "own_state", "buffers")}
            nothing |= {"verify_every": 0, "snapshot_every_steps": 0, "nan_limit_s": None, "trace": "", "keep_steps": 0}
            nothing |= {"verified_every": 0}
            options = replace(welcome.options, **nothing, allow_faults=False)
            handler.channel.waits = True
            alone = replace(welcome, options=options, faults=[], address="")
            handler.channel.send(alone, [*own, *fds[welcome.descriptors :]])
        finally:
            for fd in own:
                os.close(fd)
        orders: dict[type[channel.Message], channel.Order] = {
            from_rank.Present: to_rank.Replay(
                rank, node.generation, stored.boundary, None, given=welcome.options.verified
            ),
            from_rank.RankReplayed: to_rank.LoadState(
                *((), node.generation, stored.boundary, stored.files),
                owners={key: list(ranks) for key, ranks in stored.owners.items()},
                header=stored.header_of(rank),
            ),
            from_rank.RankRepaired: to_rank.Resume((), node.generation, stored.boundary),
        }
        take = partial(self._take, handler, orders, done, stored.boundary)
        node.selector.register(handler.channel.sock, selectors.EVENT_READ, take)

    def _report(self, order: TakeAgain, pid: int, taken: SnapshotTaken) -> None:
        self._node.report(Said(order.rank, pid, replace(taken, number=order.number)))

    def _take(
        self,
        handler: RankHandler,
        orders: Mapping[type[channel.Message], channel.Order],
        done: Callable[..., None],
        boundary: int,
    ) -> None:
        try:
            messages = handler.channel.read_available()
        except (EOFError, OSError):
            messages = [SnapshotTaken(0, boundary, "its process has ended", rows=())]
        for message in messages:
            match message:
                case rank_events.MismatchFound(reason=reason) | from_rank.RankUnprotected(reason=reason):
                    message = SnapshotTaken(0, boundary, str(reason), rows=())
                case from_rank.ScriptError(error=error):
                    message = SnapshotTaken(0, boundary, error, rows=())
            if type(message) in orders:
                handler.channel.send(orders[type(message)])
            elif isinstance(message, SnapshotTaken) and self._handler is handler:
                self._standbys.preloads.may_move &= not message.why_not
                self.end()
                done(message)

    def end(self) -> None:
        """Nobody waits for it any more: end its process."""
        handler, self._handler = self._handler, None
        if handler is not None:
            unwatch(self._node.selector, handler.channel.sock)
            kill_session(handler.proc.pid)
            handler.close()
            self._node.in_background(partial(take_code, handler))
