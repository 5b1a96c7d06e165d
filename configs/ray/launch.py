"""A job of ttprun on several nodes of a Ray cluster: one launcher a node, spares on further nodes.

    ray job submit -- python launch.py --nodes 2:3 --ranks 8 --save-dir /shared/checkpoints -- train.py --lr 0.1

Two nodes train here, the third waits to take a lost one's place. A launcher whose node was lost is started again on
another one, once Ray has one. Behind `--` come options of ttprun, the script, and its arguments. This process serves
the store at which the launchers meet, and is no part of the job otherwise. Ray and ttprun are needed on all nodes.
"""

from __future__ import annotations

import argparse
import ctypes
import secrets
import signal
import subprocess
import sys
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed import TCPStore

FINAL = (0, 1, 2, 93, 130)  # done; the script failed; usage; no progress; Ctrl-C. Others may be started again
KILLED = 137
LOOK_AGAIN_S = 1.0
TO_END_S = 60.0  # for the other launchers, when the first has ended
PR_SET_PDEATHSIG = 1


@ray.remote(max_concurrency=2)  # `end` comes while `run` waits
class Launcher:
    """ttprun on one node."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str], run_dir: str) -> int:
        """Blocks to its end; returns its exit code, or minus the signal that has killed it."""
        libc = ctypes.CDLL(None)
        node = ray.get_runtime_context().get_node_id()[:12]
        # It must not outlive this process, which ends when Ray takes the node for lost.
        self.process = subprocess.Popen(
            [*command[:3], "--run-dir", f"{run_dir}/{node}", *command[3:]],
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        return self.process.wait()

    def end(self) -> None:
        """SIGTERM: the state of the whole job is saved."""
        if self.process is not None:
            self.process.terminate()


class Job:
    """All launchers.

    running   what each has promised to return -> the number of its place
    rounds    in which the launchers of the places were started. A job that was saved and has ended goes on in the next
              one: its rendezvous is closed
    """

    def __init__(self, options: argparse.Namespace, words: list[str]) -> None:
        least, _, most = options.nodes.partition(":")
        size = int(most or least)
        gpus = options.ranks if options.gpus is None else options.gpus
        self.resources = {"num_cpus": options.cpus, "num_gpus": gpus}
        bundle = {"CPU": options.cpus} | ({"GPU": gpus} if gpus else {})
        self.places = placement_group([bundle] * size, strategy="STRICT_SPREAD")
        run_id = options.run_id or f"ray-{secrets.token_hex(6)}"
        self.run_dir = options.run_dir or f"ttprun-runs/{run_id}"
        # Served here, since it must outlive any node that trains.
        address = ray.util.get_node_ip_address()
        self.store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.command = [
            *(sys.executable, "-m", "ttprun", "--nnodes", options.nodes, "--nproc-per-node", str(options.ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{self.store.port}", "--rdzv-conf"),
            # Who is left in a round that is over soon comes to the next one.
            "is_host=0,join_timeout=60",
            *("--run-id", run_id, "--save-dir", options.save_dir, *words),
        ]
        self.restarts_left = options.restarts
        self.launchers: dict[int, Any] = {}
        self.running: dict[Any, int] = {}
        self.round = 0
        self.rounds: dict[int, int] = {}
        self.is_ended = False
        ray.get(self.places.ready())
        for place in range(size):
            self.start(place)

    def start(self, place: int) -> None:
        """Start a launcher as soon as Ray has a node for that place."""
        strategy = PlacementGroupSchedulingStrategy(self.places, place)
        self.launchers[place] = Launcher.options(scheduling_strategy=strategy, **self.resources).remote()
        self.rounds[place] = self.round
        command = [*self.command[:3], "--rdzv-id", str(self.round), *self.command[3:]]
        self.running[self.launchers[place].run.remote(command, self.run_dir)] = place

    def ask_to_end(self, *_: object) -> None:
        """`ray job stop` has sent SIGTERM."""
        self.is_ended = True

    def run(self) -> int:
        """Blocks to the end of the job; returns its exit code."""
        signal.signal(signal.SIGTERM, self.ask_to_end)
        has_said_so = False
        while True:
            if self.is_ended and not has_said_so:
                has_said_so = True
                for launcher in self.launchers.values():
                    launcher.end.remote()
            for finished in ray.wait(list(self.running), timeout=LOOK_AGAIN_S)[0]:
                code = self.exit_code_of(finished)
                if code in FINAL or self.is_ended or not self.restarts_left:
                    # Launchers that were not lost all end with the job's exit code.
                    ray.wait(list(self.running), num_returns=max(1, len(self.running)), timeout=TO_END_S)
                    return code
                self.restarts_left -= 1

    def exit_code_of(self, finished: Any) -> int:
        """What a launcher has ended with; it is started again if it may be."""
        place = self.running.pop(finished)
        is_lost = True
        try:
            code: int = ray.get(finished)
            is_lost, code = code < 0, KILLED if code < 0 else code
        except RayError as error:
            code = KILLED
            print(f"launch.py: launcher {place} is lost: {str(error).partition('.')[0]}", flush=True)
        if code not in FINAL and not self.is_ended and self.restarts_left:
            if not is_lost:
                self.round = max(self.round, self.rounds[place] + 1)
            self.start(place)
        return code


def read_command_line(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and what comes behind `--`."""
    parser = argparse.ArgumentParser(description="ttprun on several nodes of a Ray cluster")
    parser.add_argument("--nodes", default="1", help="MIN or MIN:MAX; those above MIN are spares")
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--gpus", type=int, help="of each node; default: one a rank")
    parser.add_argument("--cpus", type=int, default=1, help="of each node")
    parser.add_argument("--save-dir", required=True, help="which all nodes see")
    parser.add_argument("--run-id", default="", help="of this job alone; default: a new one")
    parser.add_argument("--run-dir", default="", help="with a folder for each node; default: ttprun-runs/RUN_ID")
    parser.add_argument("--restarts", type=int, default=100, help="of launchers, in all")
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    if not words[at + 1 :]:
        parser.error("no script: launch.py [options] -- script.py [arguments]")
    return options, words[at + 1 :]


if __name__ == "__main__":
    found = read_command_line(sys.argv[1:])
    ray.init(address="auto")
    sys.exit(Job(*found).run())
