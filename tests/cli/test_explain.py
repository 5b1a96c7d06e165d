"""`ttprun explain` shows the table of what is changed in the user's process."""

import sys
from dataclasses import dataclass

import pytest

from ttprun.cli.main import main


@dataclass(frozen=True)
class FakePatch:
    module: str
    attribute: str
    why: str


class FakePatches:
    """Takes the place of the module `ttprun.rank.bootstrap.patches`."""

    ALSO = ()
    Patch = Change = FakePatch
    PATCHES = (
        FakePatch("torch.distributed", "init_process_group", "to replace the backend [once] " + "x" * 90),
        FakePatch("random", "seed", "to know the seed"),
    )


def test_every_patch_is_one_plain_line_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ttprun.rank.bootstrap.patches", FakePatches)

    code = main(["explain"])

    heading, first, second = capsys.readouterr().out.splitlines()
    assert code == 0
    assert heading.split() == ["module", "attribute", "why"]
    assert first.split()[:2] == ["torch.distributed", "init_process_group"]
    assert "the backend [once] xxx" in first
    assert second.split()[:2] == ["random", "seed"]
