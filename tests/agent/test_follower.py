"""What an agent does that another one leads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ttprun.agent.between.follower import Follower
from ttprun.agent.node.verdict import Failure, FirstFailure
from ttprun.protocol import meeting

OWN = Failure(1, 77, -9, "killed", traceback="of its own")


@pytest.mark.parametrize(
    ("own", "code", "kept"),
    [
        (OWN, -15, Failure(1, 0, -15, "node 0 was lost")),
        (OWN, -9, OWN),
        (None, 1, Failure(1, 0, 1, "node 0 was lost")),
    ],
)
def test_all_launchers_end_with_the_code_of_the_one_that_leads(own: Failure | None, code: int, kept: Failure) -> None:
    first_failure, verdicts = FirstFailure(), []
    if own is not None:
        first_failure.note(own, is_new_incident=True)
    node: Any = SimpleNamespace(
        here=[SimpleNamespace(rank=1)],
        slots=[None, None],
        first_failure=first_failure,
        verdict=None,
        end_by=lambda signal: None,
        hear_conclusion=verdicts.append,
        log=lambda event, **fields: None,
    )
    nobody: Any = None

    Follower(node, nobody, nobody).take_order(meeting.Concluded("fail", "node 0 was lost", True, code))

    assert first_failure.found == kept
    assert [verdict.kind for verdict in verdicts] == ["fail"]
