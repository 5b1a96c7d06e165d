"""Fixtures of the rank tests. The machine is small and shared: one thread is enough for tensors of this size."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis.configuration import set_hypothesis_home_dir

from tests.rank.training import every_case
from tests.rank.worlds import run_world
from ttprun.capture.position import loops

torch.set_num_threads(1)
os.environ["TORCH_HOME"] = str(Path(__file__).parents[1])  # tests are nobody's own code, unless one says so
set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "ttprun-hypothesis")


@pytest.fixture(autouse=True)
def no_hooks_are_left() -> Iterator[None]:
    """A replay's loop hooks and known loops do not outlive a test."""
    known = dict(loops.sites)
    yield
    loops.give_back()
    loops.sites.clear()
    loops.sites.update(known)


@pytest.fixture(scope="session")
def gloo_and_ours() -> tuple[list[Any], list[Any]]:
    """What `every_case` comes to in each rank, over plain gloo and over the managed process group."""
    return run_world(every_case, is_managed=False), run_world(every_case)
