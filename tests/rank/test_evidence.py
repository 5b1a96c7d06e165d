"""What a rank leaves behind of the running step, and what its replacement is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from msgspec import structs

from tests.rank.fakes import FakeChannel, make_session
from ttprun.capture.records.evidence import ALWAYS, ENTRIES, REGION_BYTES, Evidence
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect.current_rank import BATCH, INPUT, LOSS, Rank
from ttprun.introspect.tensor_bytes import is_close, sampled
from ttprun.protocol import from_rank, rank_events
from ttprun.rank import proof
from ttprun.rank.proof import Alignment, Expected, MismatchError

LARGE = 1 << 20


def new_evidence() -> Evidence:
    evidence = Evidence(memoryview(bytearray(REGION_BYTES)))
    evidence.clear()
    return evidence


def test_what_was_noted_of_a_step_is_found_by_kind_name_and_number() -> None:
    evidence = new_evidence()

    first = evidence.note(7, INPUT, "world", [torch.ones(3)])
    second = evidence.note(7, INPUT, "world", [torch.zeros(3)])
    third = evidence.note(7, BATCH, "loader", [torch.ones(3)])

    assert evidence.left(7) == dict([first, second, third])
    assert evidence.left(5) == {}


def test_the_step_before_is_still_there_and_the_one_before_that_is_not() -> None:
    evidence = new_evidence()

    for step in (1, 2, 3):
        evidence.note(step, LOSS, "", [torch.ones(1)])

    assert [len(evidence.left(step)) for step in (1, 2, 3)] == [0, 1, 1]


def drawn(evidence: Evidence, step: int, count: int = 400) -> list[int]:
    return [number for number in range(count) if evidence.is_drawn(evidence.count(step, INPUT, "world"))]


def test_of_very_many_inputs_of_a_step_some_are_drawn_the_same_in_each_process_and_others_in_each_step() -> None:
    lost, replacement = new_evidence(), new_evidence()

    found = [drawn(lost, step) for step in range(1, 51)]

    assert found == [drawn(replacement, step) for step in range(1, 51)]
    assert all(numbers[:ALWAYS] == list(range(ALWAYS)) for numbers in found)
    assert all(len(numbers) < 50 for numbers in found)
    assert {number for numbers in found for number in numbers} > set(range(60))


def test_a_replacement_finds_the_drawn_inputs_of_the_lost_rank_at_their_places() -> None:
    lost, replacement = new_evidence(), new_evidence()
    tensors = [torch.full((4,), float(number)) for number in range(40)]

    for tensor in tensors:
        place = lost.count(3, INPUT, "world")
        if lost.is_drawn(place):
            lost.write(place, [tensor])

    left = lost.left(3)
    assert ALWAYS < len(left) < len(tensors)
    for tensor in tensors:
        place = replacement.count(3, INPUT, "world")
        if replacement.is_drawn(place):
            assert left.pop(place) == replacement.write(place, [tensor])
    assert not left


@pytest.mark.parametrize(("noted", "likely"), [((), [4, 5, 6]), ((5,), [6, 7, 8]), ((5, 6), [7, 8]), ((3, 5), [7, 9])])
def test_the_steps_of_which_something_is_likely_to_be_noted_are_as_far_apart_as_the_last_two(
    noted: tuple[int, ...], likely: list[int]
) -> None:
    evidence = new_evidence()

    for step in noted:
        evidence.note(step, LOSS, "", [torch.ones(1)])
        evidence.note(step + 1, BATCH, "loader", [torch.ones(1)])

    assert [step for step in range(likely[0], likely[-1] + 1) if evidence.is_likely(step)] == likely


def test_a_replacement_that_is_lost_in_its_turn_leaves_what_the_first_rank_had_noted() -> None:
    region = memoryview(bytearray(REGION_BYTES))
    lost, replacement = Evidence(region), Evidence(region)
    lost.clear()
    for number in range(3):
        lost.note(4, INPUT, "world", [torch.full((2,), number)])
    noted = lost.left(4)

    replacement.note(4, INPUT, "world", [torch.full((2,), 9)])

    assert replacement.left(4) == noted


def test_more_than_there_is_room_for_is_not_noted() -> None:
    evidence = new_evidence()

    for number in range(ENTRIES + 5):
        evidence.note(1, LOSS, "", [torch.full((1,), number)])

    assert len(evidence.left(1)) == ENTRIES


def test_what_comes_when_the_next_step_has_begun_is_not_taken_for_its_own() -> None:
    evidence = new_evidence()
    early, late = (evidence.count(4, INPUT, name) for name in ("world", "others"))
    parts, write = zip(*(evidence.write_later(place, [torch.ones(3)]) for place in (early, late)), strict=True)

    assert evidence.left(4) == {}
    write[0](parts[0])
    write[0](parts[0])
    for step in (5, 6):  # which has the place of step 4
        evidence.note(step, LOSS, "", [torch.ones(1)])
        assert list(evidence.left(4)) == ([early] if step == 5 else [])
    write[1](parts[1])

    assert [kind for kind, _, _ in evidence.left(6)] == [LOSS]
    assert evidence.left(4) == {}


def test_another_element_of_a_small_tensor_is_seen_wherever_it_is() -> None:
    tensor = torch.zeros(5000)
    before = sampled([tensor], 0)

    tensor[4321] = 1

    assert sampled([tensor], 0) != before


def test_each_step_looks_at_other_parts_of_a_large_tensor() -> None:
    seen = set()
    for step in range(LARGE // 64 // 16):
        tensor = torch.zeros(LARGE)
        before = sampled([tensor], step)[0]
        tensor[9 * LARGE // 64 + 100] = 1
        seen.add(sampled([tensor], step)[0] == before)

    assert seen == {True, False}


@pytest.mark.parametrize(
    ("factor", "is_so"), [(1 + 1e-6, True), (1 + 1e-2, False), (float("nan"), False)], ids=["rounding", "more", "nan"]
)
def test_what_differs_by_rounding_is_known_from_what_differs(factor: float, is_so: bool) -> None:
    one = torch.linspace(-1, 1, 50)
    samples = [bytes(sampled([tensor], 0)[1]) for tensor in (one, one * factor)]

    assert is_close(*samples, torch.float32) is is_so


def test_elements_of_every_part_and_of_every_tensor_are_compared_for_rounding() -> None:
    tensors = [torch.ones(5000), torch.ones(5000)]
    for differing in range(2):
        changed = [tensor.clone() for tensor in tensors]
        changed[differing][2500:] = 2.0

        one, other = (sampled(given, 0)[1] for given in (tensors, changed))

        assert not is_close(one, other, torch.float32)


def test_what_replacements_have_come_to_is_kept_by_place_and_step() -> None:
    evidence = new_evidence()
    place, noted = evidence.note(4, INPUT, "world", [torch.ones(3)])

    evidence.note_tried(4, place, noted)
    of_step = [evidence.tried(step, place) for step in (4, 5)]
    evidence.note_tried(5, place, noted)

    assert of_step == [[noted.digest], []]
    assert (evidence.tried(4, place), evidence.is_noisy) == ([], False)


Replacement = Callable[[int, dict[str, list[torch.Tensor]]], tuple[Rank, FakeChannel]]


@pytest.fixture
def replacement() -> Iterator[Replacement]:
    """Makes a replacement that is live at a boundary, of what the lost rank had given to collectives, by group."""
    channel = FakeChannel()

    def make(step: int, lost: dict[str, list[torch.Tensor]]) -> tuple[Rank, FakeChannel]:
        session = make_session(channel=channel)
        session.applied = step
        older = Evidence(session[Recorder].evidence._region)
        for name, tensors in lost.items():
            for tensor in tensors:
                older.note(step, INPUT, name, [tensor])
        proof.Proof.begin(session, step)
        return session, channel

    yield make
    channel.close()


def reported(channel: FakeChannel) -> tuple[list[str], list[str]]:
    (message,) = [message for message in channel.sent if isinstance(message, from_rank.Compared)]
    return message.equal, message.not_proved


def test_equal_inputs_are_reported_once_all_that_the_lost_rank_gave_has_been_compared(replacement: Replacement) -> None:
    session, channel = replacement(5, {"world": [torch.ones(40)]})

    proof.note(session, INPUT, "world", [torch.ones(40)])

    assert reported(channel) == (["1 input of a collective in step 5"], [])
    assert session.proof is None


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody ends a process that has reported a mismatch: it does not wait for that."""
    monkeypatch.setattr("ttprun.rank.proof._KILL_LIMIT_S", 0.0)


