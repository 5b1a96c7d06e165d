"""The README and the papers beside it: short, and everything that they name is there."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from ttprun import __version__
from ttprun.cli.guide import TOPICS
from ttprun.cli.main import COMMANDS

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^]]+)\]\(([^)\s]+)\)")


def test_it_is_one_or_two_screens() -> None:
    assert README.count("\n") <= 120
    assert max(map(len, README.splitlines())) <= 160


def test_the_bars_are_as_long_as_the_table_says() -> None:
    seconds = {float(one) for one in re.findall(r"([\d.]+) s\b", README[README.index("| SIGKILL to next step") :])}

    for name in ("bars-light.svg", "bars-dark.svg"):
        bars = re.findall(r">([\d.]+) s<", (REPOSITORY / "docs" / name).read_text())
        assert (len(bars), {*map(float, bars)} <= seconds) == (6, True)


def test_the_two_commands_are_there_and_can_be_run() -> None:
    block = README[README.index("```bash\n./scripts") :].split("```")[1]

    commands = re.findall(r"^(\./scripts/\w+\.sh) ", block, re.MULTILINE)

    assert commands == ["./scripts/demo.sh", "./scripts/test.sh"]
    assert all(os.access(REPOSITORY / command, os.X_OK) for command in commands)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_topics_and_commands_are_there(name: str) -> None:
    text = (REPOSITORY / name).read_text(encoding="utf-8")

    links = [link for _, link in LINK.findall(text) if not link.startswith("https://")]
    topics = re.findall(r"`ttprun guide ([a-z-]+)`", text)
    commands = re.findall(r"^ttprun ([a-z][a-z-]*)", text, re.MULTILINE)

    assert [link for link in links if not (REPOSITORY / link).exists()] == []
    assert set(topics) <= set(TOPICS)
    assert set(commands) <= set(COMMANDS)


def test_the_template_of_an_issue_asks_for_what_the_commands_print() -> None:
    template = (REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")

    assert all("label" in one["attributes"] for one in yaml.safe_load(template)["body"] if one["type"] != "markdown")
    assert set(re.findall(r"`ttprun ([a-z]+)", template)) <= set(COMMANDS)


def test_no_address_is_contacted_by_ttprun_itself() -> None:
    clients = r"^\s*(?:import|from) (?:urllib\.request|http\.client|requests|httpx|aiohttp|smtplib|ftplib)\b"

    found = [
        path for path in (REPOSITORY / "ttprun").rglob("*.py") if re.search(clients, path.read_text(), re.MULTILINE)
    ]
    assert found == []


def test_every_topic_of_the_guide_is_linked() -> None:
    assert {f"ttprun/guide/{topic}.md" for topic in TOPICS} <= {link for _, link in LINK.findall(README)}


def test_the_package_says_what_it_is() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    assert (project["version"], project["license"]) == (__version__, "Apache-2.0")
    assert f"## [{__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert (REPOSITORY / "LICENSE").read_text().lstrip().startswith("Apache License")
    assert (REPOSITORY / "ttprun" / "py.typed").exists()
