"""`ttprun checkpoints`: look at what a run has saved, check it, take a model out of it. Only export needs torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttprun.cli.control import ask_running, wait_until
from ttprun.cli.terminal import new_table, open_console
from ttprun.errors import ConfigError, counted, one_line, suggestion
from ttprun.observe.console import SILENT_S, ProgressLine, format_bytes
from ttprun.observe.run_directory import RunDirectory
from ttprun.observe.status import CheckpointStatus, RunStatus
from ttprun.protocol.control_requests import SaveNow
from ttprun.state.checkpoint import MANIFEST_NAME, Checkpoint, Manifest, inspect, refusals, verify
from ttprun.state.files import InvalidCheckpointError
from ttprun.state.store import CheckpointStore, last_written_first, read_latest

# What `ttprun checkpoints` shows to people.


def draw_list(console: Console, checkpoints: Sequence[Checkpoint], latest: str | None) -> RenderableType:
    """One line a checkpoint, then a sentence for each that cannot be used.

    latest   name of the checkpoint that was completed last; None: not known
    """
    table = new_table(console, "checkpoint", "written", "cause", "size", "state", right=("size",))
    table.columns[0].no_wrap = True  # a name that is cut is none; where it is narrow, the time takes two lines
    for checkpoint in checkpoints:
        table.add_row(checkpoint.name, *_facts(checkpoint.manifest), _state(checkpoint, latest))
    reasons = [Text(f"{checkpoint.name}: {checkpoint.reason}") for checkpoint in checkpoints if checkpoint.reason]
    reasons += [
        Text(f"{checkpoint.name}: {refusal}") for checkpoint in checkpoints for refusal in describe_refusals(checkpoint)
    ]
    return Group(table, *reasons)


def describe_refusals(checkpoint: Checkpoint) -> list[str]:
    """The reasons why launches could not resume from it."""
    return [f"a launch could not resume from it: {reason}" for reason in refusals(checkpoint.path)]


def draw_one(console: Console, checkpoint: Checkpoint, latest: str | None) -> RenderableType:
    """All that is known of one checkpoint: its state, its manifest, its files and its models.

    latest   as for `draw_list`
    """
    parts: list[RenderableType] = [Text.assemble(f"{checkpoint.path} · ", _state(checkpoint, latest))]
    if checkpoint.reason:
        parts.append(Text(checkpoint.reason))
    parts += map(Text, describe_refusals(checkpoint))
    if checkpoint.manifest is None:
        return Group(*parts)
    manifest = checkpoint.manifest
    parts.append(Text(f"step {manifest.boundary} of run {manifest.run_id} · {counted(manifest.world_size, 'rank')}"))
    parts.append(Text(f"written {_when(manifest)} ({manifest.cause}) · script {manifest.script}"))
    parts.append(Text(" · ".join(f"{name} {version}" for name, version in manifest.versions.items())))
    files = new_table(console, "file", "bytes", "xxh3", right=("bytes",))
    for name, entry in manifest.files.items():
        files.add_row(name, str(entry.bytes), entry.xxh3)
    parts += [Text(), files]
    if manifest.missing:
        missing = new_table(console, "missing")
        for what in manifest.missing:
            missing.add_row(what)
        parts += [Text(), missing]
    if manifest.model:
        models = new_table(console, "model", "tensors", "in", right=("tensors",))
        for name, places in manifest.model.items():
            in_files = sorted({file for file, _ in places.values()})
            models.add_row(name, str(len(places)), in_files[0] if len(in_files) == 1 else f"{len(in_files)} files")
        parts += [Text(), models]
    return Group(*parts)


def _facts(manifest: Manifest | None) -> tuple[str, str, str]:
    if manifest is None:
        return "-", "-", "-"
    return _when(manifest), manifest.cause, format_bytes(manifest.size_bytes)


def _when(manifest: Manifest) -> str:
    """The time of writing, in the zone of who looks."""
    return datetime.fromisoformat(manifest.created_at).astimezone().strftime("%Y-%m-%d %H:%M")


def _state(checkpoint: Checkpoint, latest: str | None) -> Text:
    if not checkpoint.is_valid:
        is_incomplete = checkpoint.manifest is not None and not checkpoint.manifest.completed
        return Text("incomplete" if is_incomplete else "invalid", style="red")
    return Text("latest" if checkpoint.name == latest else "valid", style="green")


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Save a running job; list, show and verify what a run has saved; export a model for load_state_dict.",
)

SaveDir = Annotated[
    str | None, typer.Option(help="Directory of the checkpoints; default: that of the newest run here.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")]
WHICH = "Its directory, or its name or step in the save directory, or 'latest'."


@app.command("now")
def checkpoint_now(
    run: Annotated[str | None, typer.Option(help="Run id or run directory; default: the newest run here.")] = None,
    as_json: AsJson = False,
) -> int:
    """Let a running job write a checkpoint, and wait until it is written. All ranks wait meanwhile, wherever they are.

    Exit code: 0 written, 1 not written.
    """
    directory, answer = ask_running(run, SaveNow(), "the run cannot be saved now")
    with ProgressLine("writing a checkpoint", 0, lambda: 0):
        written = wait_until(directory, lambda status: _newer(status, answer.after))
    if as_json:
        print(json.dumps(asdict(written)))
    elif written.path:
        took_s = written.took_s or 0.0
        print(f"wrote '{written.path}': step {written.boundary}, {format_bytes(written.bytes)} in {took_s:.2f} s")
    else:
        print(f"no checkpoint was written: {written.reason}")
    return 0 if written.path and not written.reason else 1


def _newer(status: RunStatus, after: int) -> CheckpointStatus | None:
    """The checkpoint, or attempt at one, if its number is above `after`."""
    return status.checkpoint if status.checkpoint is not None and status.checkpoint.number > after else None


@app.command("list")
def list_checkpoints(save_dir: SaveDir = None, as_json: AsJson = False) -> int:
    """List all checkpoints, the newest step first, with what is wrong with those that cannot be used.

    'latest' is the one that a launch would resume from. Its files are read; of the others only sizes are checked.
    """
    store = open_store(save_dir)
    checkpoints, latest = with_latest(store.checkpoints())
    if as_json:
        described = [described_in_json(checkpoint, latest) for checkpoint in checkpoints]
        print(json.dumps({"save_dir": str(store.save_dir), "latest": latest, "checkpoints": described}))
    elif not checkpoints:
        print(f"no checkpoints in '{store.save_dir}'")
    else:
        console = open_console()
        console.print(draw_list(console, checkpoints, latest))
    return 0


@app.command("show")
def show_checkpoint(
    checkpoint: Annotated[str | None, typer.Argument(help=f"{WHICH} Default: the newest valid one.")] = None,
    save_dir: SaveDir = None,
    as_json: AsJson = False,
) -> int:
    """Show all that is known of one checkpoint: who wrote it, when and why, its files and its models."""
    chosen = check(find_checkpoint(checkpoint, save_dir)).checkpoint
    latest = read_latest(chosen.path.parent)
    if as_json:
        content = None if chosen.manifest is None else chosen.manifest.model_dump(mode="json")
        print(json.dumps(described_in_json(chosen, latest) | {"manifest": content}))
    else:
        console = open_console()
        console.print(draw_one(console, chosen, latest))
    return 0


@app.command("verify")
def verify_checkpoints(
    checkpoints: Annotated[list[str] | None, typer.Argument(help=f"{WHICH} Default: all of them.")] = None,
    save_dir: SaveDir = None,
    as_json: AsJson = False,
) -> int:
    """Read every file and compare its digest with the manifest's. Nothing is changed.

    Exit code: 0 all valid, 1 something is incomplete or damaged (or there is nothing).
    """
    named = [find_checkpoint(text, save_dir) for text in checkpoints or ()]
    wanted = named or open_store(save_dir).checkpoints()
    checked = [check(checkpoint) for checkpoint in wanted]
    if as_json:
        print(json.dumps({"checkpoints": [result.to_json() for result in checked]}))
    else:
        for result in checked:
            print(result)
        if not checked:
            print("there are no checkpoints")
    return 0 if checked and all(result.checkpoint.is_valid for result in checked) else 1


@app.command("export")
def export_model(
    checkpoint: Annotated[str, typer.Argument(help=WHICH)],
    out: Annotated[Path, typer.Option("--out", help="File (dcp: directory) to write; it must not be there yet.")],
    form: Annotated[
        Literal["torch", "safetensors", "dcp"] | None,
        typer.Option(
            "--format",
            help="Default: by the file's name, safetensors if that is its suffix. dcp: a directory that "
            "torch.distributed.checkpoint loads in any layout (tensor parallel, FSDP2, on any number of ranks).",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Variable of the script that held the model.")] = None,
    save_dir: SaveDir = None,
    as_json: AsJson = False,
) -> int:
    """Write a model as model.load_state_dict takes it, without the names that wrappers such as DDP put in front.

    For example: ttprun checkpoints export latest --out model.pt

    The checkpoint is verified first.
    """
    checked = check(find_checkpoint(checkpoint, save_dir)).checkpoint
    from ttprun.state.tensor_file import choose_model, load_model, part_of, write_model

    try:
        tensors = load_model(checked, choose_model(checked, model))
    except InvalidCheckpointError as error:
        raise ConfigError(f"checkpoint '{checked.path}' cannot be used: {error.reason}", "choose another") from None
    form = form or ("safetensors" if out.suffix == ".safetensors" else "torch")
    size = sum(tensor.nbytes for tensor in tensors.values())
    with ProgressLine(f"writing '{out}'", size, lambda: size_of(part_of(out))):
        written = write_model(tensors, out, form)
    result = {"file": str(out), "format": form, "tensors": len(tensors), "bytes": written, "boundary": checked.boundary}
    count = f"{len(tensors)} tensors of step {checked.boundary}, {format_bytes(written)}"
    print(json.dumps(result) if as_json else f"wrote '{out}' ({form}): {count}")
    return 0


def with_latest(checkpoints: Sequence[Checkpoint]) -> tuple[list[Checkpoint], str | None]:
    """The checkpoints, and the name of the one written last whose files are whole; what is damaged has a reason now."""
    damaged: dict[str, Checkpoint] = {}
    for candidate in last_written_first(checkpoints):
        checked = check(candidate).checkpoint
        if checked.is_valid:
            return [damaged.get(checkpoint.name, checkpoint) for checkpoint in checkpoints], checked.name
        damaged[checked.name] = checked
    return [damaged.get(checkpoint.name, checkpoint) for checkpoint in checkpoints], None


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint that was read, and the seconds that took."""

    checkpoint: Checkpoint
    took_s: float

    def __str__(self) -> str:
        checkpoint = self.checkpoint
        if not checkpoint.is_valid:
            return f"{checkpoint.name}: INVALID: {checkpoint.reason}"
        size = checkpoint.valid_manifest().size_bytes
        # Of a moment the clock says nothing worth knowing.
        rate = f" in {self.took_s:.1f} s, {format_bytes(size / self.took_s)}/s" if self.took_s >= SILENT_S else ""
        return f"{checkpoint.name}: valid ({format_bytes(size)}{rate})"

    def to_json(self) -> dict[str, Any]:
        return described_in_json(self.checkpoint, None) | {"took_s": round(self.took_s, 3)}


