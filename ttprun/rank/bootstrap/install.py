"""Install the hooks in this process. Called by the shim at interpreter start, and by a standby when it is needed.

`begin` costs no torch import. The hooks proper (`hooks.py`) are installed by `take_over`, when the script has imported
torch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from itertools import dropwhile, pairwise
from typing import TYPE_CHECKING, Any

from ttprun import text_hashes
from ttprun.capture import effects
from ttprun.capture.position import user_code
from ttprun.device.device_errors import DeviceFault, Diagnosis, causes_of, in_one_line
from ttprun.introspect import children, current_rank, signal_handlers
from ttprun.introspect.fail_open import session_now
from ttprun.introspect.ownership import add_named_path, add_user_directory, variables_of
from ttprun.introspect.patching import after_import, is_overdue
from ttprun.protocol import from_rank, mindio, to_rank
from ttprun.protocol.board import Board
from ttprun.protocol.channel import Channel
from ttprun.protocol.reason import Reason
from ttprun.rank import heartbeat, held_signals
from ttprun.rank.bootstrap import patch_table, unhooked
from ttprun.rank.bootstrap.presence import Presence, diagnose

if TYPE_CHECKING:
    from ttprun.introspect.current_rank import Rank


PR_SET_PDEATHSIG = 1
CHANNEL_VARIABLE = "_TTPRUN_CHANNEL_FD"
_RANK_DIED = signal.SIGRTMAX - 6  # to its forked children; beside the signal of rank/heartbeat.py
_TRACEBACK_BYTES = 16 << 10  # of a traceback, its end
_OURS = os.path.dirname(text_hashes.__file__) + os.sep
_ROOM_LIMIT_S, _NEXT_PIECE_S, _LOOK_EVERY_S = 20.0, 1.5, 0.1
_EARLY_THREADS_LIMIT_S = 1.0  # for a failed script's threads; before the first step they have nothing to save
_THREADS_LIMIT_S = 30.0  # as torch gives to ranks that it ends
AGENT_VARIABLE = "_TTPRUN_AGENT_PID"


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to kill this process, or to send it another signal, when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def begin() -> None:
    """Become a rank: connect to the agent, and wait for torch to be imported. Called once, by the shim."""
    fd = int(os.environ.pop(CHANNEL_VARIABLE))
    agent = int(os.environ.get(AGENT_VARIABLE, "0"))
    die_with_parent()
    is_in_wrapper = bool(agent) and os.getppid() != agent
    if is_in_wrapper and not unhooked.is_below(os.getppid(), agent):
        os._exit(1)  # the agent has died meanwhile
    os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=fd))
    if is_in_wrapper:
        # The agent watches our parent, and would take its exit for ours.
        why = f"its Python is a child of {unhooked.command_of(os.getppid())}: start Python with `exec` there"
        channel.send(from_rank.RankUnprotected(Reason("hooks-missing", why)))
        return
    welcome, fds = channel.receive_with_fds()
    if not isinstance(welcome, to_rank.Welcome):
        why = f"the agent's first message is not a welcome: {welcome}"
        channel.send(from_rank.RankUnprotected(Reason("ttprun-error", why)))
        return
    if not welcome.options.mindio:
        user_code.install(welcome.options.follow, welcome.options.loops)
    script = user_code.script_of(sys.orig_argv)
    enter(channel, welcome, fds, user_code.full_path(script))


def enter(channel: Channel, welcome: to_rank.Welcome, fds: list[int], script: str) -> None:
    """Take the identity that the agent assigns; a replacement waits here until the agent orders where to resume.

    The hooks are installed as soon as torch is imported, perhaps at once: a .pth file in site-packages, or the user's
    own `sitecustomize`, may have imported it already.

    script   its full path, "" if a module or something else is run
    """
    global _presence
    directories = [os.path.dirname(script), user_code.directory_of(script)] if script else [os.getcwd()]
    for path in directories:
        add_user_directory(path)
    for path in welcome.options.user_paths:
        add_named_path(path)
    text_hashes.note_who_seeded()
    _presence = Presence(channel, welcome, fds)
    _presence.start()
    heartbeat.write_when_asked(fds[2])
    board = Board(fds[0], welcome.world_size)
    heartbeat.start(board, welcome.rank, _look_for_hooks)
    held_signals.hold(board)
    _presence.greet(board)
    os.register_at_fork(before=_before_fork, after_in_child=_leave_in_child)
    atexit.register(_finish)
    sys.excepthook = report_before(sys.excepthook)
    strike_at_start(welcome)
    if welcome.is_replacement:
        _presence.may_start.wait()  # until the agent's order; at its deadline the agent kills this process
    patch_table.apply_early(welcome.options.mindio)
    if not welcome.options.mindio:
        effects.listen()
    after_import("torch", take_over)
    if welcome.is_replacement and (welcome.had_torch or isinstance(_presence.order, to_rank.Replay | mindio.Prepare)):
        # With torch imported first, the setup gets what the lost rank drew before it imported torch, and nothing that a
        # replay prints is shown.
        import torch  # noqa: F401


def _look_for_hooks() -> None:
    """Once a second, on the heartbeat's thread: check that torch, if imported for a second, has its hooks."""
    global _was_overdue
    is_due = is_overdue("torch")
    if is_due and _was_overdue:
        _report_unhooked()
    _was_overdue = is_due


