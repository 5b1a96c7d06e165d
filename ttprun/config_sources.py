"""Where the configuration comes from: files, TTPRUN_* variables and options, in rising precedence.

A key that several sources set has the value of the last one; only `launch` is merged, option by option. Each source is
checked by itself, so that an error can name the file, variable or option at fault. Begin with `resolve`, and with
`read_yaml` for any file of YAML that the user writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ttprun.config import Config, LaunchValue
from ttprun.errors import Complaints, ConfigError, all_of, one_line, suggestion

_Model = TypeVar("_Model", bound=BaseModel)


def read_yaml(path: Path, what: str) -> object:
    """The content of a YAML file; `what` names it in errors. Raises ConfigError."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(f"{what} cannot be read ({why})", "give a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not valid YAML ({one_line(error)})", "correct the file") from None


def validated(
    model: type[_Model], values: Mapping[str, object], where: Callable[[str], str], is_strict: bool
) -> _Model:
    """A model with these values, all of whose keys it knows.

    where       says where the user finds a key
    is_strict   values have their types already

    Raises ConfigError for a key that is missing or whose value is not valid, ConfigErrors for several.
    """
    try:
        return model.model_validate(dict(values), strict=is_strict)
    except ValidationError as error:
        by_place: dict[tuple[str, ...], ConfigError] = {}
        for details in error.errors():
            key, *inside = map(str, details["loc"])
            items = tuple(filter(str.isdecimal, inside))
            # Of several kinds of value that a key may have, the first one is named.
            by_place.setdefault((key, *items), _config_error(model, details, where, key, items if is_strict else ()))
        complaint = all_of([*by_place.values()])
    raise complaint


def _config_error(
    model: type[BaseModel], details: ErrorDetails, where: Callable[[str], str], key: str, items: tuple[str, ...]
) -> ConfigError:
    """What pydantic says of one value. items: its place in a list, where the user has numbered them: not in a text."""
    about, place = model.model_fields[key].description, ".".join([where(key), *items])
    if details["type"] == "missing":
        return ConfigError(f"{place}: missing", f"add it ({about})")
    if details["type"] == "value_error":  # from a validator of ours, which writes "what; cure"
        what, _, cure = str(details["ctx"]["error"]).rpartition("; ")
        return ConfigError(f"{place}: {what}", cure)
    rule = details["msg"].replace("Input should", "it should").replace("String should", "it should")
    return ConfigError(f"{place}: {details['input']!r} is not valid", f"{rule} ({about})")


def parse_yaml(text: str) -> object:
    """Parse YAML without its sexagesimal numbers, in which `nnodes: 1:4` is 64. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """SafeLoader less the numbers with colons."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (a class attribute of yaml's, copied so that yaml's own stays whole)
        first: [rule for rule in rules if rule[0] not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$"),
    list("-+.0123456789"),
)


VARIABLE_PREFIX = "TTPRUN_"
# Marks that the agent puts on processes of its own: no settings, but inherited by a ttprun that one of them starts.
_AGENT_MARKS = ("TTPRUN_CHANNEL_FD", "TTPRUN_AGENT_PID")
# No str of a variable or an option can hold a mapping.
FILE_ONLY = ("device_errors", "launch")
# Lists of words, written with commas in between.
_AT_COMMAS = ("rungs", "on_event_kinds", "move_on")
# Keys of older versions, and what to do about them.
GONE = {"standby_depth": "it was removed, leave it out: a replacement runs the script's set-up itself"}
# Keys that people write among ours, and that belong under `launch`.
OF_TORCHRUN = (
    "duplicate_stderr_filters duplicate_stdout_filters event_log_handler local_addr local_ranks_filter log_dir "
    "log_line_prefix_template logs_specs master_addr master_port max_restarts module monitor_interval nnodes "
    "no_python node_rank nproc_per_node numa_binding print_completion rdzv_backend rdzv_conf rdzv_endpoint rdzv_id "
    "redirects role run_path shutdown_timeout signals_to_handle standalone start_method tee virtual_local_rank"
)