@pytest.mark.usefixtures("at_once")
def test_another_input_is_refused_before_anybody_gets_it(replacement: Replacement) -> None:
    session, channel = replacement(5, {"world": [torch.ones(40)]})

    with pytest.raises(MismatchError, match="number 1 of step 5"):
        proof.note(session, INPUT, "world", [torch.ones(40) * 2])

    assert [type(message) for message in channel.sent] == [rank_events.MismatchFound]


def nearly(ulps: int) -> torch.Tensor:
    return torch.linspace(1, 2, 40) * (1 + ulps * 2.0**-20)


def is_near(channel: FakeChannel) -> list[bool]:
    return [message.is_near for message in channel.sent if isinstance(message, rank_events.MismatchFound)]


@pytest.mark.usefixtures("at_once")
def test_one_thread_may_round_differently_if_two_replacements_come_to_different_bits(replacement: Replacement) -> None:
    session, channel = replacement(5, {"world": [nearly(0)]})

    with pytest.raises(MismatchError, match="by rounding alone"):
        proof.note(session, INPUT, "world", [nearly(1)])
    session, channel = replacement_of(session, channel)
    is_rounded = proof.note(session, INPUT, "world", [nearly(2)])

    assert is_near(channel) == [True]
    assert reported(channel)[0][0].startswith("0 inputs of collectives in step 5, 1 equal to rounding (the same state")
    assert (is_rounded, session[Alignment].is_needed, session[Recorder].evidence.is_noisy) == (True, True, True)


