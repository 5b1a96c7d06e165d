"""Several nodes: network namespaces of this machine (`tests/nodes.py`), a launcher in each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from tests.e2e.harness import PLAIN, Launch, Undisturbed, assert_no_orphans, start_ttprun
from tests.nodes import Nodes, why_none

pytestmark = pytest.mark.skipif(bool(why_none()), reason=why_none())


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    """Two nodes."""
    with Nodes(2) as found:
        yield found


def start(nodes: Nodes, script: str, ranks: int, folder: Path) -> list[Launch]:
    """The launchers of all nodes, each with so many ranks."""
    return [
        start_ttprun(script, ranks, folder / str(number), options=nodes.rendezvous(number), within=nodes.inside(number))
        for number in range(len(nodes.names))
    ]


def test_two_nodes_train_as_under_torchrun(nodes: Nodes, tmp_path: Path, undisturbed: Undisturbed) -> None:
    reference = undisturbed(PLAIN, 2)

    runs = [launch.finish(60) for launch in start(nodes, PLAIN, 1, tmp_path)]

    for run in runs:
        assert run.exit_code == 0, run.story()
        assert_no_orphans(run)
    hashes = chain(*(run.hashes.values() for run in runs))
    assert sorted(chain(*hashes)) == sorted(chain(*reference.hashes.values()))
    assert reference.final in [run.final for run in runs]
