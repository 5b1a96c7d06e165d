"""The run command up to the agent: what it reads, what it checks, what it leaves in the run directory."""

import os
import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from tests.cli.fakes import FakeLaunch
from ttprun.cli.command_line import build_parser, torchrun_options
from ttprun.cli.main import main
from ttprun.cli.run import fill_rendezvous, read_command_line
from ttprun.config_sources import OF_TORCHRUN
from ttprun.observe.status import read_status


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # torch sets it, for all that this process starts later, when there are several ranks
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text("raise SystemExit('the script has run')\n")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch(exit_code=7)
    monkeypatch.setitem(sys.modules, "ttprun.agent.launcher.launch", fake)
    return fake


def test_options_before_the_script_are_ours_and_those_after_it_the_scripts() -> None:
    invocation = read_command_line(
        ["--standbys", "2", "--nproc-per-node=3", "train.py", "--standbys", "9", "--nproc-per-node=9", "-x"]
    )

    assert invocation.config.standbys == 2
    assert invocation.torchrun.nproc_per_node == "3"
    assert invocation.torchrun.training_script_args == ["--standbys", "9", "--nproc-per-node=9", "-x"]


def test_launch_options_of_a_file_are_weaker_than_pet_variables_and_those_than_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(
        "launch: {nproc-per-node: 2, max_restarts: 2, role: a, standalone: true, tee: 3}"
    )
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    monkeypatch.setenv("PET_ROLE", "variable")

    torchrun = read_command_line(["--config", "job.yaml", "--role", "line", "train.py"]).torchrun

    assert torchrun.nproc_per_node == "2"
    assert torchrun.max_restarts == 3
    assert torchrun.role == "line"
    assert torchrun.standalone is True
    assert torchrun.tee == "3"


