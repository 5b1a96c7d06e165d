"""Each part of a checkpoint counts: one that lacks a part, and is valid otherwise, does not give the undisturbed run.

If a part were not written, or not loaded, one of these tests would see no difference.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.harness import (
    Launch,
    Run,
    RunTtprun,
    Undisturbed,
    start_ttprun,
)
from ttprun.state.checkpoint import MANIFEST_NAME, Manifest, inspect
from ttprun.state.files import read_entry

SCRIPT = "epochs_dataloader.py"
STEP = 20


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that was preempted: out/ of the script, and save/."""
    folder = tmp_path_factory.mktemp("preempted")
    launch: Launch = start_ttprun(
        SCRIPT,
        2,
        folder,
        faults=[f"preempt:rank=0,step={STEP},phase=backward"],
        options=["--save-dir", str(folder / "save")],
    )
    run = launch.finish()
    assert run.exit_code == 143, run.story()
    return folder


def as_it_is(checkpoint: Path) -> None:
    pass


def without_weights(checkpoint: Path) -> None:
    edit_tensors(checkpoint, "/weight")


def without_the_optimizers_state(checkpoint: Path) -> None:
    edit_tensors(checkpoint, "/momentum_buffer", "/exp_avg", "/exp_avg_sq")


def without_random_states(checkpoint: Path) -> None:
    """Those of the boundary before stand in their place."""
    edit_records(checkpoint, lambda before, newest: newest | {"rng": before["rng"]})


def without_variables(checkpoint: Path) -> None:
    """Schedulers, EMA, counters, buffers: those of the boundary before stand in their place."""
    edit_records(checkpoint, lambda before, newest: newest | {"variables": before["variables"]}, with_blobs=True)


def without_positions(checkpoint: Path) -> None:
    """Loops and loaders: those of the boundary before stand in their place."""
    edit_records(checkpoint, lambda before, newest: newest | {key: before[key] for key in ("loops", "loaders")})


@pytest.mark.parametrize(
    "spoil",
    [
        without_weights,
        without_the_optimizers_state,
        without_random_states,
        without_variables,
        without_positions,
    ],
)
def test_a_checkpoint_that_lacks_a_part_does_not_give_the_undisturbed_run(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, saved: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    run = resume(run_ttprun, saved, tmp_path, spoil)

    assert run.exit_code == 93 or run.final != undisturbed(SCRIPT, 2).final, run.story()


def test_the_same_checkpoint_as_it_is_gives_the_undisturbed_run(
    run_ttprun: RunTtprun, undisturbed: Undisturbed, saved: Path, tmp_path: Path
) -> None:
    run = resume(run_ttprun, saved, tmp_path, as_it_is)

    assert run.exit_code == 0, run.story()
    assert run.final == undisturbed(SCRIPT, 2).final, run.story()


def resume(run_ttprun: RunTtprun, saved: Path, folder: Path, spoil: Callable[[Path], None]) -> Run:
    """Go on from a copy of the checkpoint that `spoil` has changed."""
    (original,) = (saved / "save").glob("step-*")
    checkpoint = folder / original.name
    shutil.copytree(original, checkpoint)
    spoil(checkpoint)
    make_valid(checkpoint)
    assert inspect(checkpoint).is_valid
    (saved / "out" / "final.pt").unlink(missing_ok=True)
    return run_ttprun(SCRIPT, 2, options=["--resume", str(checkpoint)], out=saved / "out")


def edit_tensors(checkpoint: Path, *endings: str) -> None:
    """Zeros in the place of all tensors whose keys end so."""
    is_any = False
    for path in checkpoint.glob("*.safetensors"):
        tensors = load_file(path)
        for key, tensor in tensors.items():
            if key.startswith("optimizer.") and key.endswith(endings):
                tensor.zero_()
                is_any = True
        save_file(tensors, path)
    assert is_any


def edit_records(
    checkpoint: Path, edit: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]], with_blobs: bool = False
) -> None:
    """Change each rank's record of the checkpoint's boundary, given that of the boundary before.

    with_blobs   take the other one's tensors too
    """
    for path in checkpoint.glob("rank-*.msgpack"):
        part = unpack(path.read_bytes())
        (_, before, blobs), newest = part["records"][-2:]
        changed = edit(unpack(before), unpack(newest[1]))
        if with_blobs:
            newest[2] = blobs
            changed["blobs"] = unpack(before)["blobs"]
        newest[1] = msgpack.packb(changed, unicode_errors="surrogatepass")
        path.write_bytes(msgpack.packb(part))


def unpack(packed: bytes) -> Any:
    """As the records are packed."""
    return msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")


def make_valid(checkpoint: Path) -> None:
    """A manifest that fits the files as they are now."""
    manifest = inspect(checkpoint).manifest
    assert manifest is not None
    files = {name: read_entry(checkpoint / name) for name in manifest.files}
    text = b"".join(Manifest(**dict(manifest) | {"files": files}).to_json())
    (checkpoint / MANIFEST_NAME).write_bytes(text)
