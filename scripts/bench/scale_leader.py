"""The agent that leads a large job, as it is, with stand-ins for all other nodes and for the ranks (`scale_nodes.py`).

    python scripts/bench/scale_leader.py --nodes 64       # one JSON object: each event, what it cost the leader

The supervisor, the machine, the meeting of nodes, the pool of spares and the wire are the real ones, on loopback. What
is counted is what the stand-ins send and get; the processor time is that of the supervisor's thread. Begin with
`Play.run`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runs import end_with_parent

from ttprun.agent.base import peers
from ttprun.agent.between.rendezvous import Place, meet
from ttprun.agent.launcher.group import NewGroup
from ttprun.agent.launcher.supervisor import Supervisor
from ttprun.agent.lead.membership import Elasticity
from ttprun.agent.lead.resume import Resumption
from ttprun.config import Config
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import read_status
from ttprun.protocol import channel
from ttprun.recovery import JobPhase
from ttprun.state.store import CheckpointStore

PER_NODE = 8
QUIET_S = 2.0  # of training, for what all sends without any fault
LOOK_AGAIN_S = 0.01
SO_SNDBUFFORCE, ROOM_BYTES = 32, 16 << 20
SIGNS_OF_LIFE = ("in Rows", "out Rows", "out Published")


class Store:
    """What `meet` uses of a rendezvous store."""

    def __init__(self, came: Callable[[dict[str, Any]], None]) -> None:
        self._came = came

    def set(self, key: str, value: str) -> None:
        """The leader says where it listens."""
        if value.startswith("{"):
            self._came(json.loads(value))


class StandIns:
    """The process of the stand-ins."""

    def __init__(self, nodes: int) -> None:
        pairs = [channel.pair() for _ in range(PER_NODE)]
        self.ours = [ours for ours, _ in pairs]
        for ours in self.ours:  # a rank would read at once; this process has thousands of others to play
            with contextlib.suppress(OSError):
                ours.sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, ROOM_BYTES)
        theirs = [end.fileno() for _, end in pairs]
        script = Path(__file__).with_name("scale_nodes.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), *map(str, (nodes * PER_NODE, PER_NODE, *theirs))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=theirs,
            text=True,
            preexec_fn=end_with_parent,
        )
        for _, end in pairs:
            end.close()

    def order(self, **command: Any) -> Any:
        """Have it do something; blocks until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(command), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        """It ends with its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


class Play:
    """One job, and what is done to it.

    found   event -> seconds of the clock, processor seconds of the leader, messages and bytes in and out
    """

    def __init__(self, nodes: int, limit_s: float, folder: Path) -> None:
        self.nodes, self.limit_s, self.folder = nodes, limit_s, folder
        self.found: dict[str, dict[str, float]] = {}
        self.traffic: dict[str, Any] = {}
        self.stand_ins = StandIns(nodes)
        run = RunDirectory.create("scale", folder / "run")
        # One process plays all the others, and may be late: that is no sign of a fault here.
        peers.SILENT_LIMIT_S = peers._UNACKNOWLEDGED_LIMIT_S = limit_s
        limits = ("freeze", "replay", "transfer", "resume")
        patient: dict[str, Any] = {f"{phase}_timeout_s": limit_s for phase in limits} | {"hang_timeout_s": limit_s}
        config = Config(standbys=0, save_dir=str(folder / "saved"), node_wait_s=limit_s, **patient)
        store = CheckpointStore(folder / "saved", 1)
        world_size = nodes * PER_NODE
        resumption = Resumption(config, store, world_size, ["train.py"], is_place_named=False)
        self.supervisor = Supervisor(config, run, world_size, True, 0, store, resumption, Elasticity())
        self.sleepers = [
            subprocess.Popen(["sleep", "86400"], start_new_session=True, preexec_fn=end_with_parent)
            for _ in range(PER_NODE)
        ]

    @property
    def node(self) -> Any:
        return self.supervisor.node

    def run(self) -> None:
        """All events, one after the other."""
        with self.measured("start"):
            self.start()
        with self.measured("quiet"):
            time.sleep(QUIET_S)
        with self.measured("status"):
            self.look_at_status()
        with self.measured("lost rank"):
            self.stand_ins.order(kill=(self.nodes - 1) * PER_NODE)
            self.wait_for_incidents(1)
        self.spare_nodes(1 + max(1, self.nodes // 10))
        with self.measured("lost node"):
            self.lose([self.nodes - 2])
            self.wait_for_incidents(2)
        with self.measured("lost tenth"):
            every = self.nodes // max(1, self.nodes // 10)
            self.lose([1 + every * number for number in range(max(1, self.nodes // 10))])
            self.wait_for_incidents(3)

    @contextmanager
    def measured(self, event: str) -> Iterator[None]:
        """Count and time what happens."""
        self.stand_ins.order(count=True)
        clock = time.pthread_getcpuclockid(self.supervisor._thread.ident) if self.supervisor._thread.ident else None
        began_s, began_cpu_s = time.monotonic(), time.clock_gettime(clock) if clock else 0.0
        yield
        took_s = time.monotonic() - began_s
        clock = time.pthread_getcpuclockid(self.supervisor._thread.ident)  # type: ignore[arg-type]
        cpu_s = time.clock_gettime(clock) - began_cpu_s
        counted = self.stand_ins.order(count=True)
        self.traffic[event] = counted
        figures = {"took_s": took_s, "cpu_s": cpu_s}
        for what in ("messages", "bytes"):
            for way in ("in", "out"):
                figures[f"{what}_{way}"] = sum(
                    times for op, times in counted[what].items() if op.split()[0] == way and op not in SIGNS_OF_LIFE
                )
            figures[f"{what}_alive"] = sum(counted[what].get(op, 0) for op in SIGNS_OF_LIFE)
        self.found[event] = figures
        print(event, {name: round(value, 3) for name, value in figures.items()}, file=sys.stderr, flush=True)

    def start(self) -> None:
        """All nodes meet, all ranks start, are connected and have been compared."""
        self.supervisor.start()
        others = list(range(1, self.nodes))
        connect = lambda where: threading.Thread(  # noqa: E731
            target=self.stand_ins.order, kwargs={"connect": where, "nodes": others}
        ).start()
        place = Place(0, self.nodes, PER_NODE, "127.0.0.1", {}, master="127.0.0.1 29400")
        met = meet(Store(connect), place)
        group = NewGroup([(rank, rank) for rank in range(PER_NODE)], lambda *_: None)
        self.supervisor.begin_group(group, met)
        for local_rank, (sleeper, ours) in enumerate(zip(self.sleepers, self.stand_ins.ours, strict=True)):
            ours.waits = False
            start = {"args": ["train.py"], "env": {}, "stdout": None, "stderr": None, "local_rank_id": local_rank}
            handler: Any = SimpleNamespace(proc=sleeper, channel=ours, start=start, local_rank_id=local_rank)
            self.supervisor.assign(local_rank, handler)
        self.supervisor.group_started(is_restart=False)
        self.wait(lambda: all(slot.is_present for slot in self.node.slots), "the ranks")
        self.stand_ins.order(join=True)
        self.wait(lambda: self.node.job.replicas.compared_at is not None, "the first comparison")

    def spare_nodes(self, number: int) -> None:
        """As many launchers wait for slots."""
        listener = self.node.peers.pool.listener.where
        self.stand_ins.order(connect=listener, nodes=[-1] * number)
        self.wait(lambda: len(self.node.peers.pool) >= number, "the spares")

    def lose(self, numbers: Sequence[int]) -> None:
        """These nodes are lost at once, none of them next to another one."""
        self.stand_ins.order(lose=list(numbers))

    def look_at_status(self) -> None:
        """What `ttprun status` reads."""
        began_s = time.process_time()
        path = self.node.run.status
        read_status(path)
        self.found["status file"] = {"cpu_s": time.process_time() - began_s, "bytes_out": path.stat().st_size}

    def wait_for_incidents(self, number: int) -> None:
        """All incidents are over."""
        self.wait(
            lambda: self.node.job.incident_count >= number and self.node.job.phase is JobPhase.RUNNING,
            f"the end of incident {number}",
        )

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Raises TimeoutError."""
        ends_s = time.monotonic() + self.limit_s
        while not is_there():
            if time.monotonic() > ends_s or self.node.verdict is not None or self.node.is_broken:
                job = self.node.job
                raise TimeoutError(f"{what} has not come: {job.phase}, {self.node.verdict}, {job.incident}")
            time.sleep(LOOK_AGAIN_S)

    def end(self) -> None:
        """End all processes."""
        self.supervisor.pause()
        self.supervisor.stop(0)
        self.stand_ins.end()
        for sleeper in self.sleepers:
            sleeper.kill()
            sleeper.wait()
        self.supervisor.node.run.release()


def main() -> int:
    """Play one job, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--limit-s", type=float, default=300.0, help="for each event")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="ttprun-scale-") as folder:
        play = Play(options.nodes, options.limit_s, Path(folder))
        try:
            play.run()
            problem = ""
        except TimeoutError as error:
            problem = str(error)
        finally:
            play.end()
    print(json.dumps({"nodes": options.nodes, "found": play.found, "traffic": play.traffic, "problem": problem}))
    return os.EX_SOFTWARE if problem else 0


if __name__ == "__main__":
    sys.exit(main())