def test_a_launch_list_keeps_the_commas_inside_its_items(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("launch: {duplicate_stdout_filters: ['a,b', c]}")

    torchrun = read_command_line(["--config", "job.yaml", "train.py"]).torchrun

    assert torchrun.duplicate_stdout_filters == ["a,b", "c"]


def test_settings_in_the_scripts_own_file_are_used_and_said(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("lr: 0.1\nttprun: {standbys: 4, launch: {nproc_per_node: 2}}")
    (tmp_path / "first.yaml").write_text("{standbys: 3, record_limit_mib: 8}")

    invocation = read_command_line(["--config", "first.yaml", "train.py", "--config", "job.yaml"])

    assert (invocation.config.standbys, invocation.config.record_limit_mib) == (4, 8)
    assert invocation.torchrun.nproc_per_node == "2"
    assert invocation.torchrun.training_script_args == ["--config", "job.yaml"]
    assert invocation.notices == ("using the 'ttprun:' section of job.yaml",)


@pytest.mark.parametrize("flag", ["--no-python", "--run-path"])
def test_what_is_no_rank_of_ours_is_not_repaired_and_that_is_said(flag: str) -> None:
    invocation = read_command_line([flag, "train.py"])

    assert invocation.config.rungs == ["restart"]
    assert invocation.notices == (f"{flag}: repair is off; a failure restarts the whole group",)


@pytest.mark.parametrize(
    ("line", "backend", "endpoint"),
    [
        ([], "c10d", "localhost:0"),
        (["--standalone", "--rdzv-endpoint", "other:1"], "c10d", "localhost:0"),
        (["--nnodes", "1:1", "--nproc-per-node", "2"], "c10d", "localhost:0"),
        (["--nnodes", "2"], "static", ""),
        (["--master-port", "29501"], "static", ""),
        (["--rdzv-endpoint", "host:1"], "static", "host:1"),
    ],
)
def test_one_node_without_an_address_meets_itself_on_a_free_port_as_under_torchrun(
    line: list[str], backend: str, endpoint: str
) -> None:
    torchrun = rendezvous_of(line)

    assert (torchrun.rdzv_backend, torchrun.rdzv_endpoint) == (backend, endpoint)
    assert torchrun.master_port == (29501 if "29501" in line else 29500)


def rendezvous_of(line: list[str]) -> Namespace:
    """torchrun's options as they are after the rendezvous is filled in."""
    invocation = read_command_line([*line, "train.py"])
    fill_rendezvous(invocation.torchrun, invocation.launch_origins)
    return invocation.torchrun


KUBEFLOW = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("line", "rank", "conf"),
    [
        ([], "0", "is_host=1,read_timeout=600"),
        (["--nnodes", "2:3"], "1", "is_host=0,read_timeout=600"),
        (["--rdzv-conf", "read_timeout=9"], "1", "is_host=0,read_timeout=600,read_timeout=9"),
        (["--rdzv-id", "job"], None, "read_timeout=600"),
    ],
)
def test_the_variables_of_kubeflow_mean_a_rendezvous_that_takes_in_who_comes_later(
    monkeypatch: pytest.MonkeyPatch, line: list[str], rank: str | None, conf: str
) -> None:
    for name, value in (KUBEFLOW | {"PET_NODE_RANK": rank}).items():
        if value is not None:
            monkeypatch.setenv(name, value)

    torchrun = rendezvous_of(line)

    assert (torchrun.rdzv_backend, torchrun.rdzv_endpoint) == ("c10d", "train-node-0-0.train:29400")
    assert (torchrun.rdzv_conf, torchrun.node_rank) == (conf, 0)


@pytest.mark.parametrize(
    ("line", "backend", "endpoint"),
    [
        (["--rdzv-backend", "static"], "static", ""),
        (["--master-addr", "other"], "static", ""),
        (["--rdzv-endpoint", "other:1"], "static", "other:1"),
        (["--nnodes", "1"], "static", ""),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "other:1"], "c10d", "other:1"),
    ],
)
def test_what_is_named_beside_the_variables_of_kubeflow_is_what_torchrun_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, line: list[str], backend: str, endpoint: str
) -> None:
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)

    torchrun = rendezvous_of(line)

    assert (torchrun.rdzv_backend, torchrun.rdzv_endpoint) == (backend, endpoint)
    assert (torchrun.rdzv_conf, torchrun.node_rank) == ("", 1)


def test_the_agent_gets_torchs_own_reading_and_the_run_directory_says_what_was_asked(
    agent: FakeLaunch, tmp_path: Path
) -> None:
    code = main(["run", "--run-dir", "out", "--run-id", "r1", "--nproc-per-node", "2", "train.py", "--lr", "1"])

    assert code == 7
    [(config, launch_config, entrypoint, arguments, run)] = agent.calls
    assert (launch_config.nproc_per_node, entrypoint) == (2, sys.executable)
    assert arguments == ["-u", "train.py", "--lr", "1"]
    assert launch_config.logs_specs is not None
    assert launch_config.logs_specs.root_log_dir == str(tmp_path / "out" / "logs")
    assert run.path == tmp_path / "out"
    assert config.run_dir == str(run.path)
    text = run.config.read_text()
    assert text.startswith("# ttprun --run-dir out --run-id r1 --nproc-per-node 2 train.py --lr 1\n")
    assert yaml.safe_load(text)["launch"]["nproc_per_node"] == "2"
    status = read_status(run.status)
    assert (status.run_id, status.state, status.world_size, status.agent_pid) == ("r1", "starting", 2, os.getpid())
    run.release()


@pytest.mark.parametrize(
    ("line", "is_python"),
    [(["train.py", "-u"], True), (["--no-python", "sh", "-u", "x"], False), (["--no-python", sys.executable], False)],
)
def test_the_agent_learns_whether_ranks_run_python_whatever_their_arguments_look_like(
    agent: FakeLaunch, line: list[str], is_python: bool
) -> None:
    main(line)

    assert agent.is_python is is_python
    agent.calls[0][-1].release()


