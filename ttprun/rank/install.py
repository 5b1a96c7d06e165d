"""Install the hooks in this process. Called by the shim at interpreter start, and by a standby when it is needed.

`begin` costs no torch import. The hooks proper are installed by `take_over`, when the script has imported torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ttprun.board import Board, Phase
from ttprun.channel import Channel
from ttprun.faults import parse_fault
from ttprun.rank import damage, heartbeat, rewrite, stack
from ttprun.rank.frames import add_user_directory
from ttprun.rank.presence import Presence

PR_SET_PDEATHSIG = 1
CHANNEL_VARIABLE = "_TTPRUN_CHANNEL_FD"
_TRACEBACK_BYTES = 16 << 10  # of a traceback, its end
_MESSAGE_BYTES = 300
AGENT_VARIABLE = "_TTPRUN_AGENT_PID"


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def begin() -> None:
    """Become a rank: greet the agent, and wait for torch to be imported. Called once, by the shim."""
    fd = int(os.environ.pop(CHANNEL_VARIABLE))
    agent = int(os.environ.get(AGENT_VARIABLE, "0"))
    die_with_parent()
    if agent and os.getppid() != agent:
        os._exit(1)  # the agent has died in between
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    welcome, fds = channel.receive_with_fds()
    rewrite.install()
    script = rewrite.script_of(sys.orig_argv)
    enter(channel, welcome, fds, rewrite.full_path(script))
    if not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path) and "torch" not in sys.modules:
        sys.meta_path.insert(0, _AfterTorch())


def enter(channel: Channel, welcome: dict[str, Any], fds: list[int], script: str) -> None:
    """Take the identity that the agent gives; a replacement waits here till it knows where to go.

    script   its full path, "" if a module or something else is run
    """
    global _presence
    directories = [os.path.dirname(script), rewrite.directory_of(script)] if script else [os.getcwd()]
    for path in (*directories, *welcome["options"]["user_paths"]):
        add_user_directory(path)
    _presence = Presence(channel, welcome, fds)
    _presence.start()
    stack.write_when_asked(fds[2])
    heartbeat.start(Board(fds[0], welcome["local_world_size"]), welcome["local_rank"])
    channel.send({"op": "present", "pid": os.getpid(), "main_thread": threading.main_thread().ident})
    os.register_at_fork(before=_before_fork, after_in_child=_leave_in_child)
    atexit.register(_finish)
    sys.excepthook = tell_before(sys.excepthook)
    strike_at_start(welcome)
    if welcome["is_replacement"]:
        _presence.may_start.wait()
        if _presence.order["op"] == "replay":
            # The lost rank had torch. With it here from the start, nothing that the replay prints gets out.
            sys.meta_path.insert(0, _AfterTorch())
            import torch  # noqa: F401


def strike_at_start(welcome: dict[str, Any]) -> None:
    """Faults of phase "start" strike before anything else; the others wait for their hooks."""
    for ordered in welcome["faults"]:
        fault = parse_fault(ordered["fault"])
        if fault.phase == "start" and _presence is not None:
            damage.cause(_presence.channel, damage.Armed(ordered["number"], fault), "start", 0, None)


def tell_before(previous: Any) -> Any:
    """sys.excepthook: tell the agent what ends the script.

    Before the first step a script mostly fails in all ranks alike: then the agent prints the traceback, once.
    """

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        presence = _presence
        if presence is not None:
            presence.has_script_failed = True
        if presence is None or issubclass(kind, KeyboardInterrupt):
            previous(kind, error, trace)
            return
        session = sys.modules.get("ttprun.rank.session")
        found = session.current() if session is not None else None
        is_early = (found is None or found.applied == 0) and not presence.welcome["options"]["prints_traceback"]
        text = "".join(traceback.format_exception(kind, error, trace))[-_TRACEBACK_BYTES:]
        told = {"error": _in_one_line(kind, error), "traceback": text if is_early else "", "detail": text}
        presence.channel.send({"op": "script_error", **told})
        if not is_early:
            previous(kind, error, trace)

    return tell


def _in_one_line(kind: type[BaseException], error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{kind.__name__}: {lines[0][:_MESSAGE_BYTES]}" if lines else kind.__name__


_presence: Presence | None = None
_is_forking_main = False


def _before_fork() -> None:
    global _is_forking_main
    _is_forking_main = threading.current_thread() is threading.main_thread()


def _leave_in_child() -> None:
    """A forked child (a DataLoader worker) is no rank; it ends with the rank that forked it from its main thread."""
    global _presence
    if _presence is not None:
        stack.forget()
        for fd in _presence.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(OSError):
            os.close(_presence.channel.fileno())
        _presence = None
        if _is_forking_main:
            die_with_parent()


def _finish() -> None:
    """The script has come to its end; an exception that has ended it is told by the exit code."""
    if _presence is not None and os.getpid() == _presence.pid and not _presence.has_script_failed:
        from ttprun.rank import faults

        try:
            faults.reached("exit")
        except damage.InjectedFaultError:  # nobody above us would turn it into an exit code
            sys.excepthook(*sys.exc_info())
            os._exit(damage.EXIT_CODE)
        module = sys.modules.get("ttprun.rank.session")
        session = module.current() if module is not None else None
        if session is not None and session.replay is not None:
            session.replay.refuse(
                f"the replay has come to the script's end and not by the place of boundary {session.replay.boundary}"
            )


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the hooks when the script has imported torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            take_over()

        loader.exec_module = exec_module
        return spec


def take_over() -> None:
    """torch is there: install the hooks, and go on as a rank that can be repaired. Never lets an exception out."""
    presence = _presence
    if presence is None:
        return
    try:
        _install_hooks(presence)
    except Exception as error:  # we fail open: the script runs as under torchrun
        presence.channel.send({"op": "unprotected", "reason": f"the hooks could not be installed: {error!r}"})


def _install_hooks(presence: Presence) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    from ttprun.rank import (
        appends,
        boundary,
        connection,
        faults,
        files,
        groups,
        loaders,
        loops,
        output,
        patches,
        workers,
    )
    from ttprun.rank.journal import Journal
    from ttprun.rank.recorder import Recorder
    from ttprun.rank.recovery import Recovery
    from ttprun.rank.replay import Replay
    from ttprun.rank.results import Results
    from ttprun.rank.session import Session, begin
    from ttprun.rank.verification import Verifier

    welcome, options = presence.welcome, presence.welcome["options"]
    recorder = Recorder(presence.fds[1], options["record_limit_mib"] << 20)
    journal = Journal(options["journal_limit_mib"] << 20)
    session = Session(
        rank=welcome["rank"],
        local_rank=welcome["local_rank"],
        world_size=welcome["world_size"],
        run_dir=welcome["run_dir"],
        options=options,
        channel=presence.channel,
        board=Board(presence.fds[0], welcome["local_world_size"]),
        recorder=recorder,
        journal=journal,
        verifier=Verifier(presence.channel, journal, options["verify_every"], options["on_nan"] == "stop"),
        results=Results(recorder),
        exchange=connection.Exchange(presence.channel),
        generation=presence.generation,
    )
    journal.tell_broken = lambda reason, after_s: session.tell_broken(session.generation, reason, after_s)
    order = presence.order
    is_replay = bool(order) and order["op"] == "replay"
    loops.positioned_by_themselves(loaders.iterator_types())
    loops.Hooks.is_compiling = torch.compiler.is_dynamo_compiling
    groups.register()
    workers.keep_in(recorder)
    missing = patches.apply_all(with_replay=welcome["is_replacement"])
    if missing:
        presence.channel.send({"op": "note", "text": f"not protected on this torch version: {', '.join(missing)}"})
    register_optimizer_step_pre_hook(boundary.before_step)
    register_optimizer_step_post_hook(boundary.after_step)
    output.count_lines()
    begin(session)
    for ordered in welcome["faults"]:
        faults.arm(ordered["number"], parse_fault(ordered["fault"]))
    if options["allow_faults"]:
        faults.watch_modules()
    if is_replay:
        files.mute_all()
        session.replay = Replay(session, order["boundary"], tuple(order["skip_lines"]))
        session.replay.begin()
    elif welcome["is_replacement"]:
        output.skip_lines(*order["skip_lines"])
        appends.go_on_from(recorder, order["boundary"])
        if session.expected is None:
            from ttprun.rank.expected import Expected

            session.expected = Expected(session.channel, session.generation, order["expected"])
    recovery = Recovery(session)
    recovery.start()
    presence.hand_over(recovery.take)
    session.touch(Phase.SETUP)
    presence.channel.send({"op": "protected"})
