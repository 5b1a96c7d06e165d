"""`--print-config` and `--dry-run`: what a command line comes to, while nothing is started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.state.making import locked, take
from ttprun.cli.main import main
from ttprun.config import Config
from ttprun.config_sources import read_config_file, resolve


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch sets it, for all that this process starts later
    (tmp_path / "train.sh").write_text("echo $LR")
    (tmp_path / "train.py").write_text("raise SystemExit('the script has run')\n")


def origins_in(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ *(\w+): .*  # (.+)$", text, re.MULTILINE))


def test_every_setting_is_printed_with_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text("{standbys: 2, buddy: off, verify_every: 3, launch: {max_restarts: 3, tee: 3}}")
    monkeypatch.setenv("TTPRUN_VERIFY_EVERY", "7")
    monkeypatch.setenv("PET_ROLE", "x")

    code = main(["--config", "job.yaml", "--print-config", "--nproc-per-node", "2", "--buddy", "on", "train.py"])

    text = capsys.readouterr().out
    found, printed = origins_in(text), yaml.safe_load(text)
    assert code == 0
    assert not (tmp_path / "ttprun-runs").exists()
    assert list(printed) == list(Config.model_fields)
    assert (printed["standbys"], printed["buddy"], printed["verify_every"]) == (2, "on", 7)
    assert (found["standbys"], found["buddy"], found["verify_every"]) == ("job.yaml", "--buddy", "TTPRUN_VERIFY_EVERY")
    assert (found["max_restarts"], found["role"], found["nproc_per_node"]) == (
        "job.yaml",
        "PET_ROLE",
        "--nproc-per-node",
    )
    assert (found["run_id"], found["master_addr"]) == ("default", "default")


def test_what_is_printed_can_be_used_as_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--print-config", "--nproc-per-node", "2", "--rungs", "replace,persist", "--on-nan", "stop", "train.py"])

    (tmp_path / "again.yaml").write_text(capsys.readouterr().out)
    again = resolve([read_config_file("again.yaml")], {}, {})
    assert again == Config(rungs=["replace", "persist"], on_nan="stop", launch=again.launch)
    assert again.launch["nproc_per_node"] == "2"


@pytest.mark.parametrize(
    ("line", "key", "origin"),
    [
        (["--nnodes", "2", "--snapshot-every", "5steps"], "snapshot_every", "--snapshot-every, limited: several nodes"),
        (["--mindio", "--nproc-per-node", "2"], "verify_every", "default, limited: --mindio"),
        (["--nproc-per-node", "1"], "rungs", "default, limited: one rank alone"),
        (["--run-path"], "rungs", "--no-python or --run-path: no rank can be replaced"),
    ],
)
def test_what_the_launcher_narrows_for_a_kind_of_job_is_printed_as_it_will_be_used(
    line: list[str], key: str, origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--print-config", *line, "train.py"])

    assert origins_in(capsys.readouterr().out)[key] == origin


def test_a_dry_run_says_what_would_be_started_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take(locked(tmp_path / "ckpt"), 10)
    before = sorted(tmp_path.rglob("*"))

    code = main(["--dry-run", "--nproc-per-node", "3", "--save-dir", "ckpt", "train.py", "--lr", "1"])

    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert (code, sorted(tmp_path.rglob("*"))) == (0, before)
    assert said["ranks"] == "3: 3 per node, 1 node"
    assert said["each"].endswith("-u train.py --lr 1")
    assert said["run"] == "ttprun-runs/RUN_ID/"
    assert said["checkpoints"] == "ckpt; resumes from step-00000010 if the script accepts it"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["trian.py"], "there is no script 'trian.py'; did you mean 'train.py'?"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node: 0 ranks; give 1 or more"),
        (["--http", "no.such.host.invalid:1", "train.py"], "--http: cannot listen on 'no.such.host.invalid:1'"),
        (["--save-dir", "train.py/ckpt", "train.py"], "--save-dir: '{here}/train.py/ckpt' cannot be written"),
        (["train.sh"], "'train.sh' is no Python script, but one for a shell; --no-python runs it as it is"),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(
    line: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--dry-run", *line])

    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ttprun: error: {complaint.format(here=Path.cwd())}")
    assert error.count("\n") == 1


def test_a_check_has_no_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--dry-run", "train.py"])

    assert code == 2
    assert capsys.readouterr().err == (
        "ttprun: error: --dry-run: not for a check, which runs the script; ttprun --dry-run SCRIPT\n"
    )


@pytest.mark.parametrize("option", ["--dry-run", "--print-c"])
def test_a_bug_of_ours_starts_nothing_where_no_run_is_asked_for(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ttprun.cli.run.asked_instead", lambda arguments: 1 / 0)
    monkeypatch.setattr("torch.distributed.run.run", lambda arguments: pytest.fail("the script was started"))

    code = main([option, "train.py"])

    assert code == 1
    assert "(ZeroDivisionError: division by zero); nothing was started" in capsys.readouterr().err