def test_an_argument_of_the_script_cannot_spoil_the_record_of_the_configuration(
    agent: FakeLaunch, tmp_path: Path
) -> None:
    main(["--run-dir", "out", "train.py", "two\nlines: x", "\udcff\x07"])

    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["standbys"] == 1
    agent.calls[0][-1].release()


def test_without_a_directory_the_run_is_kept_under_a_name_that_sorts_by_time(agent: FakeLaunch, tmp_path: Path) -> None:
    main(["train.py"])

    [run] = (tmp_path / "ttprun-runs").glob("[!.]*")
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{4}", run.name)
    agent.calls[0][-1].release()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (["statuss"], "there is no script 'statuss'; did you mean the command 'status'?"),
        (["trian.py"], "there is no script 'trian.py'; did you mean 'train.py'?"),
        (["--no-python", "trian"], "there is no program 'trian'; name one on PATH"),
        (["--nprocs", "2", "train.py"], "unknown option --nprocs; did you mean '--nproc-per-node'?"),
        (
            ["--standby-depth", "setup", "train.py"],
            "unknown option --standby-depth; it was removed, leave it out: a replacement runs the script's",
        ),
        (["--stanbys", "2", "train.py"], "unknown option --stanbys; did you mean '--standbys'?"),
        (["--nproc-per-nod3=2", "train.py"], "unknown option --nproc-per-nod3; did you mean '--nproc-per-node'?"),
        (["--standbys", "99", "train.py"], "--standbys: '99' is not valid; it should be less than or equal to 64"),
        (["--standbys", "-1", "train.py"], "--standbys: '-1' is not valid; it should be greater than or equal to 0"),
        (["--config", "no.yaml", "train.py"], "--config: there is no file 'no.yaml'; give a file"),
        (["--fault", "kill:rank=1", "train.py"], "fault 'kill:rank=1' is not allowed in this run; add --allow-faults"),
        (
            ["--allow-faults", "--fault", "kill:rank=1", "train.py"],
            "fault 'kill:rank=1': there is no such rank; use ranks 0",
        ),
        (["--nproc-per-node", "gpu", "train.py"], "--nproc-per-node: 'gpu' is not valid (Cuda is not available); see"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node: 0 ranks; give 1 or more"),
        (["--nnodes", "two", "train.py"], "--nnodes: 'two' is not valid (invalid literal"),
        (["--nnodes", "3:1", "train.py"], "min_nodes must be > 0 and <= max_nodes"),
        (
            ["--nnodes", "1:2", "--mindio", "train.py"],
            "--mindio on several nodes is not supported yet; use one node, or",
        ),
        (["--max-restarts", "-1", "train.py"], "--max-restarts: -1 is below 0; give 0 or more"),
        (["--max-restarts", "x", "train.py"], "argument --max-restarts/--max_restarts: invalid int value: 'x'; see"),
        (["--monitor-interval", "0", "train.py"], "--monitor-interval: 0.0 is not an interval; give seconds above 0"),
        (["--monitor-interval", "nan", "train.py"], "--monitor-interval: nan is not an interval; give seconds above 0"),
        (["--tee", "x", "train.py"], "--tee: 'x' is not valid ("),
        (["--rdzv-backend", "c10", "train.py"], "--rdzv-backend: there is no 'c10'; did you mean 'c10d'?"),
        (["--rdzv-conf", "x", "train.py"], "The rendezvous configuration option 'x' must have a value specified; see"),
        (["--rdzv-endpoint", "host", "train.py"], "rendezvous endpoint 'host' has no port; give HOST:PORT"),
        (
            ["--signals-to-handle", "SIGTERM,SIGKILL", "train.py"],
            "--signals-to-handle: 'SIGTERM,SIGKILL' is not valid (no process can handle SIGKILL",
        ),
        ([""], "the name of the script is empty; name a script, or -m and a module"),
        (["."], "'.' is a directory; name a script"),
        (["--nproc-per-node", "99999999", "train.py"], "--nproc-per-node: 99999999 ranks need"),
        (["--event-log-handler", "x", "train.py"], "--event-log-handler: 'x' is not valid (torch has no such handler)"),
        (["--no-python", "-m", "true"], "Don't use both the '--no-python' flag and the '--module' flag"),
        (["--run-dir", "train.py/out", "train.py"], "run directory '"),
        (["--run-dir", ".", "train.py"], "run directory '"),
        (["--standalone"], "the following arguments are required: training_script"),
    ],
)
def test_bad_input_is_one_line_with_the_cure_and_nothing_is_started(
    agent: FakeLaunch, tmp_path: Path, capfd: pytest.CaptureFixture[str], line: list[str], complaint: str
) -> None:
    code = main(line)

    output = capfd.readouterr()
    assert code == 2
    assert output.err.startswith(f"ttprun: error: {complaint}")
    assert (output.err.count("\n"), output.out) == (1, "")
    assert agent.calls == []
    assert not list(tmp_path.glob("ttprun-runs/[!.]*"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("launch: {nproc-per-nod: 2}", "launch.nproc-per-nod: torchrun has no such option; did you mean 'nproc"),
        ("launch: {standalone: 1}", "launch.standalone: 1 is not valid; give true or false"),
        ("launch: {nproc_per_node: true}", "launch.nproc_per_node: True is not valid; give a value, not true or false"),
        ("launch: {max_restarts: many}", "launch.max_restarts: argument --max-restarts/--max_restarts: invalid"),
        ("launch: {start_method: frok}", "launch.start_method: argument --start-method/--start_method: invalid choice"),
        ("launch: {training_script: x}", "launch.training_script: torchrun has no such option; see 'ttprun run"),
    ],
)
def test_a_wrong_launch_option_in_a_file_is_laid_at_the_files_listener(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    (tmp_path / "job.yaml").write_text(text)

    code = main(["--config", "job.yaml", "train.py"])

    assert code == 2
    assert capfd.readouterr().err.startswith(f"ttprun: error: job.yaml: {complaint}")


@pytest.mark.parametrize("variable", ["PET_STANDALONE", "PET_MAX_RESTARTS"])
def test_a_pet_variable_that_is_no_number_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], variable: str
) -> None:
    monkeypatch.setenv(variable, "yes")

    code = main(["train.py"])

    assert code == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_a_user_path_that_is_not_there_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text("user_paths: [/nowhere]")

    code = main(["--config", "job.yaml", "train.py"])

    assert code == 2
    assert "user_paths: there is no directory '/nowhere'; correct the path" in capfd.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        ["--master-port={port}"],
        ["--rdzv-endpoint=127.0.0.1:{port}"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"],
        ["--nnodes=2", "--master-addr=0.0.0.0", "--master-port={port}"],
    ],
)
def test_a_rendezvous_port_in_use_is_found_before_anything_starts(
    agent: FakeLaunch, capfd: pytest.CaptureFixture[str], line: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        code = main([*(word.format(port=port) for word in line), "train.py"])

    assert code == 2
    assert f"error: rendezvous port {port} cannot be used (Address already in use); choose" in capfd.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        ["--nnodes=2", "--node-rank=1", "--master-port={port}"],
        ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}"],
        ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:{port}", "--rdzv-conf=is_host=0"],
        ["--standalone", "--rdzv-endpoint=localhost:{port}"],
    ],
)
def test_a_port_that_another_agent_may_hold_is_not_refused(agent: FakeLaunch, line: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code = main([*(word.format(port=other.getsockname()[1]) for word in line), "train.py"])

    assert code == 7
    agent.calls[0][-1].release()


def test_the_installed_command_answers_a_missing_script_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "ttprun", "no.py"], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr == f"ttprun: error: there is no script 'no.py'; it was looked for in {tmp_path}\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "train.py"]


