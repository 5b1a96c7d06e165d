"""What the user can set: one typed configuration from files, TTPRUN_* variables and options, in rising precedence.

A key that several sources set has the value of the last one; only `launch` is merged, option by option. Each source is
checked by itself, so that an error can name the file, variable or option at fault. Read `Config` first, then `resolve`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ttprun.chaos.faults import parse_fault
from ttprun.device.errors import check_additions
from ttprun.errors import ConfigError, one_line, suggestion
from ttprun.mindio import variables
from ttprun.state.interval import parse_interval
from ttprun.web.address import parse_address
from ttprun.web.kinds import USUAL, Kind

VARIABLE_PREFIX = "TTPRUN_"
# Marks that the agent puts on processes of its own: no settings, but inherited by a ttprun that one of them starts.
_AGENT_MARKS = ("TTPRUN_CHANNEL_FD", "TTPRUN_AGENT_PID")
# No str of a variable or an option can hold a mapping.
FILE_ONLY = ("device_errors", "launch")
# Lists of words, written with commas in between.
_AT_COMMAS = ("rungs", "on_event_kinds")
# One path component, since it names a directory: no slash, no leading dot or dash.
RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

RungName = Literal["reconnect", "rerun", "replace", "rewind", "resize", "restart", "persist"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LaunchValue = bool | int | float | str | list[str]

# Keys that people write among ours, and that belong under `launch`.
OF_TORCHRUN = (
    "duplicate_stderr_filters duplicate_stdout_filters event_log_handler local_addr local_ranks_filter log_dir "
    "log_line_prefix_template logs_specs master_addr master_port max_restarts module monitor_interval nnodes "
    "no_python node_rank nproc_per_node numa_binding print_completion rdzv_backend rdzv_conf rdzv_endpoint rdzv_id "
    "redirects role run_path shutdown_timeout signals_to_handle standalone start_method tee virtual_local_rank"
)


class Config(BaseModel):
    """The resolved configuration. `configs/default.yaml` shows every key with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    standbys: int = Field(
        1, ge=0, le=64, description="processes kept ready to replace a lost rank, per node (torch is imported)"
    )
    standby_depth: Literal["imports", "setup"] = Field(
        "imports",
        description="what a standby has done before: the ranks' imports, or for each rank also the script's set-up",
    )
    run_dir: str | None = Field(
        None, min_length=1, description="directory for status, events and logs; default: ttprun-runs/RUN_ID/"
    )
    run_id: str | None = Field(
        None, pattern=RUN_ID_PATTERN, description="name of the run; default: date, time and a random part"
    )
    allow_faults: bool = Field(False, description="let 'ttprun inject-fault' and 'faults' break ranks of this run")
    faults: list[str] = Field([], description="faults to cause, each as kill:rank=1,step=5,phase=backward")
    rungs: list[RungName] = Field(
        list(get_args(RungName)),
        description="kinds of recovery that may be used; what is left out is skipped (resize: with --mindio, if "
        "the framework can train with fewer ranks)",
    )
    retry_on: list[str] = Field(
        [], description="errors after which a rank runs the script again: regular expressions found in 'Type: message'"
    )
    device_errors: dict[str, str] = Field(
        {}, description="additional device errors: regular expression found in 'Type: message' -> name of a fault"
    )
    max_incidents_per_hour: int | None = Field(
        None, ge=1, description="incidents of one kind within an hour after which the job ends with exit code 93"
    )
    freeze_timeout_s: Seconds = Field(60, description="seconds for the survivors of a fault to stop at a boundary")
    replay_timeout_s: Seconds = Field(600, description="seconds for a replacement to run the script up to its boundary")
    transfer_timeout_s: Seconds = Field(300, description="seconds for a replacement to receive its state")
    resume_timeout_s: Seconds = Field(120, description="seconds to rebuild connections and issue collectives again")
    persist_timeout_s: Seconds = Field(600, description="seconds to write a checkpoint when the job ends")
    node_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        30, description="seconds to wait for a spare, or for a lost node to come back; 0: only a spare that waits"
    )
    elastic: bool = Field(
        False,
        description="train on as many nodes as there are, from MIN to MAX of --nnodes MIN:MAX: they may join and leave",
    )
    discovery: str | None = Field(
        None,
        min_length=1,
        description="with --elastic: command that prints the hosts that may train, each as host or host:slots",
    )
    save_dir: str | None = Field(
        None, min_length=1, description="directory for checkpoints; default: checkpoints/ in the run directory"
    )
    resume: str = Field(
        "auto",
        min_length=1,
        description="checkpoint to resume from: auto (newest valid one in save_dir), off, or a path",
    )
    snapshot_every: str = Field(
        "auto",
        description="interval between snapshots: 500steps, 20min, never; auto: by cost and failures, 15 to 30 min",
    )
    buddy: bool = Field(
        False,
        description="mirror in shared memory, at each step, what only one rank holds: a lost rank of FSDP2 is replaced "
        "and loses no step",
    )
    keep_checkpoints: int = Field(3, ge=1, description="valid checkpoints to keep in save_dir")
    keep_runs: int = Field(
        20,
        ge=1,
        description="run directories to keep in ttprun-runs/; none is removed that runs or holds a script's newest "
        "checkpoint",
    )
    hang_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"] = Field(
        "auto",
        description="seconds after which a rank that others wait for counts as hung, is killed and replaced; 0: never; "
        "auto: 5 times the slowest recent step, at least 10",
    )
    commit_timeout_s: Seconds = Field(30, description="seconds to wait before a step for a rank in a collective")
    pause_timeout_s: Seconds = Field(
        3600, description="seconds that a scheduler's pause lasts if it names no limit (mindio)"
    )
    verify_every: int = Field(100, ge=0, description="steps between two comparisons of the ranks' weights; 0: never")
    proof: Literal["evidence", "strict"] = Field(
        "evidence",
        description="what refuses a replacement: a contradiction with the evidence that the lost rank has left; "
        "strict: also a variable that could not be restored",
    )
    on_nan: Literal["warn", "stop"] = Field(
        "warn",
        description="NaN in gradients: report it when it is seen, or check before each step and end the job",
    )
    record_limit_mib: int = Field(64, ge=1, description="MiB of shared memory for one rank's record of a boundary")
    journal_limit_mib: int = Field(4096, ge=1, description="MiB that one rank may use to keep inputs of collectives")
    mindio: bool = Field(
        False,
        description="the framework owns its train function and recovers by callbacks (mindio_ttp); nothing is replayed "
        "(reads TTP_NORMAL_ACTION_TIME_LIMIT and TTP_FRAMEWORK_TYPE)",
    )
    user_paths: list[str] = Field(
        [], description="additional directories or files whose modules count as the user's code"
    )
    follow: list[str] = Field(
        [],
        description="modules of a framework with a training loop of its own, such as mytrainer.loop; a package stands "
        "for all of its modules",
    )
    http: str | None = Field(
        None,
        description="[HOST]:PORT of a page of the run, with /metrics for Prometheus (pip install 'ttprun[web]'); :0: a "
        "free port; without a host on this machine alone, with one for who knows the token",
    )
    http_token_file: str | None = Field(
        None,
        min_length=1,
        description="file, mode 0600, with the token for the page if a host is named; default: a new one in the run "
        "directory",
    )
    on_event: str | None = Field(
        None, min_length=1, description="command of the shell that is run for events, each as JSON on standard input"
    )
    on_event_kinds: list[Kind] = Field(list(USUAL), description="events for which it is run")
    launch: dict[str, LaunchValue] = Field({}, description="torchrun's options by name, e.g. {nproc_per_node: 3}")

    @field_validator("faults")
    @classmethod
    def _faults_can_be_read(cls, faults: list[str]) -> list[str]:
        return [str(parse_fault(fault)) for fault in faults]

    @field_validator("snapshot_every")
    @classmethod
    def _interval_can_be_read(cls, text: str) -> str:
        parse_interval(text)
        return text

    @field_validator("http")
    @classmethod
    def _address_can_be_read(cls, text: str | None) -> str | None:
        if text is not None:
            parse_address(text)
        return text

    @field_validator("retry_on")
    @classmethod
    def _patterns_can_be_read(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a regular expression; correct it ({error})") from None
        return patterns

    @field_validator("follow")
    @classmethod
    def _modules_can_be_imported(cls, modules: list[str]) -> list[str]:
        for module in modules:
            if not all(part.isidentifier() and not iskeyword(part) for part in module.split(".")):
                raise ValueError(
                    f"'{module}' is not a module's name; write it as after 'import', such as mytrainer.loop"
                )
        return modules

    @field_validator("device_errors")
    @classmethod
    def _device_errors_can_be_read(cls, additions: dict[str, str]) -> dict[str, str]:
        check_additions(additions)
        return additions

    @field_validator("launch", mode="before")
    @classmethod
    def _launch_names_have_underscores(cls, launch: object) -> object:
        """One spelling inside; and a type error of ours, since pydantic reports each member of the union."""
        if not isinstance(launch, dict):
            raise ValueError("is not a mapping; write torchrun's options as 'name: value'")
        for name, value in launch.items():
            is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
            if not (is_list or isinstance(value, bool | int | float | str)):
                raise ValueError(f"{name} is {value!r}; give a number, a string, true, false or a list of strings")
        return {str(name).replace("-", "_"): value for name, value in launch.items()}

    @property
    def nan_limit_s(self) -> float | None:
        """How long a rank with a NaN waits before its step while the job is saved and ended; None: not at all."""
        return self.freeze_timeout_s + self.persist_timeout_s if self.on_nan == "stop" else None

    def without_repair(self) -> Config:
        """The same, but no rank is repaired: a failure restarts the whole group, if that is not switched off too."""
        return self.model_copy(update={"rungs": [rung for rung in self.rungs if rung == "restart"]})

    def for_frameworks(self) -> Config:
        """The same where a framework recovers by callbacks: what is replayed, recorded or compared is off."""
        rungs = [rung for rung in self.rungs if rung != "rewind"]
        return self.model_copy(update={"rungs": rungs, "resume": "off", "snapshot_every": "never", "verify_every": 0})

    def for_several_nodes(self) -> Config:
        """The same on several nodes, where there are no snapshots yet."""
        rungs = [rung for rung in self.rungs if rung in ("reconnect", "rerun", "replace", "restart", "persist")]
        return self.model_copy(update={"rungs": rungs, "snapshot_every": "never"})

    def for_one_rank(self) -> Config:
        """The same for a job without peers: what is lost can only come from what the rank itself has kept."""
        needs_peers = ("reconnect", "rerun", "resize")
        return self.model_copy(update={"rungs": [rung for rung in self.rungs if rung not in needs_peers]})

    def to_yaml(self) -> str:
        """The same configuration as a file for `--config`."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


@dataclass(frozen=True)
class Source:
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
        if self.kind == "file":
            return key
        return VARIABLE_PREFIX + key.upper() if self.kind == "variable" else option_name(key)

    def where(self, key: str) -> str:
        """Where the user finds `key`."""
        return f"{self.name}: {key}" if self.kind == "file" else self.spelling(key)


def option_name(key: str) -> str:
    """The command line option that sets `key`; a repeatable option names one item."""
    return "--fault" if key == "faults" else "--" + key.replace("_", "-")


def resolve(files: Sequence[Source], environment: Mapping[str, str], options: Mapping[str, object]) -> Config:
    """Merge all sources, the later the stronger: built-in defaults, `files` in order, TTPRUN_* variables, options.

    environment   all variables; only TTPRUN_* and MindIO's are read
    options       key of Config -> value as given on the command line

    With `mindio`, MindIO's own variables come after all others.

    Raises ConfigError, one line, for an unknown key, a wrong type or a value out of range.
    """
    merged: dict[str, object] = {}
    launch: dict[str, LaunchValue] = {}
    given = {key: _split(key, value) if key in _AT_COMMAS else value for key, value in options.items()}
    for source in (*files, _variables(environment), Source("option", "", given)):
        checked = _check(source)
        launch |= checked.launch
        merged |= {key: getattr(checked, key) for key in checked.model_fields_set}
    config = Config.model_validate(merged | {"launch": launch})
    if config.mindio:
        limits = {key: limit for key, limit in variables.limits(environment).items() if key not in merged}
        config = config.model_copy(update=limits)
    if config.faults and not config.allow_faults:
        raise ConfigError(f"fault '{config.faults[0]}' is not allowed in this run", "add --allow-faults")
    return config


def read_config_file(name: str) -> Source:
    """Read a configuration file, or the built-in preset of that name if there is no such file.

    A file with a top-level `ttprun:` mapping is somebody else's configuration with ours inside: only that part is read.

    Raises ConfigError if it cannot be read, or is no mapping.
    """
    path = Path(name)
    if not path.exists() or path.is_dir():
        path = preset(name)
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: '{name}' cannot be read ({error})", "give a YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config: '{name}' is not valid YAML ({one_line(error)})", "correct the file") from None
    section = ttprun_section(content)
    values = section if section is not None else content
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config: '{name}' is not a mapping", "write one 'key: value' a line")
    return Source("file", name, {str(key): value for key, value in values.items()})


def preset(name: str) -> Path:
    """The file of a built-in preset. Raises ConfigError if there is none of that name."""
    known = {path.stem: path for path in _presets()}
    if name not in known:
        otherwise = "give a file, or one of the presets " + ", ".join(known)
        raise ConfigError(f"--config: there is no file '{name}'", suggestion(name, known, otherwise))
    return known[name]


def ttprun_section(content: object) -> dict[object, object] | None:
    """The `ttprun:` mapping of a parsed file that is not ours alone, None if it has none."""
    section = content.get("ttprun") if isinstance(content, dict) else None
    return section if isinstance(section, dict) else None


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


def _variables(environment: Mapping[str, str]) -> Source:
    """The TTPRUN_* variables; an empty one counts as not set. Lists are split: paths at colons, others at spaces."""
    values: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith(VARIABLE_PREFIX) or variable in _AGENT_MARKS or not text:
            continue
        key = variable.removeprefix(VARIABLE_PREFIX).lower()
        if key == "launch":
            raise ConfigError(
                f"{variable} is not a variable of ttprun", "set torchrun's own, such as PET_NPROC_PER_NODE"
            )
        if key in FILE_ONLY:
            raise ConfigError(
                f"{variable} is not a variable of ttprun", f"write {key} in a file, and name it with --config"
            )
        values[key] = _split(key, text)
    return Source("variable", "", values)


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


def _check(source: Source) -> Config:
    """Validate one source by itself, so that what is wrong can be laid at its door."""
    for key in source.values:
        if key not in Config.model_fields:
            is_file = source.kind == "file"
            known = [source.spelling(name) for name in Config.model_fields if is_file or name not in FILE_ONLY]
            otherwise = "'ttprun --help' lists all"
            if is_file and key.replace("-", "_") in OF_TORCHRUN.split():
                otherwise = f"it is an option of torchrun's; write it under 'launch:', as launch: {{{key}: ...}}"
            cure = suggestion(source.spelling(key), known, otherwise)
            raise ConfigError(f"{source.where(key)}: unknown", cure)
    try:
        # A file has types, so "2" is not 2 there; variables and options are str.
        return Config.model_validate(dict(source.values), strict=source.kind == "file")
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if first["type"] == "value_error":  # from a validator of ours, which writes "what; cure"
            what, _, cure = str(first["ctx"]["error"]).rpartition("; ")
            raise ConfigError(f"{source.where(key)}: {what}", cure) from None
        rule = first["msg"].replace("Input should", "it should").replace("String should", "it should")
        raise ConfigError(
            f"{source.where(key)}: {first['input']!r} is not valid", f"{rule} ({Config.model_fields[key].description})"
        ) from None


def _presets() -> Iterable[Path]:
    """Files of the built-in presets: in an installed package beside this module, in a checkout one level up."""
    here = Path(__file__).resolve().parent
    for folder in (here / "configs", here.parent / "configs"):
        if folder.is_dir():
            return sorted(folder.glob("*.yaml"))
    return []
