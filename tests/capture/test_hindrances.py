"""What would keep a replay from coming to a boundary is found when the boundary is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.capture.records import record_of
from tests.rank.fakes import FakeChannel, make_session
from tests.rank.processes import run_alone
from tests.rank.scripts import run_under_shim
from ttprun.capture import values
from ttprun.capture.records.nodes import DictNode, ListNode, Number, ObjectNode, RefusedNode
from ttprun.capture.records.packing import BoundaryRecord, read_head
from ttprun.protocol import from_rank
from ttprun.protocol.reason import Reason
from ttprun.rank.step.record import hindrance_of, why_shards_unknown


def record(**variables: Any) -> BoundaryRecord:
    return record_of(variables=[values.Snapshot({}).variables(variables)])


def look(record: BoundaryRecord, is_strict: bool = True) -> str:
    """As a boundary does."""
    found = [
        reason
        for reason, is_needed in values.refusals(read_head(values.pack(record)))
        if reason and (is_needed or is_strict)
    ]
    return str(hindrance_of(record, found))


class Holder:
    """An object of the user's."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.mark = "!"


def test_a_variable_that_cannot_be_restored_is_named_with_its_path() -> None:
    assert run_alone(_look_at, "deep") == (
        "<module>: config['holders'][1].held cannot be recorded: it is a coroutine, which does not show its position; "
        "run over it by a `for` loop of your own, or count its items and take them by index"
    )


def test_a_variable_that_cannot_be_restored_hinders_nothing_where_the_evidence_decides() -> None:
    assert run_alone(_look_at, "not strict") == ""


def test_values_that_look_like_a_refusal_are_none() -> None:
    assert run_alone(_look_at, "like") == ""


def _look_at(case: str) -> str:
    values.Snapshot.node  # noqa: B018 - the handlers are chosen on import
    if case == "like":
        return look(record(words=["!", "is like one"], pair=("!", "why"), table={"!": "x"}))
    fields = record(config={"holders": [1, 2]})
    held = RefusedNode("is a coroutine, which does not show its position", "iterator-position")
    holder = ObjectNode(Number(3), "m:Holder", {"mark": "!", "held": held})
    holders = ListNode(Number(2), [7, holder])
    fields.variables[0]["config"] = DictNode(Number(1), ["holders"], [holders])
    return look(fields, is_strict=case != "not strict")


def test_a_future_that_is_not_done_hinders_and_a_finished_one_does_not() -> None:
    waiting, done = run_alone(_of_futures)

    assert "work: it is work" in waiting.replace(" cannot be recorded", "")
    assert done == ""


def _of_futures() -> list[str]:
    from concurrent.futures import Future

    work: Future[int] = Future()
    found = [look(record(work=work))]
    work.set_result(3)
    return [*found, look(record(work=work))]


def test_numbers_of_the_system_hinder_only_from_the_second_step_on() -> None:
    first, second = (look(record_of(boundary, entropy=1)) for boundary in (1, 2))

    assert first == ""
    assert "os.urandom" in second


def test_optimizers_and_parameters_that_are_sharded_by_hand_of_torch_are_named() -> None:
    plain, flattened = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    flattened._fsdp_flattened = True  # type: ignore[attr-defined]

    found = [why_shards_unknown(torch.optim.SGD([one], lr=0.1)) for one in (plain, flattened)]

    assert str(found[0]) == ""
    assert "FSDP1" in str(found[1])


def test_what_comes_and_goes_is_reported_a_few_times_only() -> None:
    assert run_alone(_reports_of_what_comes_and_goes) == (20, "", "")


def _reports_of_what_comes_and_goes() -> tuple[int, str, str]:
    line = FakeChannel()
    session = make_session(channel=line)
    for boundary in range(100):
        session.note_hindrance(boundary, Reason("iterator-position", "a queue") if boundary % 2 else Reason())
    return len(line.sent), str(line.sent[-1].reason), str(session.hindrance)


def test_a_rank_that_trains_without_a_group_says_so_at_its_first_step(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nw = torch.ones(2, requires_grad=True)\no = torch.optim.SGD([w], lr=0.1)\n"
        "for _ in range(3):\n    o.zero_grad()\n    w.sum().backward()\n    o.step()\n"
    )

    found = run_under_shim([str(script)], tmp_path, world_size=2, local_world_size=2)

    assert (found.code, found.printed) == (0, "")
    kinds = [type(message) for message in found.messages]
    assert kinds.count(from_rank.RankTrainsAlone) == 1
    assert not {from_rank.RankHindered, from_rank.RankUnprotected, from_rank.RankJoined, from_rank.Held} & {*kinds}
