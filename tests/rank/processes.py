"""Run a function in a process of its own that has torch imported and nothing patched: what the hooks change stays there.

The processes are forked from a server that has imported torch once, so each costs some ten milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "torch.nn.parallel.distributed",
    "torch.utils.data.distributed",
    "numpy",
    "ttprun.rank.replay.replay_run",
    "ttprun.rank.replay.order_thread",
    "ttprun.rank.bootstrap.install",
]


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def run_alone(function: Callable[..., Any], *args: Any, limit_s: float = 100.0) -> Any:
    """Call a module's function in a fresh process; returns what it returns.

    Raises AssertionError with the traceback of an exception there, or if it takes more than `limit_s` seconds.
    """
    context = _server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        assert ours.poll(limit_s), f"{function.__name__} has not ended within {limit_s:.0f} s"
        is_good, value = ours.recv()
    except EOFError:
        process.join(60)
        raise AssertionError(f"{function.__name__} has died with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
    assert is_good, value
    return value


def _report(connection: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as in a script; a server's child would ask the server
    try:
        outcome: tuple[bool, Any] = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    connection.send(outcome)
    connection.close()
    os._exit(0)  # threads of gloo and of ours are not waited for
