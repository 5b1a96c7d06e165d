"""A program that starts the ranks of a script by forking itself, after it has imported torch.

Most of what a launch by torchrun costs is that import, once in the launcher and once in each rank. The ranks get the
environment that torchrun gives them, and nothing of ttprun.

Reads lines of JSON: {"script", "ranks", "arguments", "folder"}; writes for each the ranks' exit codes, as JSON, when
they have ended. Output goes where torchrun has it with --log-dir FOLDER/logs --redirects 3.

A rank that outlives another one by LIMIT_S is killed, and all are after RUN_LIMIT_S: now and then torch's gloo groups
hang when they are destroyed (torch 2.13: in a thread that has the GIL, and waits for one that wants it). So what the
script's module holds is not destroyed at all.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it
import torch.distributed as dist

LIMIT_S = 60.0
RUN_LIMIT_S = 300.0  # no script runs as long undisturbed, on a busy machine either
_kept: list[dict[str, Any]] = []  # a script's variables, until the process ends


def main() -> None:
    """Carry out one order after another, until stdin ends."""
    assert dist.is_available()
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(_run(**json.loads(line))), flush=True)


def _run(script: str, ranks: int, arguments: list[str], folder: str) -> list[int]:
    """The exit codes of the script's ranks; -N if signal N ended one."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "ROLE_RANK": str(rank)}
            os._exit(_be_rank(script, arguments, Path(folder), world | own))
        pids.append(pid)
    return _wait_for(pids)


def _wait_for(pids: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    give_up_at_s = time.monotonic() + RUN_LIMIT_S
    while len(codes) < len(pids):
        for pid in [pid for pid in pids if pid not in codes]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                give_up_at_s = min(give_up_at_s, time.monotonic() + LIMIT_S)
            elif time.monotonic() > give_up_at_s:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def _be_rank(script: str, arguments: list[str], folder: Path, environment: dict[str, str]) -> int:
    """Run the script as a rank, and return its exit code."""
    logs = folder / "logs" / "none" / "attempt_0" / environment["RANK"]
    logs.mkdir(parents=True)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for fd, name in ((1, "stdout.log"), (2, "stderr.log")):
        os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT, 0o644), fd)
    torch.set_num_threads(1)  # see tests/rank/worlds.py: no thread may be the first to ask for torch's pool
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.dirname(script), *(path for path in added if path and path not in sys.path)]
    code: Any = 0
    try:
        _kept.append(runpy.run_path(script, run_name="__main__"))
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    multiprocessing.util._exit_function()  # what a script's multiprocessing has registered, before all else
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


if __name__ == "__main__":
    main()