def test_an_option_of_torchruns_among_our_keys_is_answered_with_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text("max-restarts: 3")
    (tmp_path / "other.yaml").write_text("keep_run: 3")

    codes = [main(["--config", name, "train.py"]) for name in ("job.yaml", "other.yaml")]

    first, second = capfd.readouterr().err.splitlines()
    assert codes == [2, 2]
    assert "write it under 'launch:'" in first
    assert "did you mean 'keep_runs'?" in second


def test_the_names_of_torchruns_options_are_torchruns(tmp_path: Path) -> None:
    assert {*OF_TORCHRUN.split()} >= {*torchrun_options(build_parser())}


def test_a_script_that_is_taken_for_the_value_of_an_option_is_named(
    agent: FakeLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--buddy", "train.py"])

    assert code == 2
    assert "--buddy: 'train.py' is a script, and the option needs a value before it" in capsys.readouterr().err


MEETS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29477"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (["--elastic", "--save-dir", "s"], "--elastic needs more than one node"),
        (["--elastic", "--nnodes", "1:3", *MEETS], "--elastic needs a directory that all nodes share"),
        (["--elastic", "--nnodes", "1:3", "--save-dir", "s"], "--elastic does not work with --rdzv-backend static"),
        (
            ["--elastic", "--nnodes", "1:3", *MEETS, "--save-dir", "s", "--rungs", "replace,persist"],
            "--elastic needs the rung 'restart'",
        ),
        (["--verify-steps", "1/9", "--standbys", "0"], "--verify-steps needs a standby; start it with --standbys 1"),
        (["--standby-context", "--standbys", "0"], "--standby-context needs a standby; start it with --standbys 1"),
        (["--verify-steps", "1/9", "--nnodes", "2", *MEETS], "add ',before': 1/9,before"),
        (["--verify-steps", "1/9,before", "--nnodes", "2", *MEETS], "name it (--save-dir)"),
        (["--verify-steps", "1/9", "--rungs", "replace"], "--verify-steps needs the rung 'rewind'"),
        (["--verify-steps", "9"], "--verify-steps"),
        (["--buddy", "node"], "--buddy node keeps mirrors on the next node, and there is one only"),
        (["--elastic", "--nnodes", "1:3", *MEETS, "--save-dir", "s", "--mindio"], "cannot be combined with --mindio"),
        (["--discovery", "cat hosts"], "--discovery is for jobs whose nodes join and leave; add --elastic"),
    ],
)
def test_what_an_elastic_job_lacks_is_refused_in_one_line_before_anything_starts(
    agent: FakeLaunch, capsys: pytest.CaptureFixture[str], line: list[str], what: str
) -> None:
    code = main([*line, "train.py"])

    assert code == 2
    assert what in capsys.readouterr().err


def test_all_errors_of_files_options_and_torchruns_options_are_printed_a_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("stanbys: 2\nlaunch: {nprocs: 2, tee: null, standalone: 1, max-restarts: many}")

    code = main(["--config", "job.yaml", "--config", "no.yaml", "--keep-runs", "0", "train.py"])

    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert [line.partition("; ")[0].removeprefix("ttprun: error: ") for line in lines] == [
        "--config: there is no file 'no.yaml'",
        "job.yaml: stanbys: unknown",
        "job.yaml: launch: tee is None",
        "--keep-runs: '0' is not valid",
        "job.yaml: launch.nprocs: torchrun has no such option",
        "job.yaml: launch.standalone: 1 is not valid",
        "job.yaml: launch.max-restarts: argument --max-restarts/--max_restarts: invalid int value: 'many'",
    ]
    assert all("; " in line for line in lines)


def test_all_values_of_torchruns_options_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    code = main(["--nnodes", "some", "--tee", "9", "--max-restarts", "-1", "train.py"])

    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert [line.split(":")[2].strip() for line in lines] == ["--nnodes", "--tee", "--max-restarts"]
