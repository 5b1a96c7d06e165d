"""A kept step of one rank, taken again in a process of its own (what is kept: rank/replay/kept_steps.py).

That process is welcomed as that rank of that job, and gets the orders of a rank that resumes from a stored state; there
are no other ranks. Begin with `take_again`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack

from ttprun.agent.base import stack_dumps
from ttprun.agent.node.rank_processes import kill_session, rank_environment
from ttprun.capture.records.recorder import Recorder
from ttprun.errors import ConfigError, in_short
from ttprun.protocol import channel, from_rank, rank_events, to_rank
from ttprun.protocol.board import Board
from ttprun.rank.bootstrap.install import CHANNEL_VARIABLE
from ttprun.rank.replay.kept_steps import FOLDER, RESULT, STATE, read_step

_GENERATION = 1  # that of its only order


@dataclass(frozen=True)
class Again:
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
        raise ConfigError(f"run '{run_dir}' has kept no step", "start it with --keep-steps 1")
    if rank is None and len(by_rank) > 1:
        raise ConfigError(f"steps of ranks {in_short([*map(str, by_rank)])} are kept", "name one with --rank")
    steps = by_rank.get(next(iter(by_rank)) if rank is None else rank, {})
    place_of = steps.get(next(reversed(steps), "") if step == "last" else step)
    if place_of is None:
        what = f"of rank {rank} no step is kept" if not steps else f"only steps {', '.join(steps)} are kept"
        raise ConfigError(f"run '{run_dir}': {what}", "choose another, or keep more with --keep-steps")
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


def take_again(folder: Path, debug: str = "") -> Again:
    """Take a kept step again; input and output are those of this process.

    debug   see `to_rank.Replay`

    Blocks until the process has ended. Raises ConfigError.
    """
    kept = opened(folder)
    words = kept["arguments"]
    if not words:
        return Again(why_not="the run's command is no Python script")
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
        return Again(why_not=why_not) if why_not else _result(place, error or f"exit code {process.returncode}")


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


def _result(place: Path, ending: str) -> Again:
    try:
        result = json.loads((place / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Again(why_not=f"the script has ended before the step was over: {ending}")
    equal = [_named(name, count) for name, count in result["equal"].items()]
    equal += [result["met"]] if result["met"] else []
    return Again(tuple(equal), tuple(result["differing"]), result["why_not"])


def _named(name: str, count: int) -> str:
    several = "" if count == 1 else "es" if name.endswith(("h", "s")) else "s"
    return f"{count} {name}{several}" if name != "weights" else "weights and optimizer state after the step"
