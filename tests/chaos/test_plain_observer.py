"""What a check compares must not differ by itself: what a script does not seed begins alike in each run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ttprun.chaos.plain_observer import sitecustomize

SCRIPT = """
import random
import numpy
import torch
print(torch.rand(3).tolist(), random.random(), numpy.random.rand())
"""


def draws_of(rank: int, folder: Path) -> str:
    """What a script draws without a seed, in a rank that torchrun has started in a check."""
    order = sitecustomize.order(str(folder), is_alone=True, steps=1, steps_of_rank={})
    paths = {"PYTHONPATH": os.path.dirname(sitecustomize.__file__), "RANK": str(rank)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=os.environ | paths | order, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout


def test_a_script_without_seeds_draws_the_same_in_each_run_of_a_check_and_other_numbers_in_each_rank(
    tmp_path: Path,
) -> None:
    first, again, other = (draws_of(rank, tmp_path) for rank in (0, 0, 1))

    assert first == again
    assert first != other
