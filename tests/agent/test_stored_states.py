"""What a run goes back to from a checkpoint on disk: refused with a reason where a file is not what was packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.state.making import DESCRIPTION, locked
from ttprun.agent.base.stored_states import STATE_FILE, open_checkpoint
from ttprun.state.checkpoint import inspect
from ttprun.state.files import InvalidCheckpointError

STATE = {"arguments": ["train.py"], "header": [["weight", "F32"]], "headers": {1: []}, "owners": {"weight": [0, 1]}}


def stored_in(folder: Path, state: Any) -> Path:
    """A checkpoint with this file of what all ranks share."""
    draft = locked(folder / "save").begin(3)
    draft.add(STATE_FILE, msgpack.packb(state))
    return draft.commit(DESCRIPTION).path


def test_what_all_ranks_share_is_read(tmp_path: Path) -> None:
    stored = open_checkpoint(inspect(stored_in(tmp_path, STATE)), 0.0)

    assert stored.arguments == ("train.py",)
    assert stored.header_of(0) == [["weight", "F32"]]
    assert stored.header_of(1) == []
    assert stored.owners == {"weight": (0, 1)}


@pytest.mark.parametrize("wrong", [{"owners": {"weight": 7}}, {"headers": [1]}, {"names": 3}, {"arguments": [None]}])
def test_a_value_of_another_type_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    made = stored_in(tmp_path, STATE | wrong)

    with pytest.raises(InvalidCheckpointError, match=f"{STATE_FILE} is damaged: it is not what was packed"):
        open_checkpoint(inspect(made), 0.0)
