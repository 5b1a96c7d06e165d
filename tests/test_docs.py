"""The site that scripts/docs.sh builds of the guide, as far as it can be checked without mkdocs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from scripts.docs_pages import main
from ttprun.cli.guide import TOPICS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    main(folder)
    return folder


def test_every_topic_is_in_the_navigation_once(site: Path) -> None:
    nav = yaml.safe_load((site / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    listed = [page for group in nav if isinstance(group, dict) for pages in group.values() for page in pages]
    assert sorted(listed) == sorted(f"{topic}.md" for topic in TOPICS)


def test_every_link_of_the_site_leads_to_one_of_its_files(site: Path) -> None:
    pages = list((site / "pages").glob("*.md"))
    links = {link for page in pages for link in re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))}

    local = {link for link in links if not link.startswith("https://")}
    assert len(pages) == len(TOPICS) + 1
    assert {link for link in local if not (site / "pages" / link).exists()} == set()
    assert {"glossary.md", "limits.md"} <= local


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    settings = yaml.safe_load((site / "mkdocs.yml").read_text(encoding="utf-8"))

    assert settings["theme"]["font"] is False
    assert settings.keys().isdisjoint({"extra", "extra_javascript", "extra_css"})