@dataclass(frozen=True)
class ConfigSource:
    """One place that sets some keys.

    kind    says how a key is spelt there
    name    the file's name; not used for the others
    values  key -> value as found: typed from a file, str from variables and options
    """

    kind: Literal["file", "variable", "option"]
    name: str
    values: Mapping[str, object]

    def spelling(self, key: str) -> str:
        """How `key` is written in this kind of source."""
        return {"file": key, "variable": VARIABLE_PREFIX + key.upper(), "option": option_name(key)}[self.kind]

    def where(self, key: str) -> str:
        """Where the user finds `key`."""
        return f"{self.name}: {key}" if self.kind == "file" else self.spelling(key)


@dataclass(frozen=True)
class Origins:
    """Where values come from: key of Config -> source, option of torchrun's -> file."""

    keys: Mapping[str, str]
    launch: Mapping[str, str]


def option_name(key: str) -> str:
    """The command line option that sets `key`; a repeatable option names one item."""
    return "--fault" if key == "faults" else "--" + key.replace("_", "-")


def resolve(files: Sequence[ConfigSource], environment: Mapping[str, str], options: Mapping[str, object]) -> Config:
    """Merge all sources, the later the stronger: built-in defaults, `files` in order, TTPRUN_* variables, options.

    environment   all variables; only TTPRUN_* and MindIO's are read
    options       key of Config -> value as given on the command line

    With `mindio`, MindIO's own variables come after all others.

    Raises ConfigError, one line, for an unknown key, a wrong type or a value out of range; ConfigErrors for several.
    """
    merged: dict[str, object] = {}
    launch: dict[str, LaunchValue] = {}
    wrong = Complaints()
    with wrong.noted():
        _check_names(environment)
    for source in _in_order(files, environment, options):
        with wrong.noted():
            checked = _check(source)
            launch |= checked.launch
            merged |= {key: getattr(checked, key) for key in checked.model_fields_set}
    wrong.raise_any()
    config = Config.model_validate(merged | {"launch": launch})
    if config.mindio:
        from ttprun import mindio

        given = mindio.limits(environment).items()
        config = config.model_copy(update={key: limit for key, limit in given if key not in merged})
    if config.faults and not config.allow_faults:
        raise ConfigError(f"fault '{config.faults[0]}' is not allowed in this run", "add --allow-faults")
    return config


def origins(
    files: Sequence[ConfigSource], environment: Mapping[str, str], options: Mapping[str, object], config: Config
) -> Origins:
    """Where each key has its value from: a file's name, a variable or an option; keys that nobody sets are not there.

    config   what `resolve` has made of the other three, and so has checked
    """
    keys: dict[str, str] = {}
    launch: dict[str, str] = {}
    for source in _in_order(files, environment, options):
        keys |= {key: source.name or source.spelling(key) for key in source.values}
        launch |= dict.fromkeys(_check(source).launch, source.name)
    for key in ("launch", *(["run_id"] if config.run_id is None else ())):
        keys.pop(key, None)
    if config.mindio:
        from ttprun import mindio

        keys = dict.fromkeys(mindio.limits(environment), mindio.ACTION_LIMIT) | keys
    return Origins(keys, launch)


def _in_order(
    files: Sequence[ConfigSource], environment: Mapping[str, str], options: Mapping[str, object]
) -> tuple[ConfigSource, ...]:
    """All sources, the strongest last."""
    given = {key: _split(key, value) if key in _AT_COMMAS else value for key, value in options.items()}
    return (*files, _variables(environment), ConfigSource("option", "", given))


