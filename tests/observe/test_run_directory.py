"""The directory that a run leaves behind."""

import os
import socket
import stat
from pathlib import Path

import pytest

from ttprun.errors import ConfigError
from ttprun.observe.run_directory import RunDirectory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_directory_is_its_owners_alone(tmp_path: Path) -> None:
    run = RunDirectory.create("r1", base=tmp_path / "runs")

    assert run.path == tmp_path / "runs" / "r1"
    assert mode(run.path) == 0o700
    assert mode(run.control_token) == 0o600
    assert run.logs.is_dir()
    assert len(run.read_token()) == 32


def test_git_ignores_a_folder_of_runs_that_is_new_and_what_lies_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()

    for base in (tmp_path / "new", tmp_path / "old", tmp_path / "new"):
        RunDirectory.create(f"r{len(list(base.glob('*')))}", base=base)
    RunDirectory.create("r1", tmp_path / "named")

    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    assert [path.parent.name for path in tmp_path.rglob(".gitignore")] == ["new"]


def test_the_directory_of_an_ended_run_is_used_again_without_its_old_status(tmp_path: Path) -> None:
    ended = RunDirectory.create("r1", tmp_path / "out")
    old_token = ended.read_token()
    ended.status.write_text("{}")
    ended.events.write_text('{"event": "old"}\n')
    ended.release()

    again = RunDirectory.create("r2", tmp_path / "out")

    assert again.read_token() != old_token
    assert not again.status.exists()
    assert again.events.read_text() == '{"event": "old"}\n'
    assert mode(again.path) == 0o700


def test_a_directory_that_somebody_else_could_change_is_refused_with_the_cure(tmp_path: Path) -> None:
    wide, link = tmp_path / "wide", tmp_path / "link"
    wide.mkdir(mode=0o755)
    link.symlink_to(wide)
    (tmp_path / "file").write_text("")

    for path, why in ((wide, r"open to other users \(mode 0755\); chmod 700 it"), (link, "is a symbolic link")):
        with pytest.raises(ConfigError, match=why):
            RunDirectory.create("r1", path)
    with pytest.raises(ConfigError, match="is a file; name another"):
        RunDirectory.create("r1", tmp_path / "file")
    assert list(wide.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_the_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, -1)

    with pytest.raises(ConfigError, match="belongs to another user \\(uid 12345\\)"):
        RunDirectory.create("r1", tmp_path / "theirs")


def test_the_directory_of_a_living_run_is_refused(tmp_path: Path) -> None:
    living = RunDirectory.create("r1", tmp_path / "out")

    with pytest.raises(ConfigError, match="belongs to a run that is still alive; choose another"):
        RunDirectory.create("r2", living.path)


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("lr: 0.1")
    before = mode(tmp_path)

    with pytest.raises(ConfigError, match="holds other files; name a new one with --run-dir"):
        RunDirectory.create("r1", tmp_path)

    assert mode(tmp_path) == before
    assert (tmp_path / "config.yaml").read_text() == "lr: 0.1"


def test_a_place_that_cannot_be_written_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"file/out' cannot be written \(Not a directory\); choose another"):
        RunDirectory.create("r1", tmp_path / "file" / "out")


def test_a_run_that_cannot_start_leaves_no_directory(tmp_path: Path) -> None:
    run = RunDirectory.create("r1", base=tmp_path)

    run.discard()

    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_was_there_before_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o700)
    run = RunDirectory.create("r1", tmp_path / "out")

    run.discard()

    assert (tmp_path / "out").is_dir()


def test_a_run_is_found_by_id_by_directory_or_as_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    newer = RunDirectory.create("a")
    older = RunDirectory.create("b")
    os.utime(older.control_token, (1, 1))
    elsewhere = RunDirectory.create("c", tmp_path / "elsewhere")

    assert RunDirectory.find().path == newer.path
    assert RunDirectory.find("b").path == older.path
    assert RunDirectory.find("elsewhere").path == elsewhere.path
    assert RunDirectory.find(str(elsewhere.path)).path == elsewhere.path


def test_a_run_that_is_not_there_is_answered_with_the_one_that_may_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r"^there is no run in 'ttprun-runs'; "):
        RunDirectory.find()

    RunDirectory.create("night")

    with pytest.raises(ConfigError, match=r"^there is no run 'nihgt'; did you mean 'night'\?$"):
        RunDirectory.find("nihgt")


def test_the_control_socket_works_in_a_directory_with_a_very_long_name(tmp_path: Path) -> None:
    run = RunDirectory.create("r1", tmp_path / ("d" * 200))

    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with run.control_address() as address:
            server.bind(address)
        server.listen()
        with run.control_address() as address:
            client.connect(address)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"hello")
        assert client.recv(5) == b"hello"
    assert run.control_socket.is_socket()


def test_of_a_job_on_several_nodes_the_folder_of_this_node_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in ("node-a", "node-b"):
        RunDirectory.create(f"77/{node}", base=tmp_path)
    monkeypatch.setenv("SLURMD_NODENAME", "node-b")

    assert RunDirectory.find("77", base=tmp_path).path == tmp_path / "77" / "node-b"
    monkeypatch.setenv("SLURMD_NODENAME", "login")
    assert RunDirectory.find("77", base=tmp_path).path == tmp_path / "77" / "node-a"
    newest = RunDirectory.newest(base=tmp_path)
    assert newest is not None
    assert newest.path.parent == tmp_path / "77"
