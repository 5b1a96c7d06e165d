"""Training loops inside frameworks from PyPI: a lost rank is replaced, and all that the framework writes is the same.

The frameworks are in the extra `test-frameworks`. All cases: ./scripts/test.sh -m 'slow or not slow' with this file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cases import needs, plain, recovered_and_undisturbed
from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_same_outcome

TRANSFORMERS = "frameworks/transformers_trainer.py"  # 20 steps, 10 with --accumulate 2
ACCELERATE = "frameworks/accelerate_loop.py"  # 24 batches
STREAMS = "streams.py"  # 12 steps an epoch
IGNITE = "frameworks/ignite_engine.py"  # 4 epochs of 10 steps
_MEASURED = ("runtime", "per_second")


@needs("transformers")
@pytest.mark.parametrize("case", ["--accumulate 2 --evaluate --save --callback: kill:rank=1,step=7,phase=backward"])
def test_a_rank_of_a_transformers_trainer_is_replaced_and_its_checkpoints_and_logs_are_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_replaced_and_the_same(run_ttprun, undisturbed, TRANSFORMERS, case)


@needs("accelerate")
@pytest.mark.parametrize(
    "case",
    [
        "--accumulate 2 --save: kill:rank=1,step=7,phase=backward",
        "--save: kill:rank=1,step=12,phase=validation",
    ],
)
def test_a_rank_that_trains_with_accelerate_is_replaced_and_all_that_is_tracked_and_saved_is_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_replaced_and_the_same(run_ttprun, undisturbed, ACCELERATE, case)


@pytest.mark.parametrize(
    "case", ["--epochs 1: kill:rank=1,step=7,phase=backward", "--stateful: kill:rank=1,step=17,phase=backward"]
)
def test_a_rank_that_reads_a_stream_or_a_stateful_loader_in_workers_is_replaced_and_nothing_differs(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    if "--stateful" in case:
        pytest.importorskip("torchdata")
    assert_replaced_and_the_same(run_ttprun, undisturbed, STREAMS, case)


@needs("ignite")
@pytest.mark.parametrize("case", ["--save: kill:rank=1,step=10,phase=validation"])
def test_a_rank_of_an_engine_of_ignite_is_replaced_and_its_checkpoints_and_metrics_are_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    assert_replaced_and_the_same(run_ttprun, undisturbed, IGNITE, case)


def assert_replaced_and_the_same(run_ttprun: RunTtprun, undisturbed: Undisturbed, script: str, case: str) -> None:
    """A fault in a run of a framework's script changes nothing of what comes out."""
    result, reference = recovered_and_undisturbed(run_ttprun, undisturbed, script, case)

    assert_same_outcome(without_times(result), without_times(reference))
    assert written(result.folder) == written(reference.folder), result.story()


def without_times(run: Run) -> Run:
    """The run without lines that say how long something took."""
    kept = {
        rank: [line for line in lines if not any(word in line for word in _MEASURED)]
        for rank, lines in run.stdout.items()
    }
    return replace(run, stdout=kept)


def written(folder: Path) -> dict[str, str]:
    """Digest of each file that the script has written, by its name."""
    ours = ("logs", "run", "launcher.log")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path: path.relative_to(folder) for path in files}
    # A model card has its tags in the order of a set, which differs from run to run under torchrun. What a killed rank
    # was writing under a temporary name stays.
    return {
        str(name): digest_of(path)
        for path, name in names.items()
        if name.parts[0] not in ours and name.name != "README.md" and not name.name.startswith("tmp")
    }


def digest_of(path: Path) -> str:
    """Of what torch or a JSON file holds: bytes of a pickle depend on which of its strings are one object."""
    content: Any = path.read_bytes()
    if path.suffix in (".pt", ".pth", ".bin", ".pkl"):
        content = repr(plain(torch.load(path, weights_only=False))).encode()
    elif path.suffix == ".json":
        held = without_measures(json.loads(content))
        if path.name == "adapter_config.json":  # of peft, which writes a set in its order: that differs, too
            held["target_modules"].sort()
        content = json.dumps(held, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()


def without_measures(held: Any) -> Any:
    if isinstance(held, dict):
        return {
            name: without_measures(value) for name, value in held.items() if not any(word in name for word in _MEASURED)
        }
    return [without_measures(value) for value in held] if isinstance(held, list) else held
