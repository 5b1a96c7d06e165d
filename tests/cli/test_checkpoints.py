"""`ttprun checkpoints` on save directories made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from tests.state.making import DESCRIPTION, flip_byte, locked, take
from tests.state.making_models import net, save
from ttprun.cli.main import main
from ttprun.observe.run_directory import RunDirectory
from ttprun.state.checkpoint import MANIFEST_NAME, note

TENSORS = "tensors-00000.safetensors"


@pytest.fixture
def save_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the newest run: two valid checkpoints, a damaged one, an incomplete one."""
    monkeypatch.chdir(tmp_path)
    run = RunDirectory.create("r1")
    run.config.write_text(f"save_dir: {tmp_path / 'save'}\n")
    store = locked(tmp_path / "save", "night")
    for boundary in (100, 110, 120):
        take(store, boundary)
    flip_byte(store.save_dir / "step-00000120" / TENSORS)
    draft = store.begin(130)
    draft.add(TENSORS, b"half")
    draft.keep_incomplete(DESCRIPTION, ["b.weight of rank 1"])
    store.unlock()
    return store.save_dir


def answer(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, Any]:
    """Run a command with --json; returns its exit code and its answer."""
    code = main(["checkpoints", *line, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_list_is_that_of_the_newest_run_and_says_what_cannot_be_used(
    save_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["checkpoints", "list"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:5]] == [
        ("incomplete-step-00000130", "incomplete"),
        ("step-00000120", "invalid"),
        ("step-00000110", "latest"),
        ("step-00000100", "valid"),
    ]
    assert lines[5:] == [
        "incomplete-step-00000130: it is incomplete: b.weight of rank 1 missing",
        f"step-00000120: {TENSORS} is damaged: its content differs from what was written",
    ]


def test_the_list_in_json_has_one_object_a_checkpoint(save_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = answer(capsys, "list", "--save-dir", str(save_dir))

    assert code == 0
    assert (shown["save_dir"], shown["latest"]) == (str(save_dir), "step-00000110")
    first, damaged, second = shown["checkpoints"][:3]
    assert (first["boundary"], first["is_valid"], first["is_latest"]) == (130, False, False)
    assert (damaged["boundary"], damaged["is_valid"], damaged["is_latest"]) == (120, False, False)
    assert (second["boundary"], second["is_valid"], second["is_latest"]) == (110, True, True)
    assert (second["run_id"], second["cause"], second["world_size"], second["bytes"]) == ("night", "periodic", 2, 14)


@pytest.mark.parametrize("which", ["step-00000110", "110", "save/step-00000110"])
def test_one_checkpoint_is_shown_by_name_step_or_directory(
    save_dir: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = answer(capsys, "show", which)
    main(["checkpoints", "show", which])

    text = capsys.readouterr().out
    assert code == 0
    assert shown["path"] == str(save_dir / "step-00000110")
    assert shown["manifest"]["files"][TENSORS]["bytes"] == 7
    assert f"{save_dir}/step-00000110 · valid" in text
    assert "step 110 of run night · 2 ranks" in text
    assert shown["manifest"]["files"][TENSORS]["xxh3"] in text


@pytest.mark.parametrize("line", [["show"], ["show", "latest"], ["show", "save"]])
def test_without_a_name_the_newest_that_is_whole_is_shown(
    save_dir: Path, line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, *line)[1]["name"] == "step-00000110"


def test_one_without_a_manifest_is_shown_with_that_reason(save_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (save_dir / "step-00000120" / MANIFEST_NAME).unlink()

    code = main(["checkpoints", "show", "save/step-00000120"])

    assert code == 0
    assert capsys.readouterr().out == f"{save_dir}/step-00000120 · invalid\nthere is no ttprun.json in it\n"


def test_verify_reads_all_and_its_exit_code_says_whether_something_is_wrong(
    save_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["checkpoints", "verify"])

    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[:2] == [
        "incomplete-step-00000130: INVALID: it is incomplete: b.weight of rank 1 missing",
        f"step-00000120: INVALID: {TENSORS} is damaged: its content differs from what was written",
    ]
    assert lines[2:] == ["step-00000110: valid (14 bytes)", "step-00000100: valid (14 bytes)"]
    assert main(["checkpoints", "verify", "110", "100"]) == 0


def test_verify_in_json_has_reason_and_seconds(save_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = answer(capsys, "verify", "120", "110")

    assert code == 1
    assert [one["is_valid"] for one in shown["checkpoints"]] == [False, True]
    assert all(one["took_s"] >= 0 for one in shown["checkpoints"])


def test_nothing_to_verify_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["checkpoints", "verify", "--save-dir", str(tmp_path)])

    assert code == 1
    assert capsys.readouterr().out == "there are no checkpoints\n"


@pytest.mark.parametrize(
    ("line", "form"),
    [
        (["--out", "model.pt"], "torch"),
        (["--out", "model.safetensors"], "safetensors"),
        (["--out", "model", "--format", "safetensors"], "safetensors"),
        (["--out", "model", "--format", "dcp"], "dcp"),
    ],
)
def test_export_writes_the_model_in_the_format_that_is_asked_for(
    tmp_path: Path, line: list[str], form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = net(seed=1)
    save(tmp_path / "save", {"model": trained})

    code, reported = answer(capsys, "export", "save", *line)

    assert code == 0
    assert (reported["format"], reported["tensors"], reported["boundary"]) == (form, len(trained.state_dict()), 120)
    written = Path(reported["file"])
    assert reported["bytes"] == sum(file.stat().st_size for file in (written, *written.rglob("*")) if file.is_file())
    if form == "torch":
        net(seed=2).load_state_dict(torch.load(reported["file"], weights_only=True), strict=True)
    if form == "dcp":
        with pytest.warns(UserWarning, match="load in a single process"):
            load(found := net(seed=2).state_dict(), checkpoint_id=written, no_dist=True)
        assert all(torch.equal(tensor, found[name]) for name, tensor in trained.state_dict().items())


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = save(tmp_path / "save", {"model": net(1)})
    flip_byte(taken.file(TENSORS), 400)

    code = main(["checkpoints", "export", str(taken.path), "--out", str(tmp_path / "model.pt")])

    assert code == 2
    assert capsys.readouterr().err == (
        f"ttprun: error: checkpoint '{taken.path}' cannot be used: {TENSORS} is damaged: its content differs from what "
        "was written; choose another\n"
    )
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["list", "--save-dir", "none"], "there is no save directory '{here}/none'; name another with --save-dir"),
        (
            ["show", "step-00000111"],
            "there is no checkpoint 'step-00000111' in '{here}/save'; did you mean 'step-00000110'?",
        ),
        (["export", "110"], "missing option '--out'; see 'ttprun checkpoints --help'"),
        (["export", "110", "--out", "x"], "checkpoint '{here}/save/step-00000110' names no model; export it from "),
        (["erase"], "no such command 'erase'; see 'ttprun checkpoints --help'"),
        ([], "missing command; see 'ttprun checkpoints --help'"),
    ],
)
def test_what_is_wrong_with_the_line_is_said_in_one(
    save_dir: Path, line: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["checkpoints", *line])

    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("ttprun: error: " + complaint.format(here=save_dir.parent))
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "complaint"),
    [("save_dir: null", "has no save directory; name one with --save-dir"), ("[", "configuration of run")],
)
def test_a_run_that_does_not_say_where_it_saves_is_named(
    tmp_path: Path, config: str, complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    RunDirectory.create("r1").config.write_text(config)

    code = main(["checkpoints", "list"])

    assert code == 2
    assert complaint in capsys.readouterr().err


def test_the_answer_waits_for_no_import_of_torch(save_dir: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ttprun", "checkpoints", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == 0
    assert "ttprun" in imported
    assert imported.isdisjoint({"torch", "numpy"})


def test_the_list_fits_a_terminal_of_80_columns(save_dir: Path) -> None:
    terminal, stdout = os.openpty()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}

    command = [sys.executable, "-m", "ttprun", "checkpoints", "list"]
    done = subprocess.run(command, stdout=stdout, check=False, env=plain | {"TERM": "xterm-256color"})
    text = os.read(terminal, 100_000).decode()
    os.close(stdout)
    os.close(terminal)

    assert done.returncode == 0
    assert "…" not in text
    assert "\x1b[31mincomplete" in text.replace("\x1b[0m", "")


def test_that_a_launch_could_not_go_on_from_a_checkpoint_is_shown_with_its_reason(
    save_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note(save_dir / "step-00000110", "a fingerprint", "rank 1: it stands elsewhere", is_refused=True)

    main(["checkpoints", "list"])
    text = capsys.readouterr().out
    shown = answer(capsys, "show", "110")[1]

    assert "step-00000110: a launch could not resume from it: rank 1: it stands elsewhere" in text.splitlines()
    assert shown["refusals"] == ["rank 1: it stands elsewhere"]
