"""What is said of a saved state is what the next launch does with it: its records are read as the ranks would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.capture.records import record_of
from ttprun.agent.base.stored_states import Stored
from ttprun.agent.lead.resume import Resumption, check_records
from ttprun.capture.records.boundary_record import LoopRecord
from ttprun.capture.records.nodes import RefusedNode
from ttprun.capture.records.packing import pack
from ttprun.config import Config
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
    (tmp_path / LOCK_NAME).write_text(json.dumps({"run_id": "day", "pid": 1, "host": "node"}))
    store = CheckpointStore(tmp_path)
    store.lock("night")

    found = Resumption(Config(), store, 2, ["train.py"], is_place_named=True).find()

    assert found == ()
    assert "the launcher of run day was killed: it had saved nothing yet, so the script starts at" in caplog.text
