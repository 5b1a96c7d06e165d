"""`ttprun train.py --config job.yaml`: our settings may stand in the script's own file, under a top-level `ttprun:`.

Whatever we cannot read, or find nothing of ours in, is the script's alone and is not spoken of.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from ttprun.config_sources import ConfigSource, ttprun_section
from ttprun.yaml_files import parse_yaml


def take_script_config(arguments: list[str]) -> tuple[list[ConfigSource], list[str]]:
    """Look for `--config FILE` and `--config=FILE` among the script's arguments.

    returns  (our sections, in order; the script's arguments, less those whose file holds nothing but our section)
    """
    sections: list[ConfigSource] = []
    kept: list[str] = []
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            break
        words = [word]
        file: str | None = None
        if word == "--config" and at + 1 < len(arguments):
            file = arguments[at + 1]
            words.append(file)
        elif word.startswith("--config="):
            file = word.removeprefix("--config=")
        at += len(words)
        content = _read(file) if file is not None else None
        section = ttprun_section(content)
        if file is not None and section is not None:
            sections.append(ConfigSource("file", file, {str(key): value for key, value in section.items()}))
        is_ours_alone = section is not None and content == {"ttprun": section}
        if not is_ours_alone:
            kept += words
    return sections, kept + arguments[at:]


def _read(file: str) -> object:
    """The parsed file, None if it is not for us. Only a regular file is opened: reading a pipe would take it away."""
    path = Path(file)
    try:
        return parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
