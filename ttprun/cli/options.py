"""Our own command line options: one for each key of `Config`, made from the model itself; no torch."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from typing import Literal, get_args, get_origin

from ttprun.config import Config
from ttprun.config_sources import FILE_ONLY, option_name

# Keeps our values apart from torchrun's in the parsed namespace.
_DEST = "ttprun_"
_METAVARS = {
    "rungs": "RUNG,...",
    "snapshot_every": "INTERVAL",
    "buddy_memory": "SIZE",
    "resume": "WHICH",
    "faults": "FAULT",
    "retry_on": "PATTERN",
    "follow": "MODULE",
    "discovery": "COMMAND",
    "on_event": "COMMAND",
    "on_event_kinds": "KIND,...",
    "http": "[HOST]:PORT",
}


def add_options(parser: ArgumentParser) -> None:
    """Add `--config` and an option for each key; none has a default, so the namespace holds only what was given.

    `user_paths` and mappings have no option: they belong in a file.
    """
    group = parser.add_argument_group("ttprun's own options")
    group.add_argument(
        "--config",
        dest=_DEST + "config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file of settings, or a preset (default, debug, torchrun); may be repeated, the last one wins",
    )
    for key, field in Config.model_fields.items():
        dest, name, text = _DEST + key, option_name(key), field.description
        if field.annotation is bool:
            group.add_argument(name, dest=dest, action=BooleanOptionalAction, default=SUPPRESS, help=text)
        elif key in ("faults", "retry_on", "follow"):
            group.add_argument(name, dest=dest, action="append", default=SUPPRESS, metavar=metavar(key), help=text)
        elif key not in ("user_paths", *FILE_ONLY):
            # The str is checked by the model, as that of a variable is.
            word = _word if get_origin(field.annotation) is Literal else str
            group.add_argument(name, dest=dest, default=SUPPRESS, metavar=metavar(key), help=text, type=word)


def _word(value: str) -> str:
    """The value of an option that takes one of some words; without one, the script is taken for it."""
    if value.endswith(".py"):
        raise ArgumentTypeError(f"'{value}' is a script, and the option needs a value before it")
    return value


def metavar(key: str) -> str:
    """The placeholder for the value in the help: its permitted words, a name, its unit, or N."""
    annotation = Config.model_fields[key].annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if annotation in (int, int | None) and not key.endswith("_mib"):
        return "N"
    return _METAVARS.get(key) or key.rsplit("_", 1)[-1].upper()


def take_options(arguments: Namespace) -> tuple[list[str], dict[str, object]]:
    """Remove our options from a parsed namespace; returns (files of --config, key -> value as given)."""
    values = {name: value for name, value in vars(arguments).items() if name.startswith(_DEST)}
    for name in values:
        delattr(arguments, name)
    files: list[str] = values.pop(_DEST + "config")
    return files, {name.removeprefix(_DEST): value for name, value in values.items()}
