"""The end of a rank's process: threads of gloo are gone before the interpreter finalizes, whatever is still pending."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.rank.worlds import run_world
from ttprun.introspect.current_rank import current
from ttprun.rank.bootstrap import reset

# Without our part in their end, a third of these processes and more is aborted (signal 6).
MANY_ENDS = """
import atexit, os
from datetime import timedelta
from types import SimpleNamespace
import torch
from tests.rank.fakes import become, make_session
from ttprun.rank.bootstrap import install
from ttprun.groups.connection import Exchange
from ttprun.groups.process_group import ManagedGroup

torch.set_num_threads(1)
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        session = make_session(world_size=1)
        become(session)
        install._presence = SimpleNamespace(pid=os.getpid(), has_script_failed=True)
        atexit.register(install._finish)
        group = ManagedGroup(session, session[Exchange], "g", [0], 0, timedelta(seconds=60))
        group.links.connect()
        whole, part = torch.empty(2_000_000), torch.ones(2_000_000)
        for _ in range(25):
            group.allgather([[whole]], [part.detach()])
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


# Without our part in their end, one in eight of the first ranks is aborted (signal 6).
PENDING_MESSAGES = """
import os, threading
from datetime import timedelta
import torch
from ttprun.protocol import channel
from ttprun.groups.connection import Exchange
from ttprun.groups.gloo import Connection

def relay():
    for put in lines[rank].messages():
        exchange.deliver(put.generation, put.key, put.value)

torch.set_num_threads(1)
for _ in range(3):
    lines = channel.pair()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            exchange = Exchange(lines[rank])
            threading.Thread(target=relay, daemon=True).start()
            connection = Connection(exchange, 0, "all", rank, 2, timedelta(seconds=60))
            if rank == 1:
                threading.Event().wait(100)  # its end comes with the first rank's
                os._exit(0)
            connection.issue("send", ([torch.ones(9)], 1, 3))
            connection.issue("recv", ([torch.ones(9)], 1, 4))
            connection.close()
            raise SystemExit
        if rank == 0:
            first = pid
    print(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]), flush=True)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
"""


# Without our part in it, most of these processes are aborted (signal 6).
LAST_REFERENCE_ON_A_THREAD_OF_GLOO = """
import os, threading
from datetime import timedelta
import torch
from tests.groups.test_descriptors import DeafChannel
from ttprun.groups.connection import Exchange
from ttprun.groups.gloo import Connection

for _ in range(3):
    pid = os.fork()
    if pid == 0:
        held = [Connection(Exchange(DeafChannel()), 0, "all", 0, 1, timedelta(seconds=5))]
        is_alone, is_gone = threading.Event(), threading.Event()

        def completed(_):
            if threading.current_thread() is not threading.main_thread():
                is_alone.wait(60)
            held.clear()
            is_gone.set()

        held[0].backend.allreduce([torch.ones(1)]).get_future().add_done_callback(completed)
        is_alone.set()
        is_gone.wait(60)
        for thread in threading.enumerate():
            if thread.name == "ttprun-closing":
                thread.join(60)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_a_thread_of_gloo_that_lets_go_of_a_connection_last_does_not_abort_the_process() -> None:
    arguments = [sys.executable, "-c", LAST_REFERENCE_ON_A_THREAD_OF_GLOO]

    run = subprocess.run(arguments, capture_output=True, text=True, timeout=200)

    assert run.stdout.split() == ["0"] * 3, run.stderr


def test_a_script_that_does_not_wait_for_its_last_collectives_ends_well() -> None:
    run = subprocess.run([sys.executable, "-c", MANY_ENDS], capture_output=True, text=True, timeout=200)

    assert run.stdout.split() == ["0"] * 3, run.stderr


def test_a_rank_whose_messages_nobody_has_answered_ends_well() -> None:
    run = subprocess.run([sys.executable, "-c", PENDING_MESSAGES], capture_output=True, text=True, timeout=200)

    assert run.stdout.split() == ["0"] * 3, run.stderr


def end_with_an_operation_that_nobody_joins(rank: int) -> Any:
    session = current()
    assert session is not None
    if rank == 1:
        return None
    work = dist.all_reduce(torch.ones(3), async_op=True)
    del work
    began_s = time.monotonic()
    reset.close(session)
    return time.monotonic() - began_s


def test_a_collective_that_no_other_rank_joins_holds_up_the_end_for_a_moment_only() -> None:
    took_s, _ = run_world(end_with_an_operation_that_nobody_joins)

    assert took_s >= reset.LIMIT_S  # and it has ended


def start_no_thread(thread: threading.Thread) -> None:
    """As Thread.start() of Python 3.12 once the interpreter finalizes."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def end_where_no_thread_starts(rank: int) -> Any:
    threading.Thread.start = start_no_thread  # type: ignore[method-assign]
    return end_with_an_operation_that_nobody_joins(rank)


def test_where_no_thread_starts_any_more_a_collective_that_no_other_rank_joins_is_cut_off_too() -> None:
    took_s, _ = run_world(end_where_no_thread_starts)

    assert took_s >= reset.LIMIT_S  # and it has ended


def end_at_once(rank: int) -> Any:
    threading.Thread.start = start_no_thread  # type: ignore[method-assign]
    session = current()
    assert session is not None
    given = torch.full((1_000_000,), 1.0 + rank)
    work = dist.all_reduce(given, async_op=True)
    if rank == 0:
        reset.close(session)
        return None
    work.wait()
    return given[0].item()


def test_where_no_thread_starts_any_more_a_collective_that_the_others_wait_for_is_let_finish() -> None:
    assert run_world(end_at_once) == [None, 3.0]
