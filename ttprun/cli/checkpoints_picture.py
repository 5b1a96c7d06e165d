"""What `ttprun checkpoints` shows to people."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ttprun.cli.terminal import new_table
from ttprun.observe.progress import format_bytes
from ttprun.state.checkpoint import Checkpoint
from ttprun.state.manifest import Manifest
from ttprun.state.unusable import refusals


def draw_list(console: Console, checkpoints: Sequence[Checkpoint], latest: str | None) -> RenderableType:
    """One line a checkpoint, then a sentence for each that cannot be used.

    latest   name of the checkpoint that was completed last; None: not known
    """
    table = new_table(console, "checkpoint", "written", "cause", "size", "state", right=("size",))
    table.columns[0].no_wrap = True  # a name that is cut is none; where it is narrow, the time takes two lines
    for one in checkpoints:
        table.add_row(one.name, *_facts(one.manifest), _state(one, latest))
    reasons = [Text(f"{one.name}: {one.reason}") for one in checkpoints if one.reason]
    reasons += [Text(f"{one.name}: {refusal}") for one in checkpoints for refusal in describe_refusals(one)]
    return Group(table, *reasons)


def describe_refusals(one: Checkpoint) -> list[str]:
    """The reasons why launches could not resume from it."""
    return [f"a launch could not resume from it: {reason}" for reason in refusals(one.path)]


def draw_one(console: Console, one: Checkpoint, latest: str | None) -> RenderableType:
    """All that is known of one checkpoint: its state, its manifest, its files and its models.

    latest   as for `draw_list`
    """
    parts: list[RenderableType] = [Text.assemble(f"{one.path} · ", _state(one, latest))]
    if one.reason:
        parts.append(Text(one.reason))
    parts += map(Text, describe_refusals(one))
    if one.manifest is None:
        return Group(*parts)
    manifest = one.manifest
    parts.append(Text(f"step {manifest.boundary} of run {manifest.run_id} · {manifest.world_size} ranks"))
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


def _state(one: Checkpoint, latest: str | None) -> Text:
    if not one.is_valid:
        is_incomplete = one.manifest is not None and not one.manifest.completed
        return Text("incomplete" if is_incomplete else "invalid", style="red")
    return Text("latest" if one.name == latest else "valid", style="green")
