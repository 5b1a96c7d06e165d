"""Why the stages of a step, of its end and of a freeze stand in their order: what goes wrong if two are exchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.rank.fakes import make_session
from ttprun.groups import generations
from ttprun.groups.journal import Journal
from ttprun.introspect.current_rank import Rank
from ttprun.protocol import to_rank
from ttprun.protocol.board import Field
from ttprun.rank.proof import Alignment
from ttprun.rank.replay import recovery_orders
from ttprun.rank.step import step_hooks
from ttprun.rank.verification import Verifier
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.own_state import OwnState
from ttprun.tensors.replicated import PostStepWeights
from ttprun.tensors.shares import SnapshotPart

BEGIN = (*step_hooks.BEGIN, *step_hooks.RECORD, *step_hooks.TAKE)
END = step_hooks.END
FREEZE = recovery_orders.STAGES


class Part:
    """A part of the session all of whose methods do nothing, but for those that are given."""

    def __init__(self, **methods: Any) -> None:
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


@pytest.fixture
def session() -> Iterator[Rank]:
    made = make_session(has_stepped=True)
    made.trains_alone = False
    parts = (Alignment, Verifier, Holdings, PostStepWeights, OwnState, Mirror, SnapshotPart)
    made.parts |= {kind: Part() for kind in parts}
    yield made
    made.channel.close()


def exchanged(stages: tuple[Any, ...], one: str, other: str) -> tuple[Any, ...]:
    """The same stages, two of them in each other's place."""
    named = {stage.name: stage for stage in stages}
    places = {one: other, other: one}
    return tuple(named[places.get(stage.name, stage.name)] for stage in stages)


def run(stages: tuple[Any, ...], *names: str, known: Any) -> None:
    """Those of the stages that have these names, in their order."""
    for stage in stages:
        if stage.name in names:
            stage.act(known)


def step_of(session: Rank) -> Any:
    parameter = torch.nn.Parameter(torch.ones(2))
    return step_hooks._Step(session, torch.optim.SGD([parameter], lr=0.1), None, None)  # type: ignore[arg-type]


