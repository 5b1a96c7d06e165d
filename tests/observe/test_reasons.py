"""A reason is a value: made with a kind of the one table, whose cure can be done and whose heading is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import ttprun
from ttprun.capture.records.nodes import RefusedNode
from ttprun.protocol.reason import Reason, kind_in, pointer
from ttprun.protocol.reasons import KINDS, NOT_PROTECTED, NOT_PROVED, REASONS, REFUSED, WORDS, ReasonKind

PACKAGE = Path(ttprun.__file__).parent
GUIDE = PACKAGE / "guide"
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in PACKAGE.rglob("*.py")
    if path.name != "reasons.py"
}
# Who says why not.
SAYERS = {"give_up_protection", "note_hindrance", "report_mismatch", "RankUnprotected", "RankHindered"}
SAYERS |= {"take_lower_rung"}
CUTS = {"search", "match", "fullmatch", "split", "findall", "sub", "startswith", "partition", "rpartition", "endswith"}
OURS = {"reason", "why", "why_not", "cause", "sentence"}
# What is looked for here was written by others: the script's exception, torch, argparse; or is the script's variable.
BY_OTHERS = {
    "agent/base/ground.py",
    "agent/lead/incidents.py",
    "cli/run.py",
    "protocol/rank_events.py",
    "recovery/on_loss.py",
}


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """(file, name of what is called, the call) of all calls in the package."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield name, ast.unparse(node.func).rpartition(".")[2], node


def name_of(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_each_reason_is_made_with_a_kind_of_the_table() -> None:
    given = [
        call.args[0].value
        for _, called, call in calls()
        if called == "Reason" and call.args and isinstance(call.args[0], ast.Constant)
    ]

    assert len(given) > 100
    assert set(given) <= set(KINDS)


def test_each_kind_of_the_table_is_given_somewhere() -> None:
    strings = {
        node.value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }

    assert set(KINDS) - strings == set()


def test_nobody_says_why_not_by_a_sentence_alone() -> None:
    sentences = [
        f"{name}:{call.lineno}"
        for name, called, call in calls()
        if called in SAYERS
        and any(
            isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))
            for value in (*call.args, *(keyword.value for keyword in call.keywords))
        )
    ]

    assert sentences == []


def test_no_expression_looks_for_words_of_our_own_in_a_reason() -> None:
    found = {
        name
        for name, called, call in calls()
        if called in CUTS
        and isinstance(call.func, ast.Attribute)
        and any(name_of(part) in OURS for part in (call.func.value, *call.args))
    }

    assert found <= BY_OTHERS
    assert {field.name for field in fields(ReasonKind)} == {"word", "kind", "means", "cure", "where", "then"}


def test_a_kind_is_a_name_of_one_row_and_of_one_of_three_words() -> None:
    assert len(KINDS) == len(REASONS)
    assert all(re.fullmatch("[a-z]+(-[a-z]+)*", kind) for kind in KINDS)
    assert {row.word for row in REASONS} == set(WORDS) == {NOT_PROTECTED, NOT_PROVED, REFUSED}
    assert all(row.cure and row.means.endswith(".") and "\n" not in row.cure for row in REASONS)


def test_the_headings_and_pages_that_are_named_are_there() -> None:
    missing = []
    for row in REASONS:
        topic, _, heading = row.where.partition("#")
        if not re.search(rf"^#+ {re.escape(heading)}$", (GUIDE / f"{topic}.md").read_text(), re.MULTILINE):
            missing.append(row.where)
    named = [pair for row in REASONS for pair in re.findall(r"'([^']+)' in 'ttprun guide (\w+)'", row.cure)]

    assert missing == []
    assert named
    assert all(f"\n## {section}" in (GUIDE / f"{page}.md").read_text() for section, page in named)


def test_a_reason_in_a_longer_sentence_keeps_its_kind_and_what_was_said_first() -> None:
    reason = Reason("other-batch", "a DataLoader has yielded another batch")

    longer = reason.within(f"rank 1 is refused ({reason})").within("rank 1 was killed; not replaced: see above")

    assert (longer.kind, longer.first) == (reason.kind, reason.text)
    assert reason.with_cure().text == f"{reason}; what helps: {reason.cure}"
    assert reason.with_cure().with_cure() == reason.with_cure()  # said once
    assert reason.cure == KINDS["other-batch"].cure


def test_a_cause_without_a_kind_is_explained_nowhere() -> None:
    cause = Reason(text="rank 1 was killed (SIGKILL) in step 15")

    assert (cause.pointer, cause.cure, cause.with_cure()) == ("", "", cause)
    assert cause
    assert not Reason()


def test_a_printed_line_names_its_kind() -> None:
    assert kind_in(f"not protected: too much{pointer('journal-full')}. If a rank is lost, ...") == "journal-full"
    assert kind_in("rank 1 was killed (SIGKILL) in step 15") == pointer("") == ""


@pytest.mark.parametrize(
    ("node", "kind"),
    [(RefusedNode("is on a device"), "value-not-recorded"), (RefusedNode("is a tuple", "container-too-long"), None)],
)
def test_what_cannot_be_recorded_is_named_with_what_helps(node: RefusedNode, kind: str | None) -> None:
    reason = node.reason("main: lines")

    assert reason.kind == (kind or node.about)
    assert reason.text == f"main: lines cannot be recorded: it {node.why}; {reason.cure}"
