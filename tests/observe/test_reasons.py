"""Each reason that a user may read has a row of the table, whose cure can be done and whose heading is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ttprun
from ttprun.protocol import reasons
from ttprun.protocol.reason import NOT_PROTECTED, NOT_PROVED, REFUSED, WORDS
from ttprun.protocol.reasons import (
    KINDS,
    REASONS,
    cure_of,
    kind_of,
    not_recorded,
    says_cure,
    split_cure,
    with_cure,
)

PACKAGE = Path(ttprun.__file__).parent
GUIDE = PACKAGE / "guide"
# Who says why not, and how a function is called that returns such a sentence.
SAYERS = {"give_up_protection", "note_hindrance", "report_mismatch", "refuse", "note_not_proved", "_note_not_proved"}
MESSAGES = {"Unprotected", "Hindered", "Mismatch", "MismatchFound", "CannotRestoreError", "NotRepairableError"}
WHY = re.compile(r"_?(why|difference)_|_?(why|look|unlike|find_difference)$")
RANKS = ("capture", "groups", "tensors", "rank", "elastic_resume", "introspect")
PLACES = (*RANKS, "agent", "recovery")
# Reasons for something else: why a standby is not prepared, a call is asked again, a snapshot or scheduler must wait.
OTHERS = {
    "capture/effects/effects.py",
    "capture/position/user_code.py",
    "capture/values/process_objects.py",
    "rank/bootstrap/preload.py",
    "rank/bootstrap/rerun.py",
    "rank/framework/callback_recovery.py",
    "agent/lead/schedulers.py",
    "recovery/planned.py",
    "recovery/resize.py",
}
# What another text holds, or goes on.
FRAGMENTS = {
    "X (of a group)",
    "X is no message of a rank",
    "X is a frozenset with X",
    "X is a set with X",
    "a comprehension",
    "a generator expression that a call consumes",
    "is the generator X, X",
    "the DataLoader of X: X",
    "the job is X",
    "while it X: X",
}


def text_of(node: ast.AST) -> str:
    """A str, with a letter in the place of what is put into it; "" of something else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "X" for part in node.values)
    return ""


def texts_of(node: ast.AST, inside: ast.AST, constants: dict[str, ast.AST]) -> Iterator[str]:
    """The sentences that an expression may be, those of names that are set in the same function or at the top too."""
    if text := text_of(node):
        yield text
    elif isinstance(node, ast.Name):
        for one in ast.walk(inside):
            if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id == node.id for to in one.targets):
                yield from texts_of(one.value, ast.Pass(), constants)
        if node.id in constants:
            yield from texts_of(constants[node.id], ast.Pass(), {})
    elif isinstance(node, ast.IfExp):
        yield from texts_of(node.body, inside, constants)
        yield from texts_of(node.orelse, inside, constants)


def sentences() -> Iterator[tuple[str, str]]:
    """(file and line, a sentence that is said there or returned), wherever a user may meet it."""
    for place in PLACES:
        for path in sorted((PACKAGE / place).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            constants = {
                node.targets[0].id: node.value
                for node in tree.body
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for function in ast.walk(tree):
                if not isinstance(function, ast.FunctionDef) or name in OTHERS:
                    continue
                is_why = WHY.match(function.name) and ast.unparse(function.returns or ast.Constant("")) == "str"
                for node in ast.walk(function):
                    parts: list[ast.expr] = []
                    if isinstance(node, ast.Return) and node.value is not None and is_why:
                        parts = [node.value]
                    elif isinstance(node, ast.Call):
                        called = ast.unparse(node.func).rpartition(".")[2]
                        if called in SAYERS | MESSAGES:
                            parts = [*node.args, *(one.value for one in node.keywords)]
                    for part in parts:
                        for text in texts_of(part, function, constants):
                            if len(text) >= 12:
                                yield f"{name}:{node.lineno}", text


def values() -> Iterator[str]:
    """What a value is that cannot be recorded: the sentences of `RefusedNode`."""
    for path in (PACKAGE / "capture" / "values").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("RefusedNode") and node.args:
                yield from filter(None, (text_of(node.args[0]),))


def test_each_reason_that_is_said_in_the_source_has_a_row() -> None:
    said = list(sentences())

    assert len(said) > 100
    assert [f"{where}: {text}" for where, text in said if not kind_of(text) and text not in FRAGMENTS] == []
    assert [text for text in values() if not kind_of(not_recorded("main: x", text))] == []


def test_each_row_is_of_something_that_is_said() -> None:
    strings = {
        text_of(node)
        for path in PACKAGE.rglob("*.py")
        if not path.name.startswith("reason")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr)
    } | {not_recorded("main: x", text) for text in values()}

    unused = [row.kind for row in REASONS if not any(re.search(row.found, text) for text in strings)]
    assert set(unused) <= {"hidden-state", "iterator-read-by-next"}


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


@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        ("no other rank holds what rank 1 held: up.weight", "state-of-one-rank", "--buddy"),
        ("no other rank holds what rank 1 held: up.weight", "state-of-one-rank", "--snapshot-every 10steps"),
        (
            "the replay is not at the place of boundary 12: a DataLoader has yielded another batch",
            "other-batch",
            "let dataset and",
        ),
        (
            "main: net is a Net in the lost rank, and the replacement has nothing",
            "other-variable",
            "let the set-up make it before",
        ),
        ("a loop around the optimizer step is not followed", "loop-not-followed", "user_paths"),
        ("the journal of one step has reached journal_limit_mib", "journal-full", "raise journal_limit_mib"),
    ],
)
def test_what_helps_is_of_the_reason(reason: str, kind: str, words: str) -> None:
    assert kind_of(reason) == kind
    assert words in cure_of(reason)
    assert split_cure(with_cure(reason)) == (reason, cure_of(reason))


def test_what_helps_is_said_once() -> None:
    reason = "main: lines cannot be recorded: it is read by next(): read it by a `for` loop"

    assert says_cure(reason)
    assert with_cure(reason) == reason
    assert with_cure(with_cure("another batch")) == with_cure("another batch")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank 1 was killed (SIGKILL) after step 15",
        "rank 1 raised ValueError: no such file",
        "rank 2 hangs: it has not come to the collective",
        "on",
        "all ranks start again from the top of the script, and what it has not saved itself is lost",
        "all ranks go back to the snapshot of step 8, and the steps since then are lost",
        "the job ends, and what the script has not saved itself is lost (with --max-restarts N all ranks would start "
        "again from its top)",
    ],
)
def test_what_is_no_reason_has_no_kind(text: str) -> None:
    assert kind_of(text) == reasons.pointer(text) == ""
