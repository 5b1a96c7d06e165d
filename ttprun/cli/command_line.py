"""The command line of a run: torchrun's options, ours, those of our files and of the script's own; and what it runs.

Ours are made from the model of `Config`. torch is imported only to parse, not for the help. Begin with `build_parser`.
"""

from __future__ import annotations

import os
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

import yaml

from ttprun.config import Config
from ttprun.config_sources import GONE, ConfigSource, option_name, parse_yaml, ttprun_section
from ttprun.errors import Complaints, ConfigError, one_line, suggestion

if TYPE_CHECKING:
    from argparse import _ArgumentGroup
import ast
import importlib.util
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder

from ttprun import frameworks
from ttprun.introspect.ownership import is_installed

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


# Keeps our values apart from torchrun's in the parsed namespace.
_DEST = "ttprun_"
_METAVARS = {
    "rungs": "METHOD,...",
    "snapshot_every": "INTERVAL",
    "buddy_memory": "SIZE",
    "resume": "WHICH",
    "trace": "FILE",
    "faults": "FAULT",
    "retry_on": "PATTERN",
    "follow": "MODULE",
    "discovery": "COMMAND",
    "on_event": "COMMAND",
    "on_event_kinds": "KIND,...",
    "move_on": "RULE,...",
    "http": "[HOST]:PORT",
}
_REPEATABLE = ("faults", "retry_on", "follow")
# Title of a group in the help -> its keys, in the order in which they are shown.
GROUPS = {
    "basic options": "run_dir run_id keep_runs keep_runs_days keep_runs_gib log_format follow mindio allow_faults "
    "faults trace keep_steps keep_steps_mib",
    "recovery": "standbys standby_context rungs retry_on exception_retries max_incidents_per_hour "
    "hang_timeout_s verify_every verify_steps overhead_budget proof on_nan "
    "freeze_timeout_s replay_timeout_s transfer_timeout_s resume_timeout_s commit_timeout_s pause_timeout_s "
    "record_limit_mib journal_limit_mib",
    "checkpoints, snapshots and mirrors": "save_dir resume resume_hyperparameters keep_checkpoints persist_timeout_s "
    "grace_s snapshot_every buddy buddy_memory",
    "several nodes": "elastic node_wait_s discovery move_on",
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


# torchrun's own argument parser with our options added, and torchrun's options from the `launch` key of our files.
#
# The rule: whatever torchrun's parser understands, it decides. Our options, and their abbreviations, come after.


SCRIPT = ("training_script", "training_script_args")


class RunParser(ArgumentParser):
    """torchrun's parser as parent. Errors are ConfigErrors; abbreviations are torchrun's first, then ours."""

    def __init__(self, torchrun: ArgumentParser) -> None:
        super().__init__(
            "ttprun run",
            usage="ttprun [run] [options] script.py [script args]",
            description="Run a script on all ranks, as torchrun does, and replace a rank that dies.",
            parents=[torchrun],
            add_help=False,  # the parent has it
        )
        self._torchrun = torchrun
        self._optionals.title = "torchrun's options"
        self._is_value = self._is_after_script = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Namespace, list[str]]:  # type: ignore[override]
        """As ever; the words are looked at from the first one on."""
        self._is_value = self._is_after_script = False
        return super().parse_known_args(args, namespace)

    def _parse_optional(self, arg_string: str) -> Any:
        """What argparse asks of each word in turn: which option it is, None if it is none.

        A private method of argparse, but the only place to say that what follows the script is the script's: argparse
        would call `train.py --n 800` ambiguous.
        """
        if self._is_after_script:
            return None
        parsed: Any = super()._parse_optional(arg_string)
        if parsed is None:
            self._is_after_script, self._is_value = not self._is_value, False
            return None
        action, *_, value = parsed[0] if isinstance(parsed, list) else parsed  # a list since Python 3.12.3
        self._is_value = action is not None and action.nargs is None and value is None
        return parsed

    def _get_option_tuples(self, option_string: str) -> list[tuple[Action, str, str | None]]:
        """What argparse asks when an option is not spelt out: all options that it may abbreviate.

        A private method of argparse, but the only place to say that `--re` is torchrun's `--redirects` although we
        have `--resume`. A test holds every prefix against torchrun's parser.
        """
        theirs = self._torchrun._get_option_tuples(option_string)
        if theirs:
            return theirs
        name, equals, value = option_string.partition("=")
        return super()._get_option_tuples(name.replace("_", "-") + equals + value)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(" ".join(message.split()), "see 'ttprun run --help'")