def _report_unhooked() -> None:
    """Report to the agent, once, if the script trains where no hook of ours counts its steps."""
    global _has_reported
    presence = _presence
    why = None if presence is None or _has_reported else unhooked.why()
    if presence is not None and why:
        _has_reported = True
        presence.channel.send(from_rank.RankUnprotected(why))


def strike_at_start(welcome: to_rank.Welcome) -> None:
    """Cause the injected faults of phase "start"; those of other phases wait for their hooks."""
    if not welcome.faults:
        return
    from ttprun.chaos import damage  # a companion
    from ttprun.chaos.injected_faults import parse_fault

    for ordered in welcome.faults:
        fault = parse_fault(ordered.fault)
        if fault.phase == "start" and _presence is not None:
            damage.cause(_presence.channel, damage.Armed(ordered.number, fault), "start", 0, None)


def report_before(previous: Any) -> Any:
    """sys.excepthook: report to the agent what ends the script, then call `previous`.

    Before the first step a script mostly fails in all ranks alike: then the agent prints the traceback, once.
    """

    @signal_handlers.gate
    def report(kind: Any, error: Any, trace: Any) -> None:
        presence = _presence
        if presence is None or not isinstance(error, BaseException) or _is_caught(trace):
            signal_handlers.call_through(previous, (kind, error, trace), {})
            return
        if held_signals.is_end_near() and not presence.is_ended_by_agent():
            # E.g. a scheduler has signalled the DataLoader's workers too. This process holds the state to be saved.
            with contextlib.suppress(KeyboardInterrupt):
                held_signals.wait_until_saved()
        if issubclass(kind, KeyboardInterrupt) or presence.is_ended_by_agent():
            presence.has_script_failed = True
            trace = _leave_out_ours(error)
            if _is_of_end(presence, error) and not presence.welcome.options.prints_traceback:
                _keep_interrupted(presence, error)
            else:
                signal_handlers.call_through(previous, (kind, error, trace), {})
            return
        if "ttprun.introspect.current_rank" not in sys.modules:
            _report_unhooked()
        error, diagnosis = _run_again(presence, error, trace)
        if diagnosis.fault is DeviceFault.DEVICE_BUSY:
            _wait_for_room(presence)
        kind, trace = type(error), _leave_out_ours(error)
        presence.has_script_failed = True
        session = session_now()
        if session is not None:
            session.end_run()
        is_early = (session is None or session.applied == 0) and not presence.welcome.options.prints_traceback
        text = "".join(traceback.format_exception(kind, error, trace))[-_TRACEBACK_BYTES:]
        missed = session.mode.difference if session is not None else ""
        what = " ".join(filter(None, (in_one_line(error), _place_of(trace))))
        if session is not None:
            if session.keeper is not None:
                session.keeper.write(what)
            session.mode.end_by_error(what)
        why = "; ".join(filter(None, (what, lost_worker(error))))
        why = f"{why}; the replay did not reach its boundary: {missed}" if missed else why
        presence.channel.send(from_rank.ScriptError(why, text if is_early else "", text, diagnosis.name))
        if diagnosis.rung == "restart" and session is not None:
            session.give_up_protection(
                Reason("device-fault-spread", f"{diagnosis.name}: the other ranks' state may be wrong too")
            )
        if not is_early and diagnosis.fault is not DeviceFault.DEVICE_BUSY:
            signal_handlers.call_through(previous, (kind, error, trace), {})
        is_live = session is not None and session.applied > 0 and session.is_repairable()
        is_replaying = presence.is_rerun and (session is None or not session.mode.is_live)
        if (is_live or is_replaying) and presence.welcome.options.is_replaced:
            _leave_at_once(presence.welcome.rank)
        limit_s = _THREADS_LIMIT_S if session is not None and session.applied else _EARLY_THREADS_LIMIT_S
        threading.Thread(target=_leave_threads, args=(presence, limit_s), name="ttprun-leaving", daemon=True).start()

    return report


