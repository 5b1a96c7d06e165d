"""Our own command line options: one for each key of `Config`, made from the model itself; no torch."""

from __future__ import annotations

import json
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_origin

import typer
import yaml

from ttprun.cli.control import ask_running
from ttprun.config import Config
from ttprun.config_sources import ConfigSource, option_name, ttprun_section
from ttprun.protocol.control_requests import Recall
from ttprun.yaml_files import parse_yaml

if TYPE_CHECKING:
    from argparse import _ArgumentGroup


# `ttprun train.py --config job.yaml`: our settings may stand in the script's own file, under a top-level `ttprun:`.
#
# Whatever we cannot read, or find nothing of ours in, is the script's alone and is not spoken of.


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


# `ttprun recall`: have ranks that are away train again. Without torch.


def recall(
    run: Annotated[str | None, typer.Argument(help="Run id or run directory; default: the newest run here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for programs.")] = False,
) -> int:
    """Re-admit ranks that left the job (--mindio): they get new processes and the state of the others.

    Exit code: 0 they are being started (see 'ttprun status'), 2 no rank has left, or none can be started now.
    """
    directory, answer = ask_running(run, Recall(), "no rank was called back")
    described = {"run": str(directory.path), "ok": True, "message": answer.message}
    print(json.dumps(described) if as_json else answer.message)
    return 0


# Keeps our values apart from torchrun's in the parsed namespace.
_DEST = "ttprun_"
_METAVARS = {
    "rungs": "METHOD,...",
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
_REPEATABLE = ("faults", "retry_on", "follow")
# Title of a group in the help -> its keys, in the order in which they are shown.
GROUPS = {
    "basic options": "run_dir run_id keep_runs keep_runs_days keep_runs_gib log_format follow mindio allow_faults "
    "faults",
    "recovery": "standbys rungs retry_on exception_retries max_incidents_per_hour "
    "hang_timeout_s verify_every overhead_budget proof on_nan "
    "freeze_timeout_s replay_timeout_s transfer_timeout_s resume_timeout_s commit_timeout_s pause_timeout_s "
    "record_limit_mib journal_limit_mib",
    "checkpoints, snapshots and mirrors": "save_dir resume resume_hyperparameters keep_checkpoints persist_timeout_s "
    "grace_s snapshot_every buddy buddy_memory",
    "several nodes": "elastic node_wait_s discovery",
    "page and notifications": "http http_token_file on_event on_event_kinds",
}


# What may be asked of a command line in place of a run.
FLAGS = {
    "print_config": "print every setting with its value and where it comes from, as a YAML file, and start nothing",
    "dry_run": "check this command line and this machine, say what would be started, and start nothing",
}


def add_options(parser: ArgumentParser) -> None:
    """Add `--config` and an option for each key, in groups. None has a default: the namespace holds what was given.

    `user_paths` and mappings have no option: they belong in a file.
    """
    for number, (title, keys) in enumerate(GROUPS.items()):
        group = parser.add_argument_group(title)
        if number == 0:
            group.add_argument(
                "--config",
                dest=_DEST + "config",
                metavar="FILE",
                action="append",
                default=[],
                help="YAML file of settings, or a preset (default, debug, torchrun); may be repeated, the last wins",
            )
        for key in keys.split():
            _add_option(group, key)
        if number == 0:
            for name, text in FLAGS.items():
                group.add_argument(
                    option_name(name), dest=_DEST + name, action="store_true", default=SUPPRESS, help=text
                )


def _add_option(group: _ArgumentGroup, key: str) -> None:
    field = Config.model_fields[key]
    dest, name, text = _DEST + key, option_name(key), help_of(key)
    if field.annotation is bool:
        group.add_argument(name, dest=dest, action=BooleanOptionalAction, default=SUPPRESS, help=text)
    elif key in _REPEATABLE:
        group.add_argument(name, dest=dest, action="append", default=SUPPRESS, metavar=metavar(key), help=text)
    else:
        # The str is checked by the model, as that of a variable is.
        word = _word if get_origin(field.annotation) is Literal else str
        group.add_argument(name, dest=dest, default=SUPPRESS, metavar=metavar(key), help=text, type=word)


def help_of(key: str) -> str:
    """What the help says of an option: its meaning and its default; percent signs are doubled, as argparse needs."""
    field = Config.model_fields[key]
    text, default = field.description or "", field.get_default(call_default_factory=True)
    if key in _REPEATABLE:
        text += "; may be repeated"
    elif default is not None:  # a description names a default that is worked out, or says that there is none
        text += f" (default: {_as_on_a_line(default)})"
    return text.replace("%", "%%")


def _as_on_a_line(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


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
    given = {name.removeprefix(_DEST): value for name, value in values.items()}
    return files, {key: value for key, value in given.items() if key not in FLAGS}


def asked_instead(arguments: Namespace) -> tuple[str, ...]:
    """Which of FLAGS a parsed namespace has; ask before `take_options`."""
    return tuple(name for name in FLAGS if hasattr(arguments, _DEST + name))