def read_config_file(name: str) -> ConfigSource:
    """Read a configuration file, or the built-in preset of that name if there is no such file.

    A file with a top-level `ttprun:` mapping is somebody else's configuration with ours inside: only that part is read.

    Raises ConfigError if it cannot be read, or is no mapping.
    """
    path = Path(name)
    if not path.exists() or path.is_dir():
        path = preset(name)
    content = read_yaml(path, f"--config: '{name}'")
    section = ttprun_section(content)
    values = section if section is not None else content
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config: '{name}' is not a mapping", "write one 'key: value' a line")
    return ConfigSource("file", name, {str(key): value for key, value in values.items()})


def preset(name: str) -> Path:
    """The file of a built-in preset. Raises ConfigError if there is none of that name."""
    presets = {path.stem: path for path in sorted(shipped().glob("*.yaml"))}
    if name not in presets:
        otherwise = "give a file, or one of the presets " + ", ".join(presets)
        raise ConfigError(f"--config: there is no file '{name}'", suggestion(name, presets, otherwise))
    return presets[name]


def ttprun_section(content: object) -> dict[object, object] | None:
    """The `ttprun:` mapping of a parsed file that is not ours alone, None if it has none."""
    section = content.get("ttprun") if isinstance(content, dict) else None
    return section if isinstance(section, dict) else None


def _variables(environment: Mapping[str, str]) -> ConfigSource:
    """The TTPRUN_* variables; an empty one counts as not set. Lists are split: paths at colons, others at spaces."""
    given = {key: _split(key, text) for key, text in _set_keys(environment).items() if key not in FILE_ONLY}
    return ConfigSource("variable", "", given)


def _set_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """What TTPRUN_* variables that are not empty say, by the key that they name."""
    set_ones = ((name, text) for name, text in environment.items() if name.startswith(VARIABLE_PREFIX) and text)
    return {name.removeprefix(VARIABLE_PREFIX).lower(): text for name, text in set_ones if name not in _AGENT_MARKS}


def _check_names(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if a variable sets what only a file can hold."""
    wrong = Complaints()
    for key in sorted(FILE_ONLY & _set_keys(environment).keys()):
        of_torchrun = "set torchrun's own, such as PET_NPROC_PER_NODE"
        cure = of_torchrun if key == "launch" else f"write {key} in a file, and name it with --config"
        wrong.add(ConfigError(f"{VARIABLE_PREFIX}{key.upper()} is not a variable of ttprun", cure))
    wrong.raise_any()


def _split(key: str, text: Any) -> object:
    """The items of a key that is a list, from the one str of a variable or an option."""
    match key:
        case "faults" | "follow":
            return text.split()
        case "retry_on":
            return [text]
        case "user_paths":
            return text.split(os.pathsep)
        case _ if key in _AT_COMMAS:
            return [word.strip() for word in text.split(",") if word.strip()]
    return text


def _check(source: ConfigSource) -> Config:
    """Validate one source by itself, so that what is wrong can be attributed to it."""
    accepted = {key: value for key, value in source.values.items() if key in Config.model_fields}
    wrong = Complaints()
    for key in source.values:
        if key not in accepted:
            wrong.add(ConfigError(f"{source.where(key)}: unknown", _cure_of_unknown(source, key)))
    with wrong.noted():
        # A file has types, so "2" is not 2 there; variables and options are str.
        checked = validated(Config, accepted, source.where, is_strict=source.kind == "file")
    wrong.raise_any()
    return checked


def _cure_of_unknown(source: ConfigSource, key: str) -> str:
    is_file = source.kind == "file"
    spellings = [source.spelling(name) for name in Config.model_fields if is_file or name not in FILE_ONLY]
    otherwise = "'ttprun --help' lists all"
    if is_file and key.replace("-", "_") in OF_TORCHRUN.split():
        otherwise = f"it is an option of torchrun's; write it under 'launch:', as launch: {{{key}: ...}}"
    return GONE.get(key) or suggestion(source.spelling(key), spellings, otherwise)


def shipped() -> Path:
    """The folder of the built-in presets, drills and examples: beside this module, in a checkout one level up."""
    here = Path(__file__).resolve().parent
    return next(folder for folder in (here / "configs", here.parent / "configs") if folder.is_dir())