def _leave_out_ours(error: BaseException) -> Any:
    """Leave out of the tracebacks of an error and its causes what torchrun's would not have: frames of ttprun, and of
    what has run the script. Returns the error's own.
    """
    for cause in causes_of(error, also_handled=True):
        traces: list[Any] = []
        trace = cause.__traceback__
        while trace is not None:
            traces.append(trace)
            trace = trace.tb_next
        theirs = [trace for trace in traces if not trace.tb_frame.f_code.co_filename.startswith(_OURS)]
        kept = [*dropwhile(lambda trace: trace.tb_frame.f_code.co_filename == "<frozen runpy>", theirs)]
        for trace, following in pairwise([*kept, None]):
            trace.tb_next = following
        cause.__traceback__ = kept[0] if kept else cause.__traceback__
    return error.__traceback__


def _leave_threads(presence: Presence, limit_s: float) -> None:
    """The script has failed: end the process if threads of it that are no daemons would keep it beyond `limit_s`.

    Python waits for them without a limit, and the job would wait for this process.
    """
    ends_s = time.monotonic() + limit_s
    while threads := [
        each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()
    ]:
        if time.monotonic() >= ends_s:
            names = ", ".join(each.name for each in threads)
            why = f"its script has failed, but {names} (threading.Thread without daemon=True) kept its process"
            presence.channel.send(from_rank.Note(f"{why}, which is ended without waiting any longer"))
            _leave_at_once(presence.welcome.rank)
        time.sleep(_LOOK_EVERY_S)


def _wait_for_room(presence: Presence) -> None:
    """Until the memory that returns to the device has all come, so that the next process is not too early, too.

    A driver may give much memory back late, and piece by piece: as long as there is more each time, it is waited for.
    """
    from ttprun.device import interface

    presence.channel.send(from_rank.Note("its device has no memory for it yet; a new process tries again"))
    with contextlib.suppress(Exception):  # a driver may raise anything while the device is busy
        device = interface.current()
        most_bytes, until_s = device.memory().free_bytes, time.monotonic() + _ROOM_LIMIT_S
        while time.monotonic() < until_s:
            free_bytes = device.memory().free_bytes
            if free_bytes > most_bytes:
                most_bytes, until_s = free_bytes, time.monotonic() + _NEXT_PIECE_S
            time.sleep(_LOOK_EVERY_S)


def _place_of(trace: Any) -> str:
    """The innermost line of the user's own code in a traceback, as "(train.py:52)"; "" if there is none."""
    foreign = (os.path.dirname(text_hashes.__file__), os.path.dirname(os.__file__), "<")
    for frame in reversed(traceback.extract_tb(trace)):
        is_installed = "site-packages" in frame.filename or "dist-packages" in frame.filename
        if not is_installed and not frame.filename.startswith(foreign):
            return f"({os.path.basename(frame.filename)}:{frame.lineno})"
    return ""


def _is_caught(trace: Any) -> bool:
    """Whether the script has caught an error and shows it by the hook: the frame that caught it is still running."""
    frame = sys._getframe(1) if trace is not None else None
    while frame is not None and frame is not trace.tb_frame:
        frame = frame.f_back
    return frame is not None


def _is_of_end(presence: Presence, error: BaseException) -> bool:
    """Whether the agent has ended the script, which therefore has not failed by itself.

    torch may have wrapped our error: then only its name in the message is left.
    """
    is_of_end = isinstance(error, KeyboardInterrupt) or "EndedError" in f"{type(error).__name__}: {error}"
    return is_of_end and presence.is_ended_by_agent()


def _keep_interrupted(presence: Presence, error: BaseException) -> None:
    """Write where a signal to the launcher interrupted the script to a log: all ranks would fill the terminal."""
    name = f"interrupted-rank{presence.welcome.rank}.log"
    with contextlib.suppress(OSError), open(os.path.join(presence.welcome.run_dir, "logs", name), "w") as log:
        log.write("".join(traceback.format_exception(error)))


def _leave_at_once(rank: int) -> None:
    """End a rank that is going to be replaced as a kill would: torch takes seconds to leave an interpreter.

    The script's exit handlers are left to its replacement. torch's own hook, which has called ours, collects what
    Python prints of the exception to prefix each line with the rank; we exit before it prints, so it is done here.
    """
    if isinstance(sys.stderr, io.StringIO):
        for line in sys.stderr.getvalue().splitlines():
            os.write(2, f"[rank{rank}]: {line}\n".encode(errors="backslashreplace"))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


def _run_again(presence: Presence, error: BaseException, trace: Any) -> tuple[BaseException, Diagnosis]:
    """If the process can survive the error, run the script again; returns the error that ends the process."""
    options = presence.welcome.options
    if options.mindio or not options.may_rerun or "ttprun.introspect.current_rank" not in sys.modules:
        return error, diagnose(presence, error)
    from ttprun.rank.bootstrap import rerun

    return rerun.answer(presence, error.with_traceback(trace))