def check(checkpoint: Checkpoint) -> VerifiedCheckpoint:
    """Read all files of a checkpoint, with a progress line."""
    done = 0

    def count(so_far: int, of: int) -> None:
        nonlocal done
        done = so_far

    started_s = time.monotonic()
    size = 0 if checkpoint.manifest is None else checkpoint.manifest.size_bytes
    with ProgressLine(f"verifying {checkpoint.name}", size, lambda: done):
        checked = verify(checkpoint, count)
    return VerifiedCheckpoint(checked, time.monotonic() - started_s)


def open_store(save_dir: str | None) -> CheckpointStore:
    """The checkpoints of a directory, or with None of the newest run. Raises ConfigError if there is no directory."""
    store = CheckpointStore(save_dir_of(RunDirectory.find()) if save_dir is None else save_dir)
    if not store.save_dir.is_dir():
        cure = f"name {'it' if save_dir is None else 'another'} with --save-dir"
        raise ConfigError(f"there is no save directory '{store.save_dir}'", cure)
    return store


def save_dir_of(run: RunDirectory) -> Path:
    """Where a run saves its checkpoints, as its configuration says. Raises ConfigError if it does not say."""
    import yaml

    try:
        config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(
            f"the configuration of run '{run.path}' cannot be read ({one_line(error)})", "name a directory: --save-dir"
        ) from None
    save_dir = config.get("save_dir") if isinstance(config, dict) else None
    if not isinstance(save_dir, str):
        raise ConfigError(f"run '{run.path}' has no save directory", "name one with --save-dir")
    return Path(save_dir)