def build_parser() -> RunParser:
    """The parser of the run command. Raises ConfigError if a PET_* variable cannot be read."""
    from torch.distributed.run import get_args_parser

    try:
        torchrun = get_args_parser()
    except ValueError as error:  # a flag such as PET_STANDALONE must be a number
        raise ConfigError(f"a PET_* variable is not a number ({one_line(error)})", "set flags to 0 or 1") from None
    parser = RunParser(torchrun)
    add_options(parser)
    return parser


def parse(parser: RunParser, words: list[str]) -> Namespace:
    """Parse a command line. Raises ConfigError for whatever is wrong with it, with a suggestion for unknown options."""
    arguments, unknown = parser.parse_known_args(words)
    wrong = Complaints()
    options = [option_name(key) for key in (*torchrun_options(parser), *Config.model_fields)] if unknown else []
    for word in unknown:
        name = word.split("=")[0]
        wrong.add(
            ConfigError(
                f"unknown option {name}",
                GONE.get(name[2:].replace("-", "_")) or suggestion(name, options, "see 'ttprun run --help'"),
            )
        )
    wrong.raise_any()
    return arguments


def torchrun_options(parser: RunParser) -> dict[str, object]:
    """torchrun's options by name (underscores), with their defaults."""
    defaults = vars(parser.parse_args(["script"]))
    return {name: value for name, value in defaults.items() if name not in SCRIPT and not name.startswith("ttprun_")}


def launch_words(parser: RunParser, source: ConfigSource) -> list[str]:
    """A file's `launch` mapping as command line words, so that torchrun's own parser checks names, types and choices.

    An option with a PET_* variable is left out, since the variable is stronger. Raises ConfigError naming the file.
    """
    launch = source.values.get("launch", {})
    if not isinstance(launch, Mapping):
        return []  # which is reported with the rest of the file
    options = torchrun_options(parser)
    words = []
    wrong = Complaints()
    for name, value in launch.items():
        if not isinstance(value, bool | int | float | str | list):
            continue  # as well
        with wrong.noted():
            key = str(name).replace("-", "_")
            word = _launch_word(parser, options, f"{source.where('launch')}.{name}", key, value)
            if value is not False and "PET_" + key.upper() not in os.environ:
                words.append(word)
    wrong.raise_any()
    return words


def _launch_word(parser: RunParser, options: Mapping[str, object], where: str, name: str, value: object) -> str:
    """One option of a file's `launch` as a word. Raises ConfigError."""
    if name not in options:
        raise ConfigError(f"{where}: torchrun has no such option", suggestion(name, options, "see 'ttprun run --help'"))
    if isinstance(options[name], bool) != isinstance(value, bool):
        rule = "give true or false" if isinstance(options[name], bool) else "give a value, not true or false"
        raise ConfigError(f"{where}: {value!r} is not valid", rule)
    word = option_name(name) if isinstance(value, bool) else f"{option_name(name)}={_text(value)}"
    if value is False:
        return word
    try:
        parser.parse_args([word, "script"])
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.what}", error.cure) from None
    return word


def _text(value: object) -> str:
    """A value as torchrun's command line has it: lists with commas, a comma inside an item doubled."""
    return ",".join(str(item).replace(",", ",,") for item in value) if isinstance(value, list) else str(value)


# Programs that are installed: their package is the user's own code, though it lies where installed packages do.
#
# `-m package.train` names the package. So does a console script, as `--no-python COMMAND` runs it: its few lines import
# the function that they call. Such a command is a Python script with a `#!` line, and is run as one. Begin with
# `find_program`.


# What pip and others write where the interpreter's path is too long for a `#!` line.
_BY_SHELL = re.compile(rb"#!/bin/sh\n'''exec' \"?([^\" \n]+)\"? \"\$0\" \"\$@\"\n")
_HEAD_BYTES = 4096
_EXECS = re.compile(rb"\nexec python[\d.]* (?:-u )?([^-\n][^\n]*)\Z")  # a shell script's last line
# Modules that a console script imports beside the program's own.
_OF_SCRIPTS = ("re", "sys", "os")
_NOBODYS = {"torch", "ttprun", *(name.partition(".")[0] for name in frameworks.FOLLOW)}


