"""The demonstration: train on three ranks, kill one of them, and end with the weights of an undisturbed run.

    ./scripts/demo.sh            about a minute, once everything is installed

Begin with main().
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent / "examples" / "char_gpt.py"
TTPRUN = (sys.executable, "-m", "ttprun")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
START_LIMIT_S = 60.0
RUN_LIMIT_S = 300.0


class DemoError(Exception):
    """Something that the demonstration promised did not happen; the message says what."""


class Training:
    """A launcher that runs, with its output relayed line by line and kept."""

    def __init__(self, command: tuple[str, ...], label: str) -> None:
        self.label = label
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._relay, daemon=True)
        self._reader.start()

    def finish(self) -> str:
        """Wait for the end, at most RUN_LIMIT_S; returns the SHA-256 of the weights that the script printed.

        Raises DemoError if the run takes longer, fails, or prints no hash.
        """
        try:
            code = self.process.wait(RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"{self.label} took longer than {RUN_LIMIT_S:.0f} s") from None
        self._reader.join(5.0)
        if code != 0:
            raise DemoError(f"{self.label} ended with exit code {code}")
        hashes = [line.split()[-1] for line in self.lines if line.startswith("sha256 ")]
        if not hashes:
            raise DemoError(f"{self.label} printed no hash of its weights")
        return hashes[-1]

    def stop(self) -> None:
        """End the run if it is still alive: by SIGTERM, and after 10 s by SIGKILL."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def _relay(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            say(self.label, self.lines[-1])


class EventFollower:
    """Shows a run's events as they are written, with the seconds since the run's first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show what is left, and end."""
        self._stop.set()
        self._thread.join(5.0)

    def _follow(self) -> None:
        shown = 0
        started_at: datetime | None = None
        while True:
            is_last_look = self._stop.wait(0.1)
            complete = self._path.read_text().split("\n")[:-1] if self._path.exists() else []
            for line in complete[shown:]:
                event = json.loads(line)
                at = datetime.fromisoformat(event.pop("at"))
                started_at = started_at or at
                if (text := describe(event)) is not None:
                    say("event", f"{(at - started_at).total_seconds():6.2f} s  {text}")
            shown = len(complete)
            if is_last_look:
                return


def describe(event: dict[str, Any]) -> str | None:
    """An event in a few words; None if it is not part of the story. The status at the end has all figures."""
    match event["event"]:
        case "fault_injected":
            return f"rank {event['rank']} gets SIGKILL in the middle of a step"
        case "rank_exited" if event["code"] != 0:
            return f"rank {event['rank']} is gone (signal {event['signal']}), boundary {event['boundary']} is on record"
        case "rank_started" if event["is_replacement"]:
            return f"rank {event['rank']} has a new process, pid {event['pid']}"
        case "phase_changed":
            return f"{event['before']} -> {event['after']}"
        case "incident" if event["outcome"] != "open":
            return f"{event['outcome']} in {event['total_s']:.2f} s, {event['steps_lost']} steps lost"
    return None


def say(label: str, text: str) -> None:
    """One line of the demonstration, cut to 150 columns; written at once, so lines of several threads do not mix."""
    sys.stdout.write(f"{label:>8} | {text}"[:150] + "\n")
    sys.stdout.flush()


def announce(text: str) -> None:
    """A headline."""
    sys.stdout.write(f"\n=== {text}\n")
    sys.stdout.flush()


def wait_until_healthy(status: Path, training: Training) -> None:
    """Wait until the run says that its ranks run; at most START_LIMIT_S. Raises DemoError if they do not."""
    give_up_at_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < give_up_at_s:
        if status.exists() and json.loads(status.read_text())["state"] == "healthy":
            return
        if training.process.poll() is not None:
            raise DemoError(f"the run ended with exit code {training.process.returncode} before it had started")
        time.sleep(0.1)
    raise DemoError(f"the run did not start within {START_LIMIT_S:.0f} s")


def train_and_kill(options: argparse.Namespace, run_dir: Path, script: tuple[str, ...]) -> str:
    """Train under ttprun, kill a rank, show what happens; returns the hash of the weights at the end."""
    http = ("--http", options.http) if options.http else ()
    launch = (*TTPRUN, *http, "--nproc-per-node", str(options.ranks), "--allow-faults", "--run-dir", str(run_dir))
    kill = ("inject-fault", "kill", "--rank", str(options.rank), "--at-step", str(options.at_step))
    training = Training((*launch, *script), "ttprun")
    events = EventFollower(run_dir / "events.jsonl")
    try:
        wait_until_healthy(run_dir / "status.json", training)
        order = subprocess.run(
            (*TTPRUN, *kill, "--phase", "backward", "--run", str(run_dir)), capture_output=True, text=True, timeout=30
        )
        say("you", f"ttprun {' '.join(kill)} --phase backward")
        if order.returncode != 0:
            raise DemoError(f"the fault was refused: {order.stderr.strip()}")
        return training.finish()
    finally:
        training.stop()
        events.stop()


def train_undisturbed(options: argparse.Namespace, script: tuple[str, ...]) -> str:
    """Train the same under torchrun; returns the hash of the weights at the end."""
    training = Training((*TORCHRUN, "--nproc-per-node", str(options.ranks), *script), "torchrun")
    try:
        return training.finish()
    finally:
        training.stop()


def check_recovered(run_dir: Path) -> None:
    """Raise DemoError unless the run had an incident, and ended it by replacing the lost rank alone."""
    answer = subprocess.run((*TTPRUN, "status", str(run_dir), "--json"), capture_output=True, text=True, timeout=30)
    incidents = json.loads(answer.stdout)["incidents"]
    if not incidents:
        raise DemoError("no rank was lost: the run was over before the kill")
    if incidents[0]["outcome"] != "recovered":
        raise DemoError(f"the lost rank was not replaced: {incidents[0]['reason']}")


def main() -> int:
    """Run the demonstration; returns its exit code: 0 if the weights are identical, else 1."""
    parser = argparse.ArgumentParser(prog="demo.sh", description="Kill a rank during training; lose nothing.")
    parser.add_argument("--ranks", type=int, default=3, help="ranks to train with (default 3)")
    parser.add_argument("--rank", type=int, default=1, help="the rank that is killed (default 1)")
    parser.add_argument("--at-step", type=int, default=60, help="the step in which it is killed (default 60)")
    parser.add_argument("--steps", type=int, default=150, help="steps to train (default 150)")
    parser.add_argument("--http", metavar="[HOST]:PORT", help="show the run on a page; :0 takes a free port")
    options = parser.parse_args()
    if not (0 <= options.rank < options.ranks and 0 <= options.at_step < options.steps):
        parser.error("--rank must be less than --ranks, and --at-step less than --steps")
    run_dir = Path("ttprun-runs", f"demo-{datetime.now():%Y%m%d-%H%M%S}")
    script = (str(EXAMPLE), "--steps", str(options.steps))
    try:
        announce(f"1. ttprun: {options.ranks} ranks; rank {options.rank} is killed in step {options.at_step}")
        disturbed = train_and_kill(options, run_dir, script)
        announce("2. torchrun: the same training, undisturbed")
        undisturbed = train_undisturbed(options, script)
        announce("3. what happened to the run in which a rank was killed")
        subprocess.run((*TTPRUN, "status", str(run_dir)), timeout=30)
        check_recovered(run_dir)
        announce("4. the weights at the end")
        say("ttprun", disturbed)
        say("torchrun", undisturbed)
        if disturbed != undisturbed:
            raise DemoError("the weights differ")
    except DemoError as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\nweights identical")
    return 0


if __name__ == "__main__":
    sys.exit(main())
