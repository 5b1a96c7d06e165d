"""A job on several nodes, here two launchers on one machine, which find each other in torch's ways."""

from __future__ import annotations

from itertools import chain

import pytest

from tests.e2e.harness import PLAIN, Launch, StartTtprun, Undisturbed, assert_no_orphans
from tests.nodes import free_port


def nodes(start_ttprun: StartTtprun, rendezvous: str, ranks: int) -> list[Launch]:
    """Two launchers that meet by one of torch's ways."""
    port = free_port()
    address = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    ways = {
        "static": [["--node-rank", str(node), *address] for node in (0, 1)],
        "c10d": [["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "one"]] * 2,
    }
    return [start_ttprun(PLAIN, ranks, options=["--nnodes", "2", *way]) for way in ways[rendezvous]]


@pytest.mark.parametrize(("rendezvous", "ranks"), [("static", 1), ("c10d", 2)])
def test_two_nodes_train_together_as_under_torchrun_and_are_protected(
    start_ttprun: StartTtprun, undisturbed: Undisturbed, rendezvous: str, ranks: int
) -> None:
    reference = undisturbed(PLAIN, 2 * ranks)

    launches = nodes(start_ttprun, rendezvous, ranks)
    runs = [launch.finish() for launch in launches]

    for run in runs:
        assert run.exit_code == 0, run.story()
        assert run.status["state"] == "done", run.story()
        assert_no_orphans(run)
    (line,) = [line for run in runs for line in run.output.splitlines() if line.startswith("ttprun: ")]
    assert line.startswith("ttprun: 2 nodes: a lost rank is replaced on its node"), "once a job"
    assert [run.status["protection"] for run in runs] == ["on", "on"]
    assert sorted(run.status["is_leading"] for run in runs) == [False, True]
    # Which node is the first one with c10d, chance decides.
    hashes = chain(*(run.hashes.values() for run in runs))
    assert sorted(chain(*hashes)) == sorted(chain(*reference.hashes.values()))
    assert reference.final in [run.final for run in runs]
