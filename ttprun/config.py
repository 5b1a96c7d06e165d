"""What the user can set: one typed configuration, `Config`. Where its values come from is in `config_sources`."""

from __future__ import annotations

import re
from collections.abc import Callable
from keyword import iskeyword
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ttprun.device.device_errors import check_additions
from ttprun.errors import suggestion
from ttprun.observe.console import LogFormat
from ttprun.observe.events import USUAL, Kind
from ttprun.state.cost_limits import parse_interval, parse_memory

# One path component, since it names a directory: no slash, no leading dot or dash.
RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"

RungName = Literal["reconnect", "rerun", "replace", "rewind", "resize", "restart", "persist"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LaunchValue = bool | int | float | str | list[str]


def _companion() -> Any:
    """What serves the page, and runs commands for events. Raises ValueError if it is not installed."""
    try:
        from ttprun.web import companion
    except ModuleNotFoundError:
        raise ValueError("needs ttprun.web, which is missing here; leave it out, or install ttprun again") from None
    return companion


# Key -> what reads its value, or says in a ValueError why it cannot be read.
_READERS: dict[str, Callable[[Any], object]] = {
    "snapshot_every": parse_interval,
    "http": lambda text: _companion().parse_address(text),
    "on_event": lambda _: _companion(),
    "device_errors": check_additions,
}


class Config(BaseModel):
    """The resolved configuration. `configs/default.yaml` shows every key with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    standbys: int = Field(
        1,
        ge=0,
        le=64,
        description="processes kept ready to replace a lost rank, per node; 0: start one after the fault",
    )
    standby_context: bool = Field(
        False,
        description="keep one standby more for each rank on a device, with a context there, which a replacement "
        "then need not make (seconds on a GPU). Costs some hundred MiB of each device's memory",
    )
    run_dir: str | None = Field(
        None, min_length=1, description="directory for status, events and logs; default: ttprun-runs/RUN_ID/"
    )
    run_id: str | None = Field(
        None, pattern=RUN_ID_PATTERN, description="name of the run; default: date, time and a random part"
    )
    allow_faults: bool = Field(
        False, description="allow fault injection into this run ('ttprun inject-fault', --fault)"
    )
    faults: list[str] = Field([], description="fault to inject, such as kill:rank=1,step=5,phase=backward")
    trace: str | None = Field(
        None,
        min_length=1,
        description="file that gets a line of digests from each step of each rank, for 'ttprun diff' and 'ttprun check "
        "--against': batch, random numbers, loss, gradients, weights. Costs time in each step",
    )
    keep_steps: int = Field(
        0,
        ge=0,
        le=64,
        description="keep each rank's last N steps when the job ends or a rank raises an exception, so that 'ttprun "
        "replay' can take one again in one process. Costs a copy of weights and optimizer state in each step",
    )
    keep_steps_mib: int = Field(4096, ge=1, description="MiB of memory that the kept steps of one rank may take")
    rungs: list[RungName] = Field(
        list(get_args(RungName)),
        description="recovery methods that may be used; they are tried in the order of the default. A method that is "
        "not listed is not used; resize needs --mindio",
    )
    retry_on: list[str] = Field(
        [],
        description="regular expression, searched for in 'Type: message'. A rank that raises an error that matches "
        "runs the script again in the same process",
    )
    exception_retries: int = Field(
        2,
        ge=0,
        description="times that a rank whose script raises an exception, or exits with a code, is run again from the "
        "same step before the job ends with exit code 1; 0: it ends at once, as under torchrun",
    )
    device_errors: dict[str, str] = Field(
        {},
        description="additional device errors: regular expression searched for in 'Type: message' -> name of a fault",
    )
    max_incidents_per_hour: int | None = Field(
        None,
        ge=1,
        description="end the job with exit code 93 after this many incidents of one kind within an hour; default: no "
        "limit",
    )
    freeze_timeout_s: Seconds = Field(
        60, description="seconds for the surviving ranks to stop before their next optimizer step"
    )
    replay_timeout_s: Seconds = Field(
        600, description="seconds for a replacement to run the script up to the step at which the others wait"
    )
    transfer_timeout_s: Seconds = Field(
        300, description="seconds for a replacement to receive weights and optimizer state"
    )
    resume_timeout_s: Seconds = Field(
        120, description="seconds to reconnect the ranks and to issue the interrupted step's collectives again"
    )
    persist_timeout_s: Seconds = Field(600, description="seconds to write a checkpoint when the job ends")
    move_on: list[Literal["notice", "straggler"]] = Field(
        [],
        description="rules by which healthy ranks are moved. notice: a node whose launcher gets SIGUSR1 is drained if "
        "a spare node waits. straggler: a rank for which the others have waited for half a minute gets another "
        "process, once, and another device if one is free",
    )
    grace_s: Seconds | None = Field(
        None,
        description="seconds from the scheduler's SIGTERM to its SIGKILL (Slurm's KillWait or GraceTime, Kubernetes' "
        "terminationGracePeriodSeconds): a checkpoint is finished or given up before that; "
        "default: not known",
    )
    node_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        30,
        description="seconds to wait for a spare node, or for the lost one to come back; 0: use only a spare that is "
        "already waiting",
    )
    elastic: bool = Field(
        False,
        description="train on all nodes that are there, from MIN to MAX of --nnodes MIN:MAX; nodes may join and leave",
    )
    discovery: str | None = Field(
        None,
        min_length=1,
        description="command that prints the hosts that may train, one per line, as host or host:slots (--elastic)",
    )
    save_dir: str | None = Field(
        None, min_length=1, description="directory for checkpoints; default: checkpoints/ in the run directory"
    )
    resume: str = Field(
        "auto",
        min_length=1,
        description="checkpoint to resume from: auto (newest valid one in save_dir), off, or a path",
    )
    resume_hyperparameters: Literal["auto", "script", "checkpoint"] = Field(
        "auto",
        description="when a resumed script has other hyperparameters (lr, weight_decay, betas) than its checkpoint, "
        "which to use. auto: the checkpoint's if training has changed them, as a scheduler does, otherwise the "
        "script's. script: a scheduled learning rate goes on in proportion to the script's",
    )
    snapshot_every: str = Field(
        "auto",
        description="interval between snapshots: 500steps, 20min, never; auto: 15 to 30 min, depending on what one "
        "costs and how often ranks fail",
    )
    buddy: Literal["auto", "on", "node", "off"] = Field(
        "auto",
        description="mirror: copy into shared memory, at each step, what only one rank holds, so that this rank can be "
        "replaced without losing a step. auto: within buddy_memory; on: within all free memory; node: also to the next "
        "node, so that a lost node can be replaced (each of the two gets half of buddy_memory)",
    )
    buddy_memory: str = Field(
        "25%",
        description="memory of a node for mirrors with --buddy auto or node: 4GiB, 500MiB, or a share of the memory "
        "that is free at the start",
    )
    keep_checkpoints: int = Field(3, ge=1, description="number of valid checkpoints to keep in save_dir")
    keep_runs: int = Field(
        20,
        ge=1,
        description="number of run directories to keep in ttprun-runs/. Never removed: a run that is alive, and one "
        "that holds a script's newest checkpoint",
    )
    keep_runs_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="days for which run directories are kept, of those that keep_runs keeps; default: no limit"
    )
    keep_runs_gib: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="GiB that run directories may take together; the oldest are removed first; default: no limit",
    )
    log_format: LogFormat = Field(
        "plain",
        description="form of ttprun's own lines on stderr: plain, with time and level, or one JSON object per line; "
        "what the ranks print is not changed",
    )
    hang_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal["auto"] = Field(
        "auto",
        description="seconds after which a rank that others wait for counts as hung, is killed and replaced; 0: never; "
        "auto: 5 times the slowest recent step, at least 10, for one that is shown to be stuck; one in a call of its "
        "own is named then, and replaced after 300 or twice the longest step",
    )
    commit_timeout_s: Seconds = Field(
        30,
        description="seconds that a rank waits before its optimizer step for a rank that is still in a collective; "
        "after that, protection ends and training continues",
    )
    pause_timeout_s: Seconds = Field(
        3600, description="seconds that a scheduler's pause lasts if it names no limit (--mindio)"
    )
    verify_every: int = Field(100, ge=0, description="compare the ranks' weights every N steps; 0: never")
    verify_steps: str | None = Field(
        None,
        pattern=r"^1/[1-9][0-9]{0,8}(,before)?$",
        description="1/100: every hundredth step of one rank after the other is taken again by another process, and "
        "compared. A rank that two others contradict is replaced, and all go back to before that step. "
        "1/100,before: no rank takes that step before it is compared; on several nodes it must be so, with --save-dir",
    )
    overhead_budget: str = Field(
        "1%",
        description="share of a step that protection may take without a fault (at least 0.3 ms); what it takes is in "
        "'ttprun status', and a line says once if it is more. unlimited: no line, and variables are recorded at "
        "any price",
    )
    proof: Literal["evidence", "strict"] = Field(
        "evidence",
        description="when a replacement is refused. evidence: if it contradicts what the lost rank recorded; strict: "
        "also if a variable could not be restored, or something differs by rounding",
    )
    on_nan: Literal["warn", "keep", "stop"] = Field(
        "warn",
        description="what to do about NaN in gradients. warn: report it; keep: keep that step, for 'ttprun replay' "
        "(costs what --keep-steps 1 does); stop: check before each step, and end the job before a rank takes it",
    )
    record_limit_mib: int = Field(64, ge=1, description="MiB of shared memory for what one rank records at each step")
    journal_limit_mib: int = Field(
        0,
        ge=0,
        description="MiB of memory in which one rank may keep the inputs of its collectives. 0: 4096 on the CPU; on a "
        "device half of what the script leaves free there",
    )
    mindio: bool = Field(
        False,
        description="for frameworks that recover through their own callbacks (mindio_ttp): the script is not replayed. "
        "Reads TTP_NORMAL_ACTION_TIME_LIMIT and TTP_FRAMEWORK_TYPE",
    )
    user_paths: list[str] = Field(
        [], description="additional directories or files whose modules count as your own code"
    )
    follow: list[str] = Field(
        [],
        description="module that contains a framework's training loop, such as mytrainer.loop; a package stands for "
        "all of its modules",
    )
    http: str | None = Field(
        None,
        description="serve a page of the run, and /metrics for Prometheus (pip install 'ttprun[web]'). PORT 0 picks a "
        "free port. Without HOST: this machine only. With HOST: a token is required",
    )
    http_token_file: str | None = Field(
        None,
        min_length=1,
        description="file, mode 0600, that contains this token; default: a new token in the run directory",
    )
    on_event: str | None = Field(
        None, min_length=1, description="shell command to run on each event, with the event as JSON on standard input"
    )
    on_event_kinds: list[Kind] = Field(list(USUAL), description="kinds of event that run this command")
    launch: dict[str, LaunchValue] = Field({}, description="torchrun's options by name, e.g. {nproc_per_node: 3}")

    @field_validator("faults")
    @classmethod
    def _faults_can_be_read(cls, faults: list[str]) -> list[str]:
        if not faults:
            return faults
        from ttprun.chaos.injected_faults import parse_fault  # a companion

        return [str(parse_fault(fault)) for fault in faults]

    @field_validator("snapshot_every", "http", "on_event", "device_errors")
    @classmethod
    def _can_be_read(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None:
            _READERS[str(info.field_name)](value)
        return value

    @field_validator("overhead_budget", mode="before")
    @classmethod
    def _share_can_be_read(cls, value: object) -> str:
        text = str(value)
        if text != "unlimited" and not 0 < _share_of(text) <= 1:
            raise ValueError(f"'{text}' is no share of a step; write it as 1%, 2.5% or unlimited")
        return text

    @field_validator("buddy", mode="before")
    @classmethod
    def _buddy_can_be_read(cls, value: object) -> str:
        """YAML reads on and off as true and false."""
        word = str(value).lower()
        word = {"true": "on", "1": "on", "false": "off", "0": "off"}.get(word, word)
        if word not in (modes := ("auto", "on", "node", "off")):
            raise ValueError(f"'{value}' is not auto, on, node or off; {suggestion(word, modes, 'write --buddy on')}")
        return word

    @field_validator("buddy_memory", mode="before")
    @classmethod
    def _memory_can_be_read(cls, value: object) -> str:
        parse_memory(str(value))
        return str(value)

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
    def verified_every(self) -> int:
        """Steps from one that is taken again to the next; 0: none is."""
        return int(self.verify_steps.removeprefix("1/").partition(",")[0]) if self.verify_steps else 0

    @property
    def verifies_before(self) -> bool:
        """The ranks wait for that before they take such a step."""
        return (self.verify_steps or "").endswith(",before")

    @property
    def overhead_share(self) -> float:
        """The share of a step that protection may take; 0: all of it."""
        return 0.0 if self.overhead_budget == "unlimited" else _share_of(self.overhead_budget)

    @property
    def nan_limit_s(self) -> float | None:
        """How long a rank with a NaN waits before its step while the job is saved and ended; None: not at all."""
        return self.freeze_timeout_s + self.persist_timeout_s if self.on_nan == "stop" else None

    def without_repair(self) -> Config:
        """This configuration with no rank repaired: a failure restarts the whole group, unless that is off too."""
        return self.model_copy(update={"rungs": [rung for rung in self.rungs if rung == "restart"]})

    def for_frameworks(self) -> Config:
        """This configuration for a framework that recovers by callbacks: no replay, record or comparison."""
        rungs = [rung for rung in self.rungs if rung != "rewind"]
        return self.model_copy(update={"rungs": rungs, "resume": "off", "snapshot_every": "never", "verify_every": 0})

    def for_several_nodes(self) -> Config:
        """This configuration on several nodes, where there are no snapshots yet."""
        rungs = [rung for rung in self.rungs if rung in ("reconnect", "rerun", "replace", "restart", "persist")]
        return self.model_copy(update={"rungs": rungs, "snapshot_every": "never"})

    def for_one_rank(self) -> Config:
        """This configuration for a job without peers: a lost state can only come from what the rank has kept."""
        needs_peers = ("reconnect", "rerun", "resize")
        return self.model_copy(update={"rungs": [rung for rung in self.rungs if rung not in needs_peers]})

    def to_yaml(self) -> str:
        """This configuration as a file for `--config`."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


def _share_of(text: str) -> float:
    """ "2.5%" -> 0.025; 0 for what is no share."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text)
    return float(match[1]) / 100 if match else 0.0