@pytest.mark.usefixtures("at_once")
def test_what_comes_back_in_each_replacement_is_a_contradiction(replacement: Replacement) -> None:
    session, channel = replacement(5, {"world": [nearly(0)]})

    for _ in range(proof.MOST_TRIES + 1):
        with pytest.raises(MismatchError):
            proof.note(session, INPUT, "world", [nearly(1)])
        session, channel = replacement_of(session, channel)

    assert is_near(channel) == [True] * proof.MOST_TRIES + [False]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("how", ["deterministic", "strict"])
def test_where_bits_are_demanded_rounding_is_a_contradiction(replacement: Replacement, how: str) -> None:
    session, channel = replacement(5, {"world": [nearly(0)]})
    if how == "strict":
        session.options = structs.replace(session.options, is_strict=True)  # type: ignore[misc]
    torch.use_deterministic_algorithms(how == "deterministic")

    try:
        with pytest.raises(MismatchError):
            proof.note(session, INPUT, "world", [nearly(1)])
    finally:
        torch.use_deterministic_algorithms(False)

    assert is_near(channel) == [False]


def test_several_threads_may_round_differently(replacement: Replacement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    session, channel = replacement(5, {"world": [nearly(0), nearly(0)]})

    proof.note(session, INPUT, "world", [nearly(0)])
    proof.note(session, INPUT, "world", [nearly(1)])

    several = "1 input of a collective in step 5, 1 equal to rounding (kernels run on several threads)"
    assert reported(channel) == ([several], [])


def replacement_of(session: Rank, channel: FakeChannel) -> tuple[Rank, FakeChannel]:
    """The next replacement of the same rank, in the same step."""
    following = make_session(channel=channel)
    following.applied = session.applied
    following.parts[Recorder] = session[Recorder]
    session[Recorder].evidence._step = -1  # as a new process begins
    proof.Proof.begin(following, session.applied)
    return following, channel


@pytest.mark.usefixtures("at_once")
def test_less_than_the_lost_rank_had_given_is_refused_at_the_end_of_the_step(replacement: Replacement) -> None:
    session, _ = replacement(5, {"world": [torch.ones(40), torch.ones(40)]})
    proof.note(session, INPUT, "world", [torch.ones(40)])
    assert session.proof is not None

    with pytest.raises(MismatchError, match="1 input of a collective"):
        session.proof.end_step()


@pytest.mark.parametrize(
    "tensor", [torch.ones(2), torch.arange(90, dtype=torch.uint8)], ids=["a time", "a pickled object"]
)
def test_what_a_script_may_measure_is_named_and_not_refused(replacement: Replacement, tensor: torch.Tensor) -> None:
    session, channel = replacement(5, {"world": [tensor]})

    proof.note(session, INPUT, "world", [tensor + 1])

    assert [len(part) for part in reported(channel)] == [0, 2]


@pytest.mark.usefixtures("at_once")
def test_a_small_gradient_that_the_script_reduces_itself_is_none_of_them(
    replacement: Replacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, _ = replacement(5, {"world": [torch.ones(2)]})
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.zeros(2)
    monkeypatch.setattr(proof.optimizer_registry, "parameters", lambda: iter([weight]))

    with pytest.raises(MismatchError):
        proof.note(session, INPUT, "world", [weight.grad])


def test_a_lost_rank_that_had_given_nothing_leaves_nothing_to_prove(replacement: Replacement) -> None:
    session, channel = replacement(5, {})

    assert session.proof is None
    assert reported(channel) == ([], ["the lost rank had left no loss and no input of a collective of step 5"])


def test_what_cannot_be_compared_is_named_and_the_script_goes_on(
    replacement: Replacement, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, channel = replacement(5, {"world": [torch.ones(40)]})
    monkeypatch.setattr("ttprun.introspect.tensor_bytes._memory", lambda tensor: 1 / 0)

    proof.note(session, INPUT, "world", [torch.ones(40)])

    assert "cannot be compared" in reported(channel)[1][0]


def test_what_is_noted_of_the_step_after_a_snapshot_stays_until_its_place_has_another() -> None:
    evidence = new_evidence()
    evidence.keep(4, number=1)

    for step in range(4, 9):
        evidence.note(step, LOSS, "", [torch.full((1,), step)])
    found = len(evidence.left(4)), len(evidence.left(5)), len(evidence.left(8))
    evidence.keep(9, number=1)

    assert found == (1, 0, 1)
    assert evidence.left(4) == {}


def test_a_rank_that_goes_back_has_what_it_had_noted_of_that_step_alone() -> None:
    older, evidence = new_evidence(), new_evidence()
    older.keep(4, number=0)
    for step in range(4, 9):
        older.note(step, LOSS, "", [torch.full((1,), step)])

    evidence.take_over(older, 4)
    evidence.take_over(older, 6)

    assert evidence.left(4) == older.left(4)
    assert [len(evidence.left(step)) for step in range(5, 9)] == [0, 0, 0, 0]


def test_a_rank_that_goes_back_has_caught_up_only_when_its_step_comes_to_the_same() -> None:
    channel = FakeChannel()
    session = make_session(channel=channel)
    session.applied = 4
    Evidence(session[Recorder].evidence._region).note(4, LOSS, "", [torch.ones(1)])
    proof.Proof.begin(session, 4, is_of_all=True)
    session.expected = Expected(channel, 1, {}, is_proved=False)

    before = [message for message in channel.sent if isinstance(message, from_rank.RankReissued)]
    proof.note(session, LOSS, "", [torch.ones(1)])

    assert before == []
    assert [message for message in channel.sent if isinstance(message, from_rank.RankReissued)]
    channel.close()
