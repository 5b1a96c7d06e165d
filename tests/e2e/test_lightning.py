"""Lightning's Trainer and Fabric: a lost rank is replaced, and all that they write is the same.

The extra `test-frameworks` has Lightning. All cases: ./scripts/test.sh -m 'slow or not slow' with this file.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.cases import needs, plain, recovered_and_undisturbed
from tests.e2e.harness import Run, RunTtprun, Undisturbed

TRAINER = "frameworks/lightning_trainer.py"  # 3 epochs of 10 steps

pytestmark = needs("lightning")


@pytest.mark.parametrize(
    "case",
    [
        ": kill:rank=0,step=20,phase=checkpoint",
        "--logger tensorboard: kill:rank=0,step=20,phase=checkpoint",
        "--manual: kill:rank=0,step=13,phase=backward",
    ],
)
def test_a_rank_of_a_lightning_trainer_is_replaced_and_its_checkpoints_and_logs_are_the_same(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, case: str
) -> None:
    if "tensorboard" in case:
        pytest.importorskip("tensorboard")
    result, reference = recovered_and_undisturbed(run_ttprun, undisturbed, TRAINER, case)

    assert said(result) == said(reference), result.story()
    assert result.exit_code == reference.exit_code == 0, result.story()
    assert not result.status["not_proved"], result.story()
    assert written(result.folder) == written(reference.folder), result.story()


def said(run: Run) -> dict[int, list[str]]:
    """What the script itself printed; a progress bar says how fast it is."""
    return {rank: [line for line in lines if line.startswith(("rank", "step"))] for rank, lines in run.stdout.items()}


def written(folder: Path) -> dict[str, str]:
    """Digest of each file that the script has written, by its name; a checkpoint holds paths in its folder."""
    found = {}
    for path in sorted((folder / "out").rglob("*")):
        if path.name.startswith("events.out"):  # named after the moment, and holding times
            found[str(path.parent.relative_to(folder) / "events")] = repr(events_in(path))
        elif path.is_file():
            content = repr(plain(torch.load(path, weights_only=False))) if path.suffix == ".ckpt" else path.read_text()
            content = content.replace(str(folder.resolve()), "")
            found[str(path.relative_to(folder))] = hashlib.sha256(content.encode()).hexdigest()
    return found


def events_in(path: Path) -> list[Any]:
    """What a file of TensorBoard's holds, without times."""
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    events = loader.LegacyEventFileLoader(str(path)).Load()
    return [(event.step, value.tag, str(value)) for event in events for value in event.summary.value]
