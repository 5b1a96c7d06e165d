"""`ttprun` itself: help, the choice of a command, and what stays unimported."""

import json
import re
import shlex
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from tests.cli.test_status_command import status_of
from tests.cli.test_topology_command import MESH
from ttprun.cli.command_line import GROUPS, build_parser, torchrun_options
from ttprun.cli.main import OF_TORCHRUN, main
from ttprun.config import Config
from ttprun.config_sources import FILE_ONLY, option_name
from ttprun.observe.run_directory import RunDirectory, replace_file
from ttprun.observe.status import write_status


def test_help_teaches_commands_options_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--help"])

    text = capsys.readouterr().out
    assert code == 0
    assert "ttprun --standalone --nproc-per-node 4 train.py" in text
    assert all(
        word in text
        for word in ("status", "inject-fault", "checkpoints", "doctor", "explain", "--standbys", "--rungs", "--config")
    )
    assert max(map(len, text.splitlines())) <= 120


def test_the_help_shows_every_option_once_in_its_group_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])

    text = " ".join(capsys.readouterr().out.split())
    grouped = [key for keys in GROUPS.values() for key in keys.split()]
    assert sorted(grouped) == sorted(set(Config.model_fields) - {"user_paths", *FILE_ONLY})
    assert [title for title in GROUPS if f" {title}: " not in text] == []
    assert [key for key in grouped if f" {option_name(key)}" not in text] == []
    assert "(default: 1)" in text
    assert "(default: 25%)" in text
    assert "(default: reconnect, rerun, replace, rewind, resize, restart, persist)" in text
    assert "(default: None)" not in text


def test_the_options_of_torchrun_that_the_help_shows_are_torchruns_with_its_defaults() -> None:
    known = torchrun_options(build_parser())
    shown = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", OF_TORCHRUN)} - {"help", "elastic"}
    defaults = dict(re.findall(r"^  --([a-z-]+) .*\(default: ([^)]+)\)", OF_TORCHRUN, re.MULTILINE))

    assert shown <= set(known)
    assert {str(known[name.replace("-", "_")]) for name in defaults} == set(defaults.values())
    assert len(defaults) == 4


def test_without_arguments_the_help_is_shown_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = main([])

    assert code == 2
    assert "examples:" in capsys.readouterr().out


def test_help_of_run_shows_torchruns_options_and_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["run", "--help"])

    text = capsys.readouterr().out
    assert ending.value.code == 0
    assert "--rdzv-backend" in text
    assert "--standbys" in text


@pytest.mark.parametrize(
    "command", ["status", "inject-fault", "recall", "check", "drill", "checkpoints", "doctor", "explain", "guide"]
)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([command, "--help"])

    assert code == 0
    assert f"ttprun {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["status", "--jsn"], "ttprun: error: no such option: --jsn"),
        (["inject-fault"], "ttprun: error: missing argument"),
        (["inject-fault", "kill", "--rank", "x"], "ttprun: error: invalid value for '--rank'"),
    ],
)
def test_a_wrong_option_of_a_command_is_one_line(
    line: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(line)

    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(complaint)
    assert error.endswith(f"see 'ttprun {line[0]} --help'\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "status",
        "checkpoints list",
        "inject-fault list",
        "drill --help",
        "drill none.yaml",
        "guide configuration",
    ],
)
def test_what_must_answer_at_once_imports_no_torch(line: str, tmp_path: Path) -> None:
    program = f"import sys, ttprun.cli.main as m; m.main({line.split()!r}); sys.exit(3 * ('torch' in sys.modules))"

    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=False)

    assert done.returncode == 0


def test_starting_a_command_loads_few_modules_and_none_of_other_packages() -> None:
    program = "import sys; there = {*sys.modules}; import ttprun.cli.main; print(*sys.modules.keys() - there)"

    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()

    assert {name.partition(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "ttprun"}
    assert len(loaded) <= 80


@pytest.mark.parametrize("line", [["--help"], ["explain"], ["status", "nope"]])
def test_closed_outputs_are_no_error_of_their_own(line: list[str]) -> None:
    command = shlex.join([sys.executable, "-m", "ttprun", *line])

    closed = subprocess.run(["/bin/sh", "-c", f"{command} >&- 2>&-"], check=False)

    assert closed.returncode == (2 if line[0] == "status" else 0)


BUSY_AT_THE_END = """
import atexit, threading
import ttprun.cli.main as m

def main():
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def ask():
        while True:
            store.check(["key"])

    for _ in range(3):
        threading.Thread(target=ask, daemon=True).start()
    atexit.register(print, "and done", end="")
    print("said", end=" ")
    return 143

m.main = main
m.program()
"""


def test_a_thread_that_is_in_a_store_at_the_end_does_not_change_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY_AT_THE_END], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (143, "said and done", "")


# In a fork for each, so that torch is imported once; {script} is to be found in the current folder.
WITHOUT_A_READER = """
import json, os, sys
import torch
import ttprun.cli.main as m, ttprun.cli.run

for number, (words, output) in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        read_end, write_end = os.pipe()
        os.close(read_end)
        os.dup2(write_end if output == "closed pipe" else os.open("/dev/full", os.O_WRONLY), 1)
        os.dup2(os.open(f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv[1:] = words.split()
        m.program()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
COMMANDS_THAT_PRINT = [
    "--dry-run train.py", "--print-config train.py", "run --help", "--help", "--version", "check --help",
    "drill --help", "inject-fault list", "explain", "explain no-step-yet", "guide", "guide limits",
    "status run", "status run --json", "status run --watch", "report run", "topology run",
]  # fmt: skip


def test_a_command_whose_output_nobody_reads_ends_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("open('started', 'w')")
    run = RunDirectory.create("run")
    write_status(run.status, status_of("done"))
    replace_file(run.topology, MESH.to_json())
    table = list(zip(COMMANDS_THAT_PRINT, cycle(("closed pipe", "full device")), strict=False))

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_READER], input=json.dumps(table), stdout=subprocess.PIPE, text=True, check=True
    )

    complaint = "ttprun: error: the output cannot be written (No space left on device)\n"
    expected = {"closed pipe": ("141", ""), "full device": ("1", complaint)}
    ends = zip(done.stdout.split(), (Path(f"{number}.err").read_text() for number in range(len(table))), strict=True)
    assert {case: end for case, end in zip(table, ends, strict=True) if end != expected[case[1]]} == {}
    assert not Path("started").exists()
