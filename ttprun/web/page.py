"""The page, put together from the files in `page/`: one document that asks for nothing else but data.

The report of a run is the same document with the data inside. Begin with `live`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from ttprun.web.summary import REASONS

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("parts.js", "ranks.js", "charts.js", "incidents.js", "facts.js", "main.js")


@cache
def live() -> str:
    """The page that follows a run."""
    return _document("null")


def report(data: dict[str, Any]) -> str:
    """The page of a run with all that it shows inside: it can be read without a server, and sent to others.

    data   as the messages of `app.stream` have it: status, summary, topology, history, events; settings; note
    """
    return _document(json.dumps(data).replace("<", "\\u003c"))


@cache
def policy() -> str:
    """The content security policy under which the page works: its own script and styles, data from where it comes."""
    return (
        f"default-src 'none'; script-src '{_digest(_script())}'; style-src '{_digest(_style())}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _document(data: str) -> str:
    text = (_FOLDER / "page.html").read_text(encoding="utf-8")
    text = text.replace("/* styles */", _style()).replace("/* scripts */", _script())
    return text.replace("<!-- data -->", f'<script type="application/json" id="data">{data}</script>')


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _style() -> str:
    return (_FOLDER / "page.css").read_text(encoding="utf-8")


@cache
def _script() -> str:
    words = f'"use strict";\nconst REASONS = {json.dumps(REASONS)};'  # as the report of a run has them, too
    return "\n".join([words, *((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)])
