"""What is said of a saved state is what the next launch does with it: its records are read as the ranks would."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.capture.records import record_of
from ttprun.agent.base.stored_states import Stored
from ttprun.agent.lead.resume import Resumption, check_records
from ttprun.capture import values
from ttprun.capture.records.nodes import RefusedNode
from ttprun.capture.records.packing import LoopRecord, pack
from ttprun.capture.values import Snapshot
from ttprun.config import Config
from ttprun.elastic_resume.acceptance import adapted
from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import RunStatus, write_status
from ttprun.state.files import InvalidCheckpointError
from ttprun.state.store import LOCK_NAME, CheckpointStore

GENERATOR = RefusedNode("is the generator stream, which does not show the positions of its loops")
LOOP = LoopRecord(
    site="train.py:2:0", position=3, lead=1, began_with=None, item_rng=None, current=None, bounds=None, is_inside=False,
    over=GENERATOR,
)  # fmt: skip


def check(proof: str, **fields: Any) -> tuple[str, ...]:
    """Read a checkpoint of one rank with such a record; returns what it lacks, and last why it is refused."""
    held = (1, pack(record_of(place=[["train.py", "main", 3]], **fields)), b"")
    part = {"records": [held], "first": held, "log": [], "workers": [], "appended": b""}
    stored = Stored(1, "step-1", ("train.py",), [], (), lambda rank: part)
    try:
        return (*check_records(stored, 1, Config(proof=proof)), "")  # type: ignore[arg-type]
    except InvalidCheckpointError as error:
        return (error.reason,)


@pytest.mark.parametrize(
    ("proof", "fields", "found"),
    [
        ("evidence", {}, ("",)),
        ("evidence", {"loops": [[LOOP]]}, ("rank 0: the iterable of loop 1 around the step cannot be",)),
        ("evidence", {"unfollowed": "a loop is not followed"}, ("rank 0: a loop is not followed",)),
        ("evidence", {"variables": [{"batches": GENERATOR}]}, ("main: batches cannot be recorded", "")),
        ("strict", {"variables": [{"batches": GENERATOR}]}, ("rank 0: main: batches cannot be recorded",)),
    ],
)
def test_a_state_that_the_next_launch_would_refuse_or_could_not_restore_is_known_when_it_is_written(
    proof: str, fields: dict[str, Any], found: tuple[str, ...]
) -> None:
    said = check(proof, **fields)

    assert len(said) == len(found)
    assert all(one.startswith(expected) for one, expected in zip(said, found, strict=True)), said


def test_a_launch_after_one_that_was_killed_says_that_nothing_had_been_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was killed before its first rank had started: its status names none."""
    told = RunStatus("day", "starting", 0, 2, 1, *["2026-11-29T07:00:00+00:00"] * 2)
    write_status(RunDirectory(tmp_path).status, told)
    (tmp_path / LOCK_NAME).write_text(json.dumps({"run_id": "day", "pid": 1, "host": "node", "run_dir": str(tmp_path)}))
    store = CheckpointStore(tmp_path)
    store.lock("night")

    found = Resumption(Config(), store, 2, ["train.py"], is_place_named=True).find()

    assert found == ()
    assert "the launcher of run day was killed: it had saved nothing yet, so the script starts at" in caplog.text


def record(boundary: int, scope: dict[str, Any], **fields: Any) -> list[Any]:
    """A boundary's record as a rank's part holds it."""
    values.begin_boundary()
    snapshot = Snapshot({})
    return [boundary, pack(record_of(boundary, variables=[snapshot.variables(scope)], **fields)), b""]


def stored(*parts: dict[str, Any]) -> Stored:
    return Stored(9, "save/step-9", ("train.py",), [], (), lambda rank: parts[rank])


def part(rank: int, **fields: Any) -> dict[str, Any]:
    """A rank that has trained: a loss of its own, a counter, and a tensor that all have alike."""
    common = {"rank": rank, "shared": torch.ones(2)}
    last = common | {"loss": 0.5 + rank, "steps": 9, "shared": torch.zeros(2)}
    return {"first": record(1, common | {"loss": 3.0, "steps": 1}), "records": [record(9, last, **fields)]}


def test_the_user_reads_from_whom_the_variables_come_that_differ_and_that_it_is_not_bit_exact(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "ttprun"):
        found = adapted(stored(part(0), part(1)), ["zero", "one"], 3, "is of 2 ranks, and this job has 3")

    (line,) = caplog.messages
    assert "resumed on 3 ranks from 2: sums are rounded otherwise, so not bit-exact" in line
    assert (
        "takes the variables of the old rank that was like it at first, else of rank r mod 2; which differed between the ranks in: loss;"
        in line
    )
    assert "rank 2 draws random numbers that are derived from those" in line
    assert found.of_others == ("zero", "one")


def test_one_old_rank_has_no_other_to_compare_with(caplog: pytest.LogCaptureFixture) -> None:
    found = adapted(stored(part(0)), ["zero"], 2, "is of 1 rank, and this job has 2")

    assert found.of_others is not None
    assert "differed" not in caplog.text


def test_with_other_arguments_only_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    adapted(stored(part(0), part(1)), ["zero", "one"], 2, "was made with other arguments ('train.py')")

    (line,) = caplog.messages
    assert "the set-up as it is now; weights, optimizer state" in line
    assert "bit-exact" not in line
    assert "mod" not in line


OWN_SAMPLER = {"kind": "has a sampler of its own (Mine)"}
ITERATOR = {"name": ["/home/me/train.py:12", 1], "lead": 1, "yielded": 4, "source": OWN_SAMPLER}


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ([part(0, unfollowed="a loop")], "a loop around the optimizer step was not followed"),
        ([part(0, loaders=[ITERATOR])], "the DataLoader of train.py:12: it has a sampler of its own (Mine)"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_anything_starts(ranks: list[Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        adapted(stored(*ranks), ["zero"], 3, "is of 1 rank, and this job has 3")

    assert why in str(refused.value)
    assert "start as many ranks with the same arguments, or give --resume off to start anew" in str(refused.value)
