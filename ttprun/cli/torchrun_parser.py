"""torchrun's own argument parser with our options added, and torchrun's options from the `launch` key of our files.

The rule: whatever torchrun's parser understands, it decides. Our options, and their abbreviations, come after. Read
`build_parser` first. Imports torch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import get_args_parser

from ttprun.cli.options import add_options, asked_instead
from ttprun.config import Config
from ttprun.config_sources import GONE, ConfigSource, option_name
from ttprun.errors import Complaints, ConfigError, one_line, suggestion
from ttprun.observe import console

# The job as torchrun would run it, for when ttprun itself fails before the ranks have begun.
#
# A bug of ours, or a release of torch that is not as we think, must not keep a job from running.


def can_run(error: Exception) -> bool:
    """Whether the job may be begun again: no rank has started, and it is not torch's own rendezvous that failed."""
    elastic = sys.modules.get("ttprun.agent.launcher.elastic_agent")
    has_started = elastic is not None and elastic.ReplacingAgent.has_started_ranks
    return not has_started and not isinstance(error, RendezvousError)


def run(words: Sequence[str], error: Exception) -> int:
    """Say why protection is off, and run the command line by torch's own launcher. Returns the exit code.

    words   of the command line, ours among them. If they ask for no run, none is started: the exit code is 1
    error   what has kept ttprun from running it
    """
    parser = torchrun.get_args_parser()
    with contextlib.suppress(Exception):
        add_options(parser)
    arguments = parser.parse_args(list(words))
    is_run, why = not asked_instead(arguments), f"{type(error).__name__}: {' '.join(str(error).split())}"
    what = "protection is off, and the job runs as under torchrun" if is_run else "nothing was started"
    console.say(f"an error in ttprun itself ({why}); {what}; 'ttprun doctor' checks this machine")
    if not is_run:
        return 1
    try:
        torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        return 1
    return 0


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