@dataclass(frozen=True)
class Program:
    """What a launch runs.

    script    path of the console script that `--no-python` names, "" if it is not one
    own       where the installed program's own code lies: folders, or one file; nothing if it is not installed
    why_not   why a command cannot be run as a Python script, "" if it can, or none is named
    words     of its arguments that are not the script's: those of `python -u train.py`
    """

    script: str = ""
    own: tuple[str, ...] = ()
    why_not: str = ""
    words: int = 0


def find_program(torchrun: Namespace) -> Program:
    """What the options of a launch run. Touches nothing, and imports nothing of the program's."""
    if torchrun.run_path:
        return Program()
    if torchrun.module and not torchrun.no_python:
        return Program(own=code_of(torchrun.training_script))
    if not torchrun.no_python or torchrun.module:
        return Program()
    path = shutil.which(torchrun.training_script)
    if path is None:
        return Program()
    if os.path.basename(path).startswith("python"):
        return _of_python(path, torchrun.training_script_args)
    why_not = why_no_script_of_ours(path)
    return Program(why_not=why_not) if why_not else Program(path, code_of(module_of(path)))


def _of_python(path: str, arguments: list[str]) -> Program:
    """What `--no-python python ARGUMENTS` runs: the script that they name, as without `--no-python`."""
    if not _is_this_python(path):
        return Program(why_not=f"it is another Python ({path}); install ttprun there")
    at = int(arguments[:1] == ["-u"])
    if arguments[at:] and not arguments[at].startswith("-"):
        return Program(arguments[at], words=at + 1)
    return Program(why_not="it is Python itself: leave out --no-python and python")


def for_another_interpreter(path: str) -> str:
    """The interpreter that a script names if Python cannot read it; "" if Python can, or if it names none."""
    source = Path(path).read_bytes()
    head = (source.splitlines() or [b""])[0]
    if b"python" in head or not (head.startswith(b"#!") or path.endswith(".sh")):
        return ""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return os.fsdecode(head[2:]).strip() if head.startswith(b"#!") else "a shell"
    return ""


def why_no_script_of_ours(path: str) -> str:
    """Why an executable file is not a script for this very Python, started without options; "" if it is."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    match = _BY_SHELL.match(head)
    words = [match[1]] if match else head.splitlines()[0][2:].split() if head.startswith(b"#!") else []
    if not words:
        return "it is not a Python script: its file does not begin with #! and an interpreter"
    interpreter, *options = (os.fsdecode(word) for word in words)
    if os.path.basename(interpreter) == "env" and len(options) == 1:
        interpreter, options = shutil.which(options[0]) or options[0], []
    if not os.path.basename(interpreter).startswith("python"):
        why = f"it is not a Python script, but one for {interpreter}"
        if ends := _EXECS.search(head.rstrip()):
            command = os.fsdecode(ends[1])
            why += f"; start 'ttprun {command}' instead, with what it sets before, and ranks are replaced"
        return why
    if options:
        return f"its Python is started with {' '.join(options)}"
    if not _is_this_python(interpreter):
        return f"it is a script for another Python ({interpreter}); install ttprun there"
    return ""


def _is_this_python(interpreter: str) -> bool:
    """Whether it is this one, by whatever of its names in the same folder: a virtual environment is its folder."""
    same_folder = os.path.realpath(os.path.dirname(interpreter)) == os.path.realpath(os.path.dirname(sys.executable))
    return same_folder and os.path.realpath(interpreter) == os.path.realpath(sys.executable)


def module_of(script: str) -> str:
    """The module whose function a console script calls; "" if it is a script with code of its own."""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (SyntaxError, ValueError):
        return ""
    if any(isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef) for node in ast.walk(tree)):
        return ""
    named = [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return next((name for name in named if name not in _OF_SCRIPTS), "")


def code_of(module: str) -> tuple[str, ...]:
    """Where the package of a module lies, if that is not below the working folder; it is not imported."""
    top = module.partition(".")[0]
    if not top or top in _NOBODYS or top in sys.stdlib_module_names:
        return ()
    try:
        spec: ModuleSpec | None = PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ()
    if spec is None:
        return ()
    places = list(spec.submodule_search_locations or ([spec.origin] if spec.origin else ()))
    here = os.path.abspath(os.getcwd()) + os.sep
    full = [os.path.abspath(place) for place in places]
    return tuple(place for place in full if is_installed(place) or not place.startswith(here))
