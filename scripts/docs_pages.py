"""Write the handbook as a project for mkdocs: `python scripts/docs_pages.py FOLDER`; scripts/docs.sh builds it.

The pages are those of `ttprun guide`, with what is generated in its place, and README.md as the first one. A mention of
`ttprun guide TOPIC` becomes a link. What the site does not have (files of the repository) is named, not linked: the
address of the repository is not known here.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path

import yaml

from ttprun.cli.guide import TOPICS, read_page

REPOSITORY = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)")
MENTION = re.compile(r"(?<!\[)`ttprun guide ([a-z-]+)`")
NAV = {
    "Use": [
        "check",
        "compare",
        "migrate",
        "frameworks",
        "operating",
        "checkpoints",
        "monitoring",
        "fault-drills",
        "configuration",
    ],
    "What to expect": ["support", "limits", "how-it-works", "devices", "mindio"],
    "Help": ["troubleshoot", "glossary"],
    "Develop": ["extending", "architecture", "protocol", "contributing"],
}


def main(folder: Path) -> int:
    """Write mkdocs.yml and its pages below `folder`."""
    pages = folder / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    (pages / "index.md").write_text(linked((REPOSITORY / "README.md").read_text(encoding="utf-8")), encoding="utf-8")
    for topic in TOPICS:
        (pages / f"{topic}.md").write_text(linked(read_page(topic)), encoding="utf-8")
    shutil.copytree(REPOSITORY / "docs", pages / "docs", dirs_exist_ok=True)
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings(), sort_keys=False), encoding="utf-8")
    return 0


def settings() -> dict[str, object]:
    """What mkdocs is to do. Nothing is loaded from elsewhere: no fonts, no analytics."""
    switch = {"scheme": "default", "toggle": {"icon": "material/weather-night", "name": "dark"}}
    back = {"scheme": "slate", "toggle": {"icon": "material/weather-sunny", "name": "light"}}
    nav: list[object] = ["index.md"]
    nav += [{title: [f"{topic}.md" for topic in topics]} for title, topics in NAV.items()]
    return {
        "site_name": "ttprun",
        "docs_dir": "pages",
        "site_dir": "site",
        "use_directory_urls": False,  # the site can be read as files
        "theme": {"name": "material", "font": False, "palette": [switch, back], "features": ["navigation.sections"]},
        "plugins": ["search"],
        "markdown_extensions": ["tables", "admonition", "pymdownx.superfences", {"toc": {"permalink": True}}],
        "validation": dict.fromkeys(("omitted_files", "absolute_links", "unrecognized_links", "anchors"), "warn"),
        "nav": nav,
    }


def linked(text: str) -> str:
    """A page with the links of the site, in its text and not in its blocks of code."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _linked(part) for part in parts)


def _linked(text: str) -> str:
    return MENTION.sub(r"[`ttprun guide \1`](\1.md)", LINK.sub(_target, text))


def _target(link: re.Match[str]) -> str:
    mark, words, target = link.groups()
    path, _, anchor = target.partition("#")
    page = Path(path)
    if target.startswith("https://") or (mark and path.startswith("docs/")):
        return link[0]
    if page.suffix == ".md" and page.stem in TOPICS:
        return f"[{words}]({page.name}{'#' * bool(anchor)}{anchor})"
    return f"`{path.replace('../', '')}`" if words.strip("`") != path.replace("../", "") else f"`{words.strip('`')}`"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="written anew")
    sys.exit(main(parser.parse_args().folder))
