"""Run the script again in the same process, after a device error that leaves the process usable, or an error that the
user calls transient (`retry_on`).

The main thread arrives here from sys.excepthook, with the script unwound. It reports to the agent, forgets the old run
and waits; the agent's order then brings it to the survivors' boundary like a replacement, but process, torch and device
stay. If anything speaks against that, the process ends with the error, and is replaced. Begin with `answer`.
"""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from ttprun.capture.effects.output import Diverted
from ttprun.capture.position.user_code import run
from ttprun.device import interface
from ttprun.device.device_errors import DeviceFault, Diagnosis, diagnosis_of, in_one_line
from ttprun.device.interface import Device, DeviceFailedError, MemoryCheck, refined
from ttprun.frameworks import KEEPS_OF_THE_ENVIRONMENT, RUN_AGAIN
from ttprun.introspect import host_copies
from ttprun.introspect.current_rank import Rank, current, end
from ttprun.protocol import from_rank
from ttprun.protocol.board import Field, Phase
from ttprun.rank.bootstrap import hooks, reset
from ttprun.rank.bootstrap.presence import Presence, diagnose
from ttprun.rank.verification import Verifier
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.replicated import PostStepWeights

# Statements of known modules that run at import, and must run again in each rank that is made of a copy.
#
# Such a statement asks which rank this is, or draws a random number, and binds one name. After the import the name is
# deleted: a module that asks for it at its own import fails in a standby, and is left to the replay. Once the copy has
# become a rank, the statement runs again where it stands, in its module. A version of the package that has another line
# there is not known: its module is left to the replay.


class RunAgain:
    """The statements of the modules that this process has imported for its copies."""

    def __init__(self) -> None:
        self._given: frozenset[str] = frozenset()
        self._found: list[tuple[str, str]] = []

    def allow(self, given: Sequence[str]) -> None:
        """Variables that differ between ranks, and that none of them has changed by itself: statements may ask."""
        self._given = frozenset(given)

    def may_read(self, name: str, variable: str) -> bool:
        """Whether a module, whose code is running, may read a variable that differs between ranks."""
        keeps = KEEPS_OF_THE_ENVIRONMENT.get(name)
        if keeps is not None:
            return not variable.startswith(keeps)
        return variable in self._given and name in RUN_AGAIN and _line_of(name) == RUN_AGAIN[name]

    def after_import(self, name: str, random_before: Any) -> None:
        """A module has been imported: undo its statement, if it has the one that is known.

        random_before   of Python's generator; restored if the statement alone has drawn since
        """
        statement, module = RUN_AGAIN.get(name), sys.modules.get(name)
        if statement is None or module is None or f"{statement}\n" not in linecache.getlines(module.__file__ or ""):
            return
        after = random.getstate()
        if after != random_before:
            random.setstate(random_before)
            exec(statement, vars(module))
            if random.getstate() != after:
                random.setstate(after)
                return  # something else in it has drawn, too: it is refused
            random.setstate(random_before)
        exec(f"del {ast.unparse(_target_of(statement))}", vars(module))
        self._found.append((name, statement))

    def run(self) -> None:
        """This process has become a rank."""
        for name, statement in self._found:
            exec(statement, vars(sys.modules[name]))