def find_checkpoint(which: str | None, save_dir: str | None) -> Checkpoint:
    """One checkpoint: by its directory, by name, boundary or `latest` in the save directory, or with None the newest
    valid one. A save directory itself means the newest valid one in it.

    Raises ConfigError if there is none.
    """
    if which is not None and Path(which).is_dir():
        path = Path(which).absolute()
        if (path / MANIFEST_NAME).exists() or not CheckpointStore(path).checkpoints():
            return inspect(path)
        which, save_dir = None, str(path)
    store = open_store(save_dir)
    checkpoints = store.checkpoints()
    if which in (None, "latest"):
        checkpoints, latest = with_latest(checkpoints)
        if latest is None:
            raise ConfigError(
                f"there is no valid checkpoint in '{store.save_dir}'", "look at 'ttprun checkpoints list'"
            )
        which = latest
    assert which is not None
    for checkpoint in [*last_written_first(checkpoints), *checkpoints]:
        if which == checkpoint.name or (which.isdecimal() and int(which) == checkpoint.boundary):
            return checkpoint
    names = [checkpoint.name for checkpoint in checkpoints]
    raise ConfigError(
        f"there is no checkpoint '{which}' in '{store.save_dir}'",
        suggestion(which, names, "look at 'ttprun checkpoints list'"),
    )


def described_in_json(checkpoint: Checkpoint, latest: str | None) -> dict[str, Any]:
    """What programs learn of a checkpoint; keys are added, never renamed."""
    manifest = checkpoint.manifest
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "boundary": checkpoint.boundary,
        "is_valid": checkpoint.is_valid,
        "is_latest": checkpoint.name == latest,
        "reason": checkpoint.reason,
        "refusals": refusals(checkpoint.path),
        "run_id": manifest and manifest.run_id,
        "created_at": manifest and manifest.created_at,
        "cause": manifest and manifest.cause,
        "world_size": manifest and manifest.world_size,
        "bytes": manifest and manifest.size_bytes,
        "models": sorted(manifest.model) if manifest else [],
    }


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it is not there (yet, or any more)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
