"""What all members of a group have completed: its input is dropped, and a replacement has its result from the mirror."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ttprun.groups import waits
from ttprun.groups.collectives import _follow_reduction
from ttprun.groups.journal import Journal
from ttprun.groups.operations import Entry, Input, KeptInput
from ttprun.tensors.mirror_slots import ReducedParts

LANE = "0"


def no_limit(more_bytes: int) -> None: ...


class FakeGroup:
    """Has a name."""

    group_name = LANE


@pytest.fixture
def path() -> Iterator[str]:
    fd = os.memfd_create("parts")
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def issue(journal: Journal, group: FakeGroup, op: str, elements: int = 1024) -> Entry:
    """As a group does it; the input of a reduce-scatter is borrowed."""
    output, given = torch.zeros(elements // 2), torch.ones(elements)
    entry = Entry(group, op, (output, given), [output])  # type: ignore[arg-type]
    entry.is_passing = True
    if op.startswith("reduce"):
        entry.input = Input([given.detach()], is_borrowed=True)
    assert journal.save(entry, [given])
    journal.entries.append(entry)
    journal.note_order(entry)
    return entry


def complete(journal: Journal, entry: Entry) -> None:
    entry.is_done = True
    journal.settle_before(entry)
    entry.release()


def train(journal: Journal, layers: int) -> int:
    """One backward pass; returns the most bytes that were held at once."""
    group, most = FakeGroup(), 0
    for _ in range(layers):
        entry = issue(journal, group, "reduce_scatter_single")
        most = max(most, sum(copy.nbytes for one in journal.entries for copy in one.input.tensors))
        complete(journal, entry)
    return most


def test_of_inputs_that_no_replacement_needs_two_are_held_at_most() -> None:
    journal = Journal(1 << 20)
    journal.may_settle = True

    assert train(journal, layers=6) == 2 * 4096
    assert [entry.is_settled for entry in journal.entries] == [True] * 5 + [False]


def test_inputs_from_which_a_replica_is_repaired_are_held_until_the_boundary() -> None:
    assert train(Journal(1 << 20), layers=6) == 6 * 4096


def test_what_was_issued_before_proves_nothing_though_it_completes_later() -> None:
    journal, group = Journal(1 << 20), FakeGroup()
    journal.may_settle = True
    gathering, reducing = issue(journal, group, "all_gather_single"), issue(journal, group, "reduce_scatter_single")

    complete(journal, reducing)
    complete(journal, gathering)

    assert not reducing.is_settled


def test_what_a_member_waits_for_later_is_held_until_one_is_issued_after_that_wait() -> None:
    journal, group = Journal(1 << 20), FakeGroup()
    journal.may_settle = True
    first = issue(journal, group, "reduce_scatter_single")
    journal.put_off(first)
    gathering = issue(journal, group, "all_gather_single")
    (waited,) = journal.take_put_off(lambda entry: True)

    complete(journal, waited)
    journal.note_waited(waited)
    second = issue(journal, group, "reduce_scatter_single")
    complete(journal, gathering)
    assert not first.is_settled  # members may have issued the gather before they had waited for the reduction
    complete(journal, second)
    assert first.is_settled
    journal.put_off(second)
    journal.clear()
    assert not journal.take_put_off(lambda entry: True)


def test_of_a_gather_whose_result_nobody_knows_all_that_are_put_off_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal, group = Journal(1 << 20), FakeGroup()
    monkeypatch.setattr(waits, "current", lambda: SimpleNamespace(get=lambda _: journal))
    unshard = waits.wrap_wait_for_unshard(lambda _: "unpacked")
    gathers = [issue(journal, group, "all_gather_single") for _ in range(2)]
    for entry in gathers:
        entry.is_done = True
        journal.put_off(entry)

    def unpack(result: torch.Tensor) -> int:
        assert unshard(SimpleNamespace(_all_gather_result=SimpleNamespace(all_gather_output=result))) == "unpacked"
        return len(journal._put_off)

    assert unpack(gathers[1].outputs[0]) == 1  # that alone
    journal.put_off(gathers[1])
    assert unpack(torch.zeros(1)) == 0


@pytest.mark.parametrize("is_added_to", [False, True])
def test_the_result_of_a_reduction_is_reduced_again_from_the_copy_that_the_mirror_has(is_added_to: bool) -> None:
    journal, group, kept = Journal(1 << 20), FakeGroup(), torch.full((512,), 7.0)
    give = SimpleNamespace(give_result=lambda boundary, sequence, number, tensor: tensor.copy_(kept))
    session: Any = SimpleNamespace(parts={Journal: journal}, observers=give, applied=3)
    first = issue(journal, group, "reduce_scatter_single")
    (output,) = first.outputs
    first.kept_version = output._version
    if is_added_to:
        output += 1
    second = Entry(group, "allreduce", ([output], None), [output])  # type: ignore[arg-type]

    _follow_reduction(session, second)

    assert second.reduces_again
    assert isinstance(second.input, KeptInput) != is_added_to
    if not is_added_to:
        second.input.put_back([output])
        assert output.equal(kept)
        (again,) = second.input.made_again()
        assert again is not output
        assert again.equal(kept)


def test_a_lent_input_is_not_copied_and_its_memory_is_not_used_again() -> None:
    journal = Journal(1 << 20)
    entry = issue(journal, FakeGroup(), "reduce_scatter_single")
    address = entry.args[1].data_ptr()
    assert entry.input.tensors[0].data_ptr() == address
    complete(journal, entry)

    journal.clear()

    assert not journal._spare


def test_a_replacement_takes_what_the_lost_rank_had_got_of_this_step_and_nothing_older(path: str) -> None:
    lost = ReducedParts(path, no_limit)
    for boundary in (3, 4):
        for number in range(3 if boundary == 3 else 2):
            lost.keep(boundary, LANE, number, torch.full((5 + number,), boundary * 10.0 + number))
    replacement = ReducedParts(path, no_limit)

    for number in range(2):
        target = torch.zeros(5 + number)
        replacement.take(4, LANE, number, target)
        assert target.tolist() == [40.0 + number] * (5 + number)
        replacement.keep(4, LANE, number, target)  # as it goes on, and may be lost, too
    with pytest.raises(LookupError):
        replacement.take(4, LANE, 2, torch.zeros(7))
    with pytest.raises(LookupError):
        replacement.take(4, "another group", 0, torch.zeros(5))


def test_results_find_room_as_they_come(path: str) -> None:
    parts = ReducedParts(path, no_limit)
    results = [torch.randn(1000 * (number + 1)) for number in range(4)]

    for number, result in enumerate(results):
        parts.keep(1, LANE, number, result)

    for number, result in enumerate(results):
        target = torch.zeros_like(result)
        ReducedParts(path, no_limit).take(1, LANE, number, target)
        assert torch.equal(target, result)
