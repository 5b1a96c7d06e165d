"""The reference of the configuration as Markdown, generated from the model and from the commented preset `default`."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from ttprun.cli.options import metavar
from ttprun.config import Config
from ttprun.config_sources import FILE_ONLY, VARIABLE_PREFIX, option_name, preset


def config_reference() -> str:
    """A list of every key, then the preset `default` with its explanations."""
    keys = [_item(key, field) for key, field in Config.model_fields.items()]
    explained = preset("default").read_text(encoding="utf-8").rstrip("\n")
    return "\n".join([*keys, "", "## The same as a commented file", "", "```yaml", explained, "```"])


def _item(key: str, field: FieldInfo) -> str:
    """One key with its default, its option and its variable, and what it means."""
    spellings = [f"`{key}: {_as_yaml(field.get_default(call_default_factory=True))}`"]
    if key not in ("user_paths", *FILE_ONLY):
        name = option_name(key)
        option = f"[no-]{name[2:]}" if field.annotation is bool else f"{name[2:]} {metavar(key)}"
        spellings.append(f"`--{option}`")
    if key not in FILE_ONLY:
        spellings.append(f"`{VARIABLE_PREFIX}{key.upper()}`")
    return f"* {', '.join(spellings)}: {field.description}"


def _as_yaml(value: object) -> str:
    """A default as a YAML file has it."""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