_presence: Presence | None = None
_was_overdue = _has_reported = False
_is_forking_main = False


@signal_handlers.gate_from_c
def _before_fork() -> None:
    global _is_forking_main
    _is_forking_main = threading.current_thread() is threading.main_thread()


def _leave_in_child() -> None:
    """A forked child (a DataLoader worker) is not a rank; it ends with the rank whose main thread forked it."""
    global _presence
    if _presence is not None:
        children.note(_presence.welcome.run_dir)
        heartbeat.forget()
        for fd in _presence.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        with contextlib.suppress(OSError):
            os.close(_presence.channel.fileno())
        held_signals.release_in_child()
        _presence = None
        gc.freeze()  # a backend that is garbage here has its threads in the parent only, and must not be destroyed
        if _is_forking_main:
            # Python calls the handler between two calls of C code, never between torch's making of a shared-memory
            # file and its unlinking: nobody would remove that file when the agent is dead as well.
            signal.signal(_RANK_DIED, lambda *_: os._exit(1))
            die_with_parent(_RANK_DIED)


@signal_handlers.gate
def _finish() -> None:
    """The script has come to its end, and its own exit handlers have run."""
    if _presence is None or os.getpid() != _presence.pid:
        return
    session = session_now()
    if session is None:
        _report_unhooked()
    if not _presence.has_script_failed:  # else the exit code reports it
        _finish_well(session)
    if session is not None:
        with heartbeat.with_room():  # the script may have used up its files
            from ttprun.rank.bootstrap import reset

            reset.close(session)
    gc.unfreeze()  # Python's last collection frees what it would free under torchrun; nanobind reports what is left


def _finish_well(session: Rank | None) -> None:
    """The script has ended without an exception: refuse that in a replay, which should have reached its boundary."""
    from ttprun.introspect import stages

    try:
        stages.reached("exit")
    except RuntimeError as error:  # an injected one: nothing above us would turn it into an exit code
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)  # as if not caught
        os._exit(1)
    if session is not None:
        if session.keeper is not None:
            session.keeper.write()
        session.mode.refuse_end()
        from ttprun.groups import departure

        session.stop_comparing()
        with contextlib.suppress(KeyboardInterrupt):
            departure.stay(session)


def take_over() -> None:
    """torch is imported: install the hooks, and continue as a rank that can be repaired. Raises nothing."""
    presence = _presence
    if presence is None:
        return
    try:
        from ttprun.rank.bootstrap import hooks

        hooks.install(presence)
        hooks.begin_run(presence, presence.welcome.is_replacement)
    except Exception as error:  # fail open: the script runs as under torchrun
        current_rank.end()
        why = Reason("hooks-missing", f"the hooks could not be installed: {error!r}")
        presence.channel.send(from_rank.RankUnprotected(why))


_DEATH_LIMIT_S = 1.0  # of a worker that has closed its connections


def lost_worker(error: BaseException) -> str:
    """The death of a DataLoader's worker that shows as this error, in torch's words; "" if it is none.

    error   that has ended the script, with its traceback

    What a script's own data raises comes from frames of its own, or from torch's where a worker has passed it on; the
    loss of a connection comes from those of multiprocessing.

    Blocks for _DEATH_LIMIT_S at most, and only if the error came out of a DataLoader's connection.
    """
    trace = error.__traceback__ if isinstance(error, (OSError, EOFError)) else None
    loader, innermost = None, ""
    while trace is not None:
        innermost = trace.tb_frame.f_globals.get("__name__", "")
        if loader is None and innermost == "torch.utils.data.dataloader":
            loader = variables_of(trace.tb_frame).get("self")
        trace = trace.tb_next
    if loader is None or not innermost.startswith("multiprocessing."):
        return ""
    killed = _killed_one(getattr(loader, "_workers", ()))
    return "" if killed is None else f"DataLoader worker (pid {killed.pid}) exited unexpectedly"


def _killed_one(workers: Sequence[Any]) -> Any:
    """A worker that a signal has ended, or ends within _DEATH_LIMIT_S; those that have done their work do not count."""
    from multiprocessing.connection import wait  # torch has imported it; a script that has no DataLoader need not

    ends_s = time.monotonic() + _DEATH_LIMIT_S
    running = {worker.sentinel: worker for worker in workers}
    while running and (ended := wait(list(running), max(0.0, ends_s - time.monotonic()))):
        for sentinel in ended:
            worker = running.pop(sentinel)
            if (worker.exitcode or 0) < 0:
                return worker
    return None
