"""`ttprun guide`, `ttprun --version` and completion by the shell."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from ttprun import __version__
from ttprun.cli.guide import DEFINED, FOLDER, TOPICS, read_page
from ttprun.cli.main import main
from ttprun.config import Config, RungName
from ttprun.protocol.channel import Report
from ttprun.protocol.reasons import REASONS

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "ttprun"]


def test_every_topic_has_a_page_and_every_page_a_topic() -> None:
    assert {page.stem for page in FOLDER.iterdir()} == set(TOPICS)


@pytest.mark.parametrize("topic", TOPICS)
def test_in_a_pipe_a_topic_is_its_own_text_without_control_codes(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["guide", topic])

    text = capsys.readouterr().out
    assert code == 0
    assert text.startswith("# ")
    assert "\x1b" not in text
    assert "<!--" not in text


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_names_is_there_and_its_lines_are_short(page: Path) -> None:
    text = page.read_text(encoding="utf-8")

    paths = re.findall(r"`((?:ttprun|tests|scripts|configs)/[\w./-]+)`", text)
    files = re.findall(r"`([\w/]+\.py)`", text) if page.stem == "architecture" else []
    links = re.findall(r"\]\(([^)]+)\)", text)
    topics = re.findall(r"ttprun guide ([a-z-]+)", text)

    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    assert [file for file in files if not any(FOLDER.parent.rglob(file)) and not (REPOSITORY / file).exists()] == []
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert set(topics) <= set(TOPICS)
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 120  # a row cannot be broken


def texts_in_the_source() -> set[str]:
    """Each str of the package, those of f-strings and of formats piece by piece, with single spaces."""
    found = set()
    for path in FOLDER.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.split(r"%(?:\.\d+)?[sdgf]", node.value))
    return found


def test_each_message_of_the_page_on_troubles_is_one_of_the_source() -> None:
    text = " ".join((FOLDER / "troubleshoot.md").read_text(encoding="utf-8").split())
    messages = re.findall(r"\*\*`([^`]+)`\*\*:", text)
    source = "\n".join(texts_in_the_source())

    parts = {part for message in messages for part in message.split("...") if len(part.strip()) >= 5}
    assert len(messages) > 30
    assert {part for part in parts if part.strip() not in source} == set()


def test_the_glossary_is_sorted_and_defines_what_the_others_use() -> None:
    words = re.findall(r"^\* \*\*([^*]+)\*\*: ", (FOLDER / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert words == sorted(words, key=str.lower)
    assert {"boundary N", "rung", "generation", "standby", "replay", "rewind", "mirror", "mindio", "journal"} <= set(
        words
    )
    assert set(get_args(RungName)) - {"reconnect", "persist"} <= set(words)


@pytest.mark.parametrize("topic", sorted(set(TOPICS) - {"glossary"}))
def test_a_page_that_uses_a_word_of_ours_names_the_glossary_at_its_head(topic: str) -> None:
    head, _, body = read_page(topic).partition("\n\n")[2].partition("\n\n")

    used = [word for word in DEFINED if re.search(rf"\b{word}", body)]
    assert ("ttprun guide glossary" in head) >= bool(used)
    assert all(word in head for word in used if head.startswith("*Words"))


def test_without_a_topic_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["guide"])

    listed = capsys.readouterr().out
    assert code == 0
    assert [line.split()[0] for line in listed.splitlines()[1:]] == list(TOPICS)


def test_an_unknown_topic_is_one_line_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    codes = main(["guide", "checkpoint"]), main(["guide", "xyz"])

    assert codes == (2, 2)
    assert capsys.readouterr().err.splitlines() == [
        "ttprun: error: the guide has no topic 'checkpoint'; did you mean 'checkpoints'?",
        "ttprun: error: the guide has no topic 'xyz'; 'ttprun guide' lists them",
    ]


def test_the_reference_names_every_key_with_its_default_option_and_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["guide", "configuration"])

    text = capsys.readouterr().out
    assert re.findall(r"^\* `(\w+): ", text, re.MULTILINE) == list(Config.model_fields)
    assert "* `standbys: 1`, `--standbys N`, `TTPRUN_STANDBYS`: " in text
    assert "* `allow_faults: false`, `--[no-]allow-faults`, `TTPRUN_ALLOW_FAULTS`: " in text
    assert "* `launch: {}`: " in text
    assert (REPOSITORY / "configs" / "default.yaml").read_text(encoding="utf-8") in text


def test_on_a_terminal_a_topic_goes_through_the_pager(tmp_path: Path) -> None:
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {tmp_path}/shown\n")
    pager.chmod(0o755)
    master, slave = pty.openpty()

    environment = os.environ | {"PAGER": str(pager), "TERM": "xterm"}
    done = subprocess.run([*COMMAND, "guide", "limits"], stdin=slave, stdout=slave, env=environment, check=False)
    os.close(slave)
    os.close(master)

    shown = (tmp_path / "shown").read_text()
    assert done.returncode == 0
    assert "\x1b[1m" in shown
    assert "Not covered" in shown


def test_a_reader_that_stops_early_gets_no_traceback() -> None:
    command = f"{sys.executable} -m ttprun guide configuration | head -n 1"

    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr) == ("# Configuration\n", "")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ttprun {__version__}\n"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("ttprun st", ["status", "stacks"]),
        ("ttprun --np", ["--nproc-per-node"]),
        ("ttprun --standbys", ["--standbys"]),
        ("ttprun run --rdzv-b", ["--rdzv-backend"]),
        ("ttprun checkpoints ver", ["verify"]),
        ("ttprun guide --h", ["--help"]),
        ("ttprun --standbys 2 tra", []),  # the shell then offers files
    ],
)
def test_a_shell_that_asks_is_answered_without_torch(line: str, answer: list[str]) -> None:
    program = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
        "from ttprun.cli.main import main; main([])"
    )
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_TTPRUN_COMPLETE": "complete_bash"}

    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True, check=False
    )

    assert done.stdout.split() == answer
    assert done.stderr == "False\n"


def test_completion_is_installed_for_a_shell(tmp_path: Path) -> None:
    # A test may have no shell among its ancestors, which is where typer looks for one.
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}

    done = subprocess.run(
        [*COMMAND, "--install-completion", "bash"], env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "_TTPRUN_COMPLETE=complete_bash" in (tmp_path / ".bash_completions" / "ttprun.sh").read_text()
    assert ".bash_completions/ttprun.sh" in (tmp_path / ".bashrc").read_text()


def test_the_page_on_troubles_lists_every_reason(capsys: pytest.CaptureFixture[str]) -> None:
    main(["guide", "troubleshoot"])

    said = capsys.readouterr().out
    assert re.findall(r"^\* `([a-z-]+)` \(", said, re.MULTILINE) == [row.kind for row in REASONS]


def test_the_protocol_lists_every_report_of_a_rank_with_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    main(["guide", "protocol"])

    text = capsys.readouterr().out
    assert re.findall(r"^\* `(\w+)`", text, re.MULTILINE) == [kind.__name__ for kind in get_args(Report)]
    assert "* `RankProtected`: All hooks are installed." in text
    assert "* `RankUnprotected` (reason): From now on this rank" in text
