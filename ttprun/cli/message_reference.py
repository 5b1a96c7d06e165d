"""The messages of the protocol as Markdown, generated from their classes."""

from __future__ import annotations

import inspect
from typing import get_args

from msgspec.structs import fields as fields_of

from ttprun.protocol.channel import Report


def message_reference() -> str:
    """A list of what a rank reports to the agent: each message with its fields and the first line of its docstring."""
    return "\n".join(map(_item, get_args(Report)))


def _item(kind: type) -> str:
    names = [field.name for field in fields_of(kind)]
    fields = f" ({', '.join(names)})" if names else ""
    return f"* `{kind.__name__}`{fields}: {(inspect.getdoc(kind) or '').partition(chr(10))[0]}"