def _line_of(name: str) -> str:
    """The line at which the code of a module stands that is being imported."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == name:
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        frame = frame.f_back
    return ""


def _target_of(statement: str) -> ast.expr:
    """What a statement binds."""
    assignment = ast.parse(statement).body[0]
    assert isinstance(assignment, ast.Assign)
    return assignment.targets[0]


_HEARD_LIMIT_S = 30.0


def is_transient(error: BaseException, diagnosis: Diagnosis, patterns: list[str]) -> bool:
    """Whether running the script again may help: the device is still usable, or the user says so (`retry_on`).

    error       that has ended the script
    diagnosis   of the error
    patterns    regular expressions of `retry_on`, searched for in "type: message"

    `retry_on` cannot overrule the meaning of a known device error: after some of them every operation fails.
    """
    if diagnosis.is_known:
        return diagnosis.can_stay
    with contextlib.suppress(Exception):  # an error's own __str__ may fail
        return any(re.search(pattern, f"{type(error).__name__}: {error}") for pattern in patterns)
    return False


def answer(presence: Presence, error: BaseException) -> tuple[BaseException, Diagnosis]:
    """Run the script again, each time that such an error ends it; main thread only.

    returns   the error that must end the process, mostly the one given, and what it says about the device

    Raises SystemExit when the script has reached its end: from sys.excepthook that ends the process as after a script's
    last line.
    """
    while True:
        session, diagnosis, device = _session_to_leave(error, presence)
        if session is None:
            return error, diagnosis
        try:
            _leave(presence, session, error, diagnosis, device)
            presence.may_start.wait()  # until the agent's order; at its deadline the agent kills this process
            hooks.begin_run(presence, is_replacement=True)
        except DeviceFailedError as failure:
            return failure, diagnosis_of(DeviceFault.DEVICE_LOST)
        except Exception as failure:
            return failure, diagnose(presence, failure)
        try:
            run(presence.welcome.arguments)
        except SystemExit:
            raise
        except BaseException as again:
            error = again
        else:
            raise SystemExit(0)


def _session_to_leave(error: BaseException, presence: Presence) -> tuple[Rank | None, Diagnosis, Device | None]:
    """The current run's session, None if the script cannot be run again in this process (the reason is reported).

    returns   with it what the error means, and the device that raised it, None if none did
    """
    session, diagnosis = current(), diagnose(presence, error)
    device: Device | None = None
    if session is None or not is_transient(error, diagnosis, session.options.retry_on):
        return None, diagnosis, None
    why_not = _why_not(session)
    if not why_not and diagnosis.is_known:
        try:
            device = interface.current()
            device.stop()
            diagnosis = refined(diagnosis, device.check_memory())
            why_not = "" if diagnosis.can_stay else f"its device says {diagnosis.name}"
        except Exception as failure:  # also what a driver raises once its context is lost
            diagnosis, why_not = diagnosis_of(DeviceFault.DEVICE_LOST), in_one_line(failure)
    if why_not:
        presence.channel.send(from_rank.Note(f"the script is not run again in the same process: {why_not}"))
        return None, diagnosis, None
    return session, diagnosis, device


def _why_not(session: Rank) -> str:
    if not session.mode.is_live:
        return "it failed again before it reached its boundary"
    if not session.made.living or not session.is_repairable():
        return str(session.unprotected) or "it has no process group"
    threads = reset.threads_of_user()
    return f"its thread {threads[0]!r} is still running" if threads else ""


def _leave(
    presence: Presence, session: Rank, error: BaseException, diagnosis: Diagnosis, device: Device | None
) -> None:
    """Report to the agent, and forget the old run; what is printed meanwhile goes to the replay's log.

    Blocks a few seconds at most, unless a connection is being made. Raises TimeoutError if the agent does not answer,
    and DeviceFailedError.
    """
    recovery = session.recovery
    assert recovery is not None
    session.end_run()
    session.board.set(session.rank, Field.LEAVING, 0)
    session.board.set(session.rank, Field.MEETINGS, 0)
    session.row[Field.PHASE] = Phase.REPAIRING
    session.row[Field.SEEN_NS] = time.monotonic_ns()
    presence.take_back()
    recovery.retire()
    detail = "".join(traceback.format_exception(error))
    presence.channel.send(from_rank.RankFaulted(reason=in_one_line(error), detail=detail, device_fault=diagnosis.name))
    os.write(2, detail.encode(errors="replace"))
    diverted = Diverted(session)
    try:
        recovery.finish()
        session[Verifier].end()
        session[Mirror].end()
        session[PostStepWeights].forget()
        session[Holdings].forget()
        host_copies.forget()
        reset.clear(error)
        if device is not None:
            _make_ready(device, diagnosis)
        end()
    finally:
        diverted.end()
    if not presence.heard.wait(_HEARD_LIMIT_S):
        raise TimeoutError("the agent does not answer")


def _make_ready(device: Device, diagnosis: Diagnosis) -> None:
    """After the run's tensors are freed: repair the device for the next run.

    Raises DeviceFailedError, also if failed memory is still held (a new process holds none). A device that cannot
    report that raises an error of its own when such memory is used.
    """
    device.clean()
    is_held = diagnosis.fault is DeviceFault.MEMORY_PERSISTENT and device.check_memory() is MemoryCheck.PERSISTENT
    if is_held and not diagnosis.is_dated:
        raise DeviceFailedError("tensors outlive the script's run, and hold memory that has failed")
    device.rebuild_communicators()
    device.restart()
