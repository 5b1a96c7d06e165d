"""`ttprun explain` shows the table of what is changed in the user's process."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ttprun.cli.main import main
from ttprun.rank.position.judgement import (
    DEAD,
    NAMED,
    NO_STATE,
    ORDER,
    RECORDED,
    UNCHANGED,
    Judgement,
    judge,
)
from ttprun.rank.records.nodes import DataNode, EffectNode, ListNode, NotProvedNode, Number, RefusedNode, SameNode


@dataclass(frozen=True)
class FakePatch:
    module: str
    attribute: str
    why: str


class FakePatches:
    """Takes the place of the module `ttprun.rank.bootstrap.patch_table`."""

    ALSO = ()
    Patch = Change = FakePatch
    PATCHES = (
        FakePatch("torch.distributed", "init_process_group", "to replace the backend [once] " + "x" * 90),
        FakePatch("random", "seed", "to know the seed"),
    )


def test_every_patch_is_one_plain_line_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ttprun.rank.bootstrap.patch_table", FakePatches)

    code = main(["explain"])

    heading, first, second = capsys.readouterr().out.splitlines()[:3]
    assert code == 0
    assert heading.split() == ["module", "attribute", "why"]
    assert first.split()[:2] == ["torch.distributed", "init_process_group"]
    assert "the backend [once] xxx" in first
    assert second.split()[:2] == ["random", "seed"]


def test_the_order_in_which_a_variable_is_judged_is_printed_from_the_place_that_decides_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["explain"])

    said = capsys.readouterr().out.partition("How a variable is judged")[2].splitlines()[2:]
    assert [line.split("  ")[0] for line in said] == [one.name for one in ORDER]
    assert all(one.when in line and one.follows in line for one, line in zip(ORDER, said, strict=True))


@pytest.mark.parametrize(
    ("node", "is_dead", "judged"),
    [
        (RefusedNode("is a coroutine"), True, DEAD),
        (3, True, DEAD),
        (DataNode("float32", [1], b"digest"), False, UNCHANGED),
        (SameNode("m:Kind", "a digest"), False, UNCHANGED),
        (SameNode("m:Lock", ""), False, NO_STATE),
        (EffectNode("m:Queue"), False, NO_STATE),
        (NotProvedNode("m:Compress", "it can change"), False, NAMED),
        (RefusedNode("is a coroutine"), False, NAMED),
        (ListNode(Number(1), [1]), False, RECORDED),
        (3, False, RECORDED),
    ],
)
def test_a_variable_is_judged_by_the_first_row_that_fits(node: Any, is_dead: bool, judged: Judgement) -> None:
    assert judge(node, is_dead) is judged
