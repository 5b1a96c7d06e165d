"""`ttprun explain` shows the table of what is changed in the user's process."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ttprun.capture.position.judgement import (
    DEAD,
    NAMED,
    NO_STATE,
    ORDER,
    RECORDED,
    UNCHANGED,
    Judgement,
    judge,
)
from ttprun.capture.records.nodes import DataNode, EffectNode, ListNode, NotProvedNode, Number, RefusedNode, SameNode
from ttprun.cli.main import main
from ttprun.protocol.reasons import KINDS, WORDS


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


def test_every_patch_is_named_with_its_reason_under_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ttprun.rank.bootstrap.patch_table", FakePatches)
    monkeypatch.setenv("COLUMNS", "100")

    code = main(["explain"])

    meaning, first, second, *_ = capsys.readouterr().out.split("\n\n")
    name, *why = first.splitlines()
    assert code == 0
    assert meaning.startswith("ttprun does not change your files: ")
    assert meaning.count(". ") == 0
    assert name == "torch.distributed: init_process_group"
    assert " ".join(line.strip() for line in why) == FakePatches.PATCHES[0].why
    assert second == "random: seed\n    to know the seed"


@pytest.mark.parametrize(("columns", "most"), [("", 100), ("60", 60), ("300", 100)])
def test_a_pipe_gets_lines_that_can_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, most: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    main(["explain"])

    lines = capsys.readouterr().out.splitlines()
    of_words = [line for line in lines if " " in line.strip()]  # a name is never broken
    assert max(map(len, of_words)) <= most
    assert max(map(len, lines)) <= 100
    assert "torch.optim.optimizer: Optimizer.__init__" in lines


def test_the_order_in_which_a_variable_is_judged_is_printed_from_the_place_that_decides_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["explain"])

    said = (
        capsys.readouterr().out.partition("When a rank is replaced")[2].partition("\n\nWhy a rank")[0].split("\n\n")[1:]
    )
    assert [paragraph.splitlines()[0] for paragraph in said] == [one.name for one in ORDER]
    told = [" ".join(paragraph.split()) for paragraph in said]
    assert all(f"{one.when} → {one.follows}" in text for one, text in zip(ORDER, told, strict=True))


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


def test_the_last_section_lists_the_kinds_of_reasons_by_their_words(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain"])

    said = capsys.readouterr().out.partition("Why a rank is not replaced")[2].split("\n\n")[1:]
    assert [paragraph.splitlines()[0] for paragraph in said] == list(WORDS)
    listed = {word.strip(",") for paragraph in said for word in paragraph.partition("\n")[2].split()}
    assert listed == set(KINDS)


@pytest.mark.parametrize(
    "asked",
    [
        ["journal-full"],
        ["not protected: the journal has reached its limit (ttprun explain\n  journal-full). If a rank is lost"],
        ["rank", "1", "reports:", "too", "much", "(ttprun", "explain", "journal-full)."],
    ],
)
def test_a_reason_is_explained_by_its_kind_and_by_its_message(
    capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    code = main(["explain", *asked])

    said = " ".join(capsys.readouterr().out.split())
    row = KINDS["journal-full"]
    assert code == 0
    assert said.startswith(
        f"journal-full: not protected {row.means} what ttprun does then {WORDS[row.word]} what helps"
    )
    assert said.endswith("what helps raise journal_limit_mib more ttprun guide configuration, under 'Configuration'")


@pytest.mark.parametrize(
    ("asked", "cure"),
    [
        ("jurnal-full", "did you mean 'journal-full'?"),
        ("symetric-memory", "did you mean 'symmetric-memory'?"),
        ("xyz", "'ttprun explain' lists the kinds; a message ends with its own in brackets"),
    ],
)
def test_an_unknown_reason_is_one_line_with_the_nearest(
    capsys: pytest.CaptureFixture[str], asked: str, cure: str
) -> None:
    code = main(["explain", asked])

    assert code == 2
    assert capsys.readouterr().err == f"ttprun: error: no reason is known as '{asked}'; {cure}\n"
