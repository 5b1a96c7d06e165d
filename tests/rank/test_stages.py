"""Why the stages of a step, of its end, of a freeze and of a collective stand in their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rank.fakes import make_session
from ttprun.groups import collectives
from ttprun.introspect.current_rank import Rank
from ttprun.rank.replay import recovery_orders
from ttprun.rank.step import step_hooks

TABLES = {
    "begin": (*step_hooks.BEGIN, *step_hooks.RECORD, *step_hooks.TAKE),
    "end": step_hooks.END,
    "freeze": recovery_orders.STAGES,
    "collective": collectives.STAGES,
}
ORDER = [
    # table, what comes first, what comes later, and what goes wrong if they are exchanged
    ("begin", "operations", "results", "a result that is overwritten while it is sent is not noticed"),
    ("begin", "align", "compare", "hashes are of gradients with which the step is not taken"),
    ("begin", "proof", "record", "the others step though a replacement differs from the lost rank"),
    ("begin", "compare", "record", "the others step though a rank has a NaN in its gradient"),
    (
        "begin",
        "commit",
        "journal",
        "a rank that is lost in the commit finds no collectives of the step in the journals",
    ),
    ("begin", "record", "commit", "a rank commits a step of which it has no record"),
    ("begin", "journal", "pass", "a recovery finds old collectives at a boundary that is passed"),
    ("begin", "applying", "pass", "a recovery finds a step that seems to run at a boundary that is passed"),
    ("end", "answer", "mirror", "what a rank alone holds is mirrored a step later than the agent says so"),
    ("end", "weights", "pass", "the weights that are kept are those that a recovery has loaded"),
    ("end", "mirror", "pass", "what is mirrored is what a recovery has loaded"),
    ("end", "snapshot", "pass", "what a snapshot holds is what a recovery has loaded"),
    ("end", "pass", "divergent", "a divergent rank is killed before the boundary that it has reached"),
    ("end", "pass", "end", "a rank says that its step has ended at the boundary before it"),
    ("freeze", "hold", "settle", "a frozen rank announces the old generation"),
    ("freeze", "collective step", "journal", "a collective step does not end though no rank is lost"),
    ("freeze", "journal", "connections", "what the script issues now is issued on a broken connection"),
    ("freeze", "connections", "step", "a step that waits for a lost rank never ends"),
    ("freeze", "step", "settle", "the others are told of the boundary before the step that ends"),
    ("freeze", "settle", "saves", "saves of older threads are given up for another boundary"),
    ("freeze", "settle", "device", "the device is settled for another boundary"),
    ("freeze", "settle", "report", "the agent is told of another boundary"),
    ("collective", "device", "announce", "what is left to the backend is announced"),
    ("collective", "announce", "hand over", "a collective that another takes over is not announced"),
    ("collective", "answer", "expect", "what a replay answers is compared with what survivors have issued"),
    ("collective", "expect", "issue", "what survivors have not issued is issued"),
    ("collective", "issue", "look", "NaNs are looked for while nobody waits for the operation"),
]


@pytest.mark.parametrize("table", TABLES)
def test_every_stage_says_why_it_stands_where_it_stands(table: str) -> None:
    names = [stage.name for stage in TABLES[table]]

    assert len(set(names)) == len(names)
    assert all(len(stage.why_here) > 5 for stage in TABLES[table])


@pytest.mark.parametrize(("table", "first", "later", "otherwise"), ORDER)
def test_stages_stand_in_the_order_without_which_something_goes_wrong(
    table: str, first: str, later: str, otherwise: str
) -> None:
    names = [stage.name for stage in TABLES[table]]

    assert names.index(first) < names.index(later), otherwise


@pytest.fixture
def session() -> Iterator[Rank]:
    made = make_session(has_stepped=True)
    yield made
    made.channel.close()


def test_a_step_calls_each_stage_once_and_what_is_not_recorded_none_of_the_record(
    session: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def noting(stages: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(stage._replace(act=lambda _, name=stage.name: called.append(name)) for stage in stages)

    for table in ("BEGIN", "RECORD", "TAKE"):
        monkeypatch.setattr(step_hooks, table, noting(getattr(step_hooks, table)))
    for is_recorded in (True, False):
        monkeypatch.setattr(Rank, "is_recorded", lambda _, answer=is_recorded: answer)
        step_hooks._begin_step(session, None, None)  # type: ignore[arg-type]

    unrecorded = [stage.name for stage in (*step_hooks.BEGIN, *step_hooks.TAKE)]
    assert called == [stage.name for stage in TABLES["begin"]] + unrecorded