def outcomes(stages: tuple[Any, ...], one: str, other: str, outcome: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
    """What comes of these stages as they are, and with two of them exchanged."""
    return [outcome(stages), outcome(exchanged(stages, one, other))]


def test_every_stage_says_why_it_stands_where_it_stands() -> None:
    for stages in (BEGIN, END, FREEZE):
        names = [stage.name for stage in stages]
        assert len(set(names)) == len(names)
        assert all(len(stage.why_here) > 5 for stage in stages)


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
    assert called == [stage.name for stage in BEGIN] + unrecorded


def test_a_result_that_is_overwritten_while_it_is_sent_refuses_the_step(
    session: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[str]:
        refused: list[str] = []
        held = SimpleNamespace(is_kept=True)
        entry = SimpleNamespace(input=held, result=None, signature="allreduce")
        session.parts[Journal] = Part(sources={"of": 0}, entries=[entry], source_of=lambda _: session.rank)
        monkeypatch.setattr(step_hooks, "wait_for_all", lambda *_: setattr(held, "is_kept", False))
        monkeypatch.setattr(step_hooks, "report_mismatch", lambda line, generation, why: refused.append(str(why)))
        run(stages, "operations", "results", known=step_of(session))
        return refused

    refused, unnoticed = outcomes(BEGIN, "operations", "results", outcome)

    assert refused == ["the result of allreduce was overwritten while it was sent to the other ranks"]
    assert unnoticed == []


def test_hashes_are_of_the_gradients_with_which_the_step_is_taken(session: Rank) -> None:
    def outcome(stages: tuple[Any, ...]) -> tuple[float, float]:
        gradient, hashed = torch.tensor(1.0), []
        session.parts |= {
            Alignment: Part(arrive=lambda *_: gradient.fill_(2.0)),
            Verifier: Part(look=lambda *_: hashed.append(gradient.item())),
        }
        run(stages, "align", "compare", known=step_of(session))
        return hashed[0], gradient.item()

    assert outcomes(BEGIN, "align", "compare", outcome) == [(2.0, 2.0), (1.0, 2.0)]


@pytest.mark.parametrize("refusing", ["proof", "compare"])
def test_no_rank_steps_when_one_refuses_before_it(
    session: Rank, monkeypatch: pytest.MonkeyPatch, refusing: str
) -> None:
    """A replacement that differs from the lost rank, and a rank with a NaN in its gradient."""

    def refuse(*_: Any) -> None:
        raise RuntimeError

    def record(session: Rank, boundary: int, *_: Any) -> bool:
        session.board.announce(session.rank, Field.RECORDED, boundary)
        return True

    def outcome(stages: tuple[Any, ...]) -> bool:
        session.board.announce(session.rank, Field.RECORDED, 0)
        with contextlib.suppress(RuntimeError):
            run(stages, refusing, "record", known=step_of(session))
        return bool(session.board.get(session.rank, Field.RECORDED))

    session.proof = Part(end_step=refuse)
    session.parts[Verifier] = Part(look=refuse)
    monkeypatch.setattr(step_hooks, "write_record", record)

    may_the_others_step = outcomes(BEGIN, refusing, "record", outcome)

    assert may_the_others_step == [False, True]


def test_a_rank_that_is_lost_in_the_commit_finds_the_steps_collectives_in_the_journals_of_the_others(
    session: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[str]:
        journal, issued_again = ["allreduce"], []
        session.parts[Journal] = Part(clear=journal.clear)
        monkeypatch.setattr(step_hooks, "commit", lambda *_: issued_again.extend(journal))
        step = step_of(session)
        step.is_recorded = True
        run(stages, "commit", "journal", known=step)
        return issued_again

    assert outcomes(BEGIN, "commit", "journal", outcome) == [["allreduce"], []]


def test_a_rank_commits_no_step_of_which_it_has_no_record(session: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[int]:
        committed: list[int] = []
        monkeypatch.setattr(step_hooks, "write_record", lambda *_: True)
        monkeypatch.setattr(step_hooks, "commit", lambda session, boundary: committed.append(boundary))
        run(stages, "record", "commit", known=step_of(session))
        return committed

    committed, gone_on_alone = outcomes(BEGIN, "record", "commit", outcome)

    assert (committed, gone_on_alone) == ([1], [])


@pytest.mark.parametrize("other", ["journal", "applying"])
def test_a_recovery_finds_no_old_collectives_at_a_passed_boundary_and_no_step_that_seems_to_run(
    session: Rank, other: str
) -> None:
    """A collective step, whose boundary is passed before it."""

    def outcome(stages: tuple[Any, ...]) -> tuple[int, bool, int]:
        session.applied, session.is_applying = 0, False
        cleared_at: list[int] = []
        session.parts[Journal] = Part(clear=lambda: cleared_at.append(session.applied))
        run(stages, "journal", "applying", "pass", known=step_of(session))
        return cleared_at[0], session.is_applying, session.applied

    session.has_collective_steps = True

    as_it_is, otherwise = outcomes(BEGIN, other, "pass", outcome)

    assert as_it_is == (0, False, 1)
    assert otherwise == ((1, True, 1) if other == "journal" else (0, True, 1))


def test_what_a_rank_alone_holds_is_mirrored_from_the_step_on_after_which_the_agent_says_so(session: Rank) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[bool]:
        wanted, mirrored = [], []
        session.parts |= {
            Verifier: Part(await_answer=lambda: wanted.append(True)),
            Mirror: Part(begin=lambda *_: mirrored.append(bool(wanted))),
        }
        step = step_of(session)
        step.is_recorded = True
        run(stages, "answer", "mirror", known=step)
        return mirrored

    assert outcomes(END, "answer", "mirror", outcome) == [[True], [False]]


@pytest.mark.parametrize("reader", ["weights", "mirror", "snapshot"])
def test_what_is_kept_of_a_step_is_its_own_though_a_recovery_waits_for_its_end(
    session: Rank, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[str]:
        weights, kept = ["of the step"], []
        session.applied = 0
        read = Part(note=lambda *_: kept.append(weights[0]))
        session.parts |= {
            PostStepWeights: read,
            Mirror: Part(begin=read.note),
            SnapshotPart: Part(is_due=lambda _: True, take=read.note),
        }
        monkeypatch.setattr(session, "pass_boundary", lambda: weights.insert(0, "loaded by a recovery"))
        step = step_of(session)
        step.is_recorded = True
        run(stages, reader, "pass", known=step)
        return kept

    assert outcomes(END, reader, "pass", outcome) == [["of the step"], ["loaded by a recovery"]]


@pytest.mark.parametrize(("other", "seen"), [("divergent", (1, 0)), ("end", (1, 0))])
def test_the_boundary_is_passed_when_a_rank_says_that_its_step_has_ended_or_is_killed_as_divergent(
    session: Rank, monkeypatch: pytest.MonkeyPatch, other: str, seen: tuple[int, int]
) -> None:
    def outcome(stages: tuple[Any, ...]) -> int:
        session.applied = 0
        at: list[int] = []
        session.parts[Verifier] = Part(stop_if_divergent=lambda: at.append(session.applied))
        monkeypatch.setattr(session, "touch", lambda _: at.append(session.applied))
        run(stages, other, "pass", known=step_of(session))
        return at[0]

    assert tuple(outcomes(END, other, "pass", outcome)) == seen


def freeze_of(session: Rank) -> Any:
    return recovery_orders._Freeze(session, to_rank.Freeze((0, 1), 5, ()), lambda: None)


def test_a_frozen_rank_announces_the_new_generation(session: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[int]:
        session.generation = 4
        held: list[int] = []
        monkeypatch.setattr(recovery_orders, "settle", lambda session, *_: held.append(session.generation))
        run(stages, "hold", "settle", known=freeze_of(session))
        return held

    assert outcomes(FREEZE, "hold", "settle", outcome) == [[5], [4]]


def test_a_collective_step_ends_if_no_rank_is_lost(session: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[bool]:
        session[Journal].is_frozen = False
        has_ended: list[bool] = []

        def wait(session: Rank, *_: Any) -> None:
            has_ended.append(not session[Journal].is_frozen)  # its next collective is issued

        monkeypatch.setattr(recovery_orders, "let_collective_step_end", wait)
        run(stages, "collective step", "journal", known=freeze_of(session))
        return has_ended

    session.has_collective_steps = True

    assert outcomes(FREEZE, "collective step", "journal", outcome) == [[True], [False]]


def test_no_operation_is_issued_on_a_broken_connection(session: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[str]:
        session[Journal].is_frozen = False
        failed: list[str] = []

        def cut(session: Rank, *_: Any) -> None:
            if not session[Journal].is_frozen:
                failed.append("what the script issues now")

        monkeypatch.setattr(generations, "break_connections", cut)
        run(stages, "journal", "connections", known=freeze_of(session))
        return failed

    assert outcomes(FREEZE, "journal", "connections", outcome) == [[], ["what the script issues now"]]


def test_a_step_that_waits_for_a_lost_rank_ends_since_its_connections_are_cut(
    session: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outcome(stages: tuple[Any, ...]) -> list[bool]:
        cut: list[str] = []
        ended: list[bool] = []
        monkeypatch.setattr(generations, "break_connections", lambda *_: cut.append("all"))
        monkeypatch.setattr(recovery_orders, "let_step_end", lambda *_: ended.append(bool(cut)))
        run(stages, "connections", "step", known=freeze_of(session))
        return ended

    assert outcomes(FREEZE, "connections", "step", outcome) == [[True], [False]]


@pytest.mark.parametrize("other", ["step", "saves", "device", "report"])
def test_a_freeze_depends_on_the_boundary_to_which_the_survivors_settle(
    session: Rank, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """The running step ends at boundary 1, and the survivors settle at 2."""

    def outcome(stages: tuple[Any, ...]) -> int:
        session.applied = 0
        seen: list[int] = []

        def settle(session: Rank, *_: Any) -> None:
            if other == "step":
                seen.append(session.applied)  # what the others are told
            session.applied = 2

        monkeypatch.setattr(recovery_orders, "settle", settle)
        monkeypatch.setattr(recovery_orders, "let_step_end", lambda session, *_: setattr(session, "applied", 1))
        monkeypatch.setattr(
            recovery_orders.thread_collectives, "give_up_older", lambda session: seen.append(session.applied)
        )
        monkeypatch.setattr(recovery_orders.generations, "settle", lambda: seen.append(session.applied))
        monkeypatch.setattr(session.channel, "send", lambda frozen: seen.append(frozen.boundary))
        monkeypatch.setattr(recovery_orders.replicated, "digest", lambda: "")
        run(stages, other, "settle", known=freeze_of(session))
        return seen[0]

    assert outcomes(FREEZE, other, "settle", outcome) == ([1, 0] if other == "step" else [2, 0])
