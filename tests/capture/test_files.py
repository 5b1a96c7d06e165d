"""Files that a script writes: after a replacement they hold what an undisturbed run leaves in them, each line once.

Two lives, each in a process of its own: one is lost in the middle, the other runs the script from the top, in replay up
to a boundary and live from there on.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import fsspec
import msgpack
import numpy as np
import pytest
import safetensors.torch
import torch

from tests.rank.fakes import RECORD_BYTES, become, make_session
from tests.rank.processes import run_alone
from ttprun.capture.effects import file_system, script_files
from ttprun.capture.records.recorder import Recorder
from ttprun.introspect import ownership
from ttprun.introspect.current_rank import LIVE
from ttprun.protocol.board import Board, Field
from ttprun.rank.bootstrap import patch_table

STEPS = 6
Habit = Callable[[str], Iterator[None]]
HABITS: dict[str, Habit] = {}


def habit(function: Habit) -> Habit:
    """A way to write files: a generator that writes something in each step; its file is `path`."""
    HABITS[function.__name__.replace("_", " ")] = function
    return function


def line(step: int) -> str:
    return f"step {step} " + "x" * step + "\n"


@habit
def a_log_that_is_held_open_for_appending(path: str) -> Iterator[None]:
    log = open(path, "a")  # noqa: SIM115 - as people write it
    for step in range(STEPS):
        log.write(line(step))
        yield
    log.close()


@habit
def a_log_that_is_flushed_at_each_line(path: str) -> Iterator[None]:
    with open(path, "a", buffering=1, encoding="utf-8") as log:
        for step in range(STEPS):
            log.write(line(step))
            print("é", step, file=log)
            yield


@habit
def a_log_that_is_opened_for_appending_each_line(path: str) -> Iterator[None]:
    for step in range(STEPS):
        with open(path, "a") as log:
            log.write(line(step))
        yield


@habit
def a_log_that_is_closed_by_being_dropped(path: str) -> Iterator[None]:
    for step in range(STEPS):
        open(path, "a").write(line(step))  # noqa: SIM115 - as people write it
        assert line(step) in pathlib.Path(path).read_text()
        yield


@habit
def a_log_that_is_opened_by_pathlib(path: str) -> Iterator[None]:
    for step in range(STEPS):
        with pathlib.Path(path).open("a") as log:
            log.write(line(step))
        yield


@habit
def bytes_without_a_buffer(path: str) -> Iterator[None]:
    with open(path, "ab", buffering=0) as log:
        for step in range(STEPS):
            log.write(line(step).encode())
            yield


@habit
def the_logging_module(path: str) -> Iterator[None]:
    logger = logging.Logger("training")
    handler = logging.FileHandler(path)
    logger.addHandler(handler)
    for step in range(STEPS):
        logger.warning("step %d", step)
        yield
    handler.close()


@habit
def a_log_that_was_there_before(path: str) -> Iterator[None]:
    with open(path, "a+") as log:
        for step in range(STEPS):
            log.write(line(step))
            log.flush()
            log.seek(0)
            assert (
                log.read().endswith(line(step))
                or script_files.current() is None
                or not script_files.current().mode.is_live
            )
            yield


@habit
def a_log_that_is_begun_anew(path: str) -> Iterator[None]:
    with open(path, "w") as log:
        for step in range(STEPS):
            log.write(line(step))
            yield


@habit
def a_file_that_is_cut_short(path: str) -> Iterator[None]:
    with open(path, "w+") as log:
        for step in range(STEPS):
            log.seek(0)
            log.write(line(STEPS - step))
            log.truncate()
            yield


@habit
def a_file_that_is_written_anew_in_each_step(path: str) -> Iterator[None]:
    for step in range(STEPS):
        pathlib.Path(path).write_text(json.dumps({"step": step}))
        yield


@habit
def a_file_that_takes_anothers_place(path: str) -> Iterator[None]:
    for step in range(STEPS):
        with open(path + ".new", "w") as fresh:
            fresh.write(line(step))
        os.replace(path + ".new", path)
        yield


@habit
def a_log_that_fsspec_opens_for_appending(path: str) -> Iterator[None]:
    for step in range(STEPS):
        with fsspec.filesystem("file").open(path, "a") as log:
            log.write(line(step))
        yield


@habit
def a_file_that_takes_anothers_place_in_a_transaction_of_fsspec(path: str) -> Iterator[None]:
    disk = fsspec.filesystem("file")
    for step in range(STEPS):
        with disk.transaction, disk.open(path, "wb") as fresh:
            fresh.write(line(step).encode())
        yield


@habit
def arrays(path: str) -> Iterator[None]:
    for step in range(STEPS):
        with open(path, "wb") as file:
            np.save(file, np.full(3, step))
        yield


def live(write: Habit, path: str, fds: list[int], lost_at: tuple[int, int] | None, begin_at: int | None) -> None:
    """A rank's life.

    lost_at   (step, boundaries recorded) at which it is lost; None: nowhere
    begin_at  boundary up to which it is a replay; None: it is none
    """
    recorder, board = Recorder(fds[1], RECORD_BYTES), Board(fds[0], 1)
    session = make_session(recorder=recorder, board=board, world_size=1)
    become(session)
    if begin_at is not None:
        session.mode = SimpleNamespace(is_live=False, is_alone=True, newest_step=0)  # type: ignore[assignment]
        file_system.watch()
    for step, _ in enumerate(write(path)):
        boundary = step + 1
        if lost_at is not None and lost_at[1] < boundary and lost_at[0] == step:
            os._exit(9)  # what is buffered is lost
        if begin_at is None or boundary > begin_at:
            recorder.write(boundary, msgpack.packb(script_files.positions()), [])
            board.set(0, Field.RECORDED, boundary)
        if lost_at is not None and lost_at[0] == step:
            os._exit(9)
        if boundary == begin_at:
            found = recorder.read(boundary)
            assert found is not None
            script_files.unmute(session, msgpack.unpackb(found[0]), boundary, script_files.clock_ns())
            session.mode = LIVE


def in_child(act: Callable[..., None], *args: Any) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act(*args)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


LOSSES = {
    # name: (step and recorded boundaries at the loss, boundary at which the replacement goes live)
    "in a step": ((3, 3), 3),
    "behind its record": ((3, 4), 4),
    "with a record that the others have not": ((3, 4), 3),
    "twice": ((3, 3), 3),
}
EVERYWHERE = ("in a step", "behind its record")
CASES = [(name, loss) for name in HABITS for loss in LOSSES if loss in EVERYWHERE or "append" in name]


def outcomes(directory: str) -> dict[tuple[str, str], tuple[str, str, list[int]]]:
    """By habit and loss: (what the file holds, what it would hold, how the lives ended)."""
    ownership.add_user_directory(os.path.dirname(__file__))
    assert patch_table.apply_all(with_replay=True) == []
    found = {}
    for name, write in HABITS.items():
        whole = f"{directory}/{name}"
        begin_file(whole)
        ended = in_child(live, write, whole, [Board.create(1)[0], Recorder.create(RECORD_BYTES)], None, None)
        for loss, (lost_at, begin_at) in LOSSES.items():
            if (name, loss) in CASES:
                broken = f"{directory}/{name} {loss}"
                codes = lives_of(write, broken, lost_at, begin_at, is_lost_again=loss == "twice")
                found[name, loss] = (read(broken), read(whole), [ended, *codes])
    return found


def lives_of(write: Habit, path: str, lost_at: tuple[int, int], begin_at: int, is_lost_again: bool) -> list[int]:
    """A rank is lost and replaced; returns how its processes ended."""
    begin_file(path)
    board_fd, board = Board.create(1)
    fds = [board_fd, Recorder.create(RECORD_BYTES)]
    codes = [in_child(live, write, path, fds, lost_at, None)]
    board.set(0, Field.RECORDED, begin_at)
    if is_lost_again:
        codes.append(in_child(live, write, path, fds, (4, 4), begin_at))
        begin_at = 4
    codes.append(in_child(live, write, path, fds, None, begin_at))
    for fd in fds:
        os.close(fd)
    return codes


def begin_file(path: str) -> None:
    pathlib.Path(path).write_text("old line\n")


def read(path: str) -> str:
    return pathlib.Path(path).read_bytes().decode("latin-1")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(outcomes, str(tmp_path_factory.mktemp("files")))


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_a_file_holds_after_a_replacement_what_it_would_hold_without(name: str, loss: str, left: Any) -> None:
    found, expected, codes = left[name, loss]

    assert found == expected
    assert codes == [0, *[9] * (len(codes) - 2), 0]


def look_at_what_was_written(directory: str) -> dict[str, bool]:
    """Which files a replacement writes again: it goes live at boundary 3, and comes to the next one in the end."""
    paths = {name: f"{directory}/{name}" for name in ("before", "since", "by the replacement", "never")}
    moment = script_files.clock_ns()
    for name, at_ns in (("before", moment - 1), ("since", moment)):
        pathlib.Path(paths[name]).touch()
        os.utime(paths[name], ns=(at_ns, at_ns))
    session = make_session()
    session.applied = 3
    script_files.unmute(session, [], 3, moment)
    pathlib.Path(paths["by the replacement"]).touch()
    later = script_files.clock_ns() + 10**9
    os.utime(paths["by the replacement"], ns=(later, later))
    found = {name: script_files.is_to_be_written_again(session, path) for name, path in paths.items()}
    session.applied = 4
    return found | {"a step later": script_files.is_to_be_written_again(session, paths["since"])}


def test_a_file_of_the_step_in_which_a_rank_was_lost_is_to_be_written_again(tmp_path: Any) -> None:
    """ModelCheckpoint of Lightning takes another name for a file that is there."""
    found = run_alone(look_at_what_was_written, str(tmp_path))

    assert [name for name, is_again in found.items() if is_again] == ["since"]


def drop(directory: str) -> tuple[str, int]:
    """What people write in one line; returns what can be read behind it, and descriptors left open."""
    ownership.add_user_directory(os.path.dirname(__file__))
    patch_table.apply_all(with_replay=False)
    become(make_session())
    before = len(os.listdir("/proc/self/fd"))
    json.dump({"lr": 0.1}, open(f"{directory}/settings.json", "w"))  # noqa: SIM115
    return read(f"{directory}/settings.json"), len(os.listdir("/proc/self/fd")) - before


def test_a_file_that_the_script_drops_is_closed_as_python_does_it(tmp_path: Any) -> None:
    assert run_alone(drop, str(tmp_path)) == ('{"lr": 0.1}', 0)


def share(directory: str) -> list[str]:
    """Two ranks append to one file; one of them is lost and replaced."""
    ownership.add_user_directory(os.path.dirname(__file__))
    patch_table.apply_all(with_replay=True)
    path = f"{directory}/shared"
    fds = [Board.create(1)[0], Recorder.create(RECORD_BYTES)]

    def other(text: str) -> None:
        with builtins.open(path, "a") as log:
            log.write(text)

    other("other 1\n")
    in_child(live, HABITS["a log that is opened for appending each line"], path, fds, (3, 3), None)
    other("other 2\n")
    in_child(live, HABITS["a log that is opened for appending each line"], path, fds, None, 3)
    return read(path).splitlines()


def test_what_other_ranks_append_to_the_same_file_stays(tmp_path: Any) -> None:
    found = run_alone(share, str(tmp_path))

    mine = [line(step).rstrip("\n") for step in range(STEPS)]
    assert found == ["other 1", *mine[:4], "other 2", *mine[4:]]


def replay_everything(directory: str) -> dict[str, Any]:
    """What a replay does to the files of the lost rank."""
    ownership.add_user_directory(os.path.dirname(__file__))
    patch_table.apply_all(with_replay=True)
    file_system.watch()
    old, away, folder = (f"{directory}/{name}" for name in ("old", "away", "folder"))
    for path in (old, away):
        pathlib.Path(path).write_text("lost rank's")
    os.mkdir(folder)
    session = make_session()
    session.mode = SimpleNamespace(is_live=False, is_alone=True, newest_step=0)  # type: ignore[assignment]
    become(session)
    os.remove(old)
    os.rename(away, old)
    pathlib.Path(old).unlink()
    shutil.rmtree(folder)
    os.makedirs(folder)
    os.mkdir(folder)
    torch.save({"weights": 1}, old)
    safetensors.torch.save_file({"weights": torch.ones(1)}, old)
    np.save(old, np.zeros(3))
    with open(old, "w") as file:
        file.write("replay's")
    session.mode = LIVE
    kept = {path[len(directory) + 1 :]: read(path) for path in (old, away)}
    os.remove(away)
    return kept | {"folder": os.path.isdir(folder), "away is there": os.path.exists(away)}


def test_a_replay_keeps_its_hands_off_the_lost_ranks_files(tmp_path: Any) -> None:
    found = run_alone(replay_everything, str(tmp_path))

    assert found == {"old": "lost rank's", "away": "lost rank's", "folder": True, "away is there": False}


MISUSES: list[tuple[Any, ...]] = [
    ("a", 0), ("ab", -1, "utf-8"), ("aw",), ("q",), ("abt",), ("a", -1, "no such encoding"), ("a", -1, None, "strict", "x"),
]  # fmt: skip


def open_wrongly(directory: str) -> list[Any]:
    ownership.add_user_directory(os.path.dirname(__file__))
    real = builtins.open
    patch_table.apply_all(with_replay=False)
    become(make_session())
    found = []
    for arguments in MISUSES:
        answers = []
        for call in (real, open):
            try:
                call(f"{directory}/file", *arguments).close()
                answers.append("opened")
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
        found.append(answers)
    followed = open(f"{directory}/file", "a")  # noqa: SIM115
    plain = real(f"{directory}/file", "a")
    names = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through")
    found += [[getattr(file, name) for file in (plain, followed)] for name in names]
    found.append([type(file.buffer).__name__ for file in (plain, followed)])
    return found


def test_a_file_for_appending_is_like_any_other(tmp_path: Any) -> None:
    assert [(real, ours) for real, ours in run_alone(open_wrongly, str(tmp_path)) if real != ours] == []


def set_up_among_others(directory: str) -> dict[str, str]:
    """A rank of a run that goes on with other ranks: its first step writes, and is undone."""
    ownership.add_user_directory(os.path.dirname(__file__))
    patch_table.apply_all(with_replay=True)
    file_system.watch()
    log, own = (f"{directory}/{name}" for name in ("log", "log of a new rank"))
    pathlib.Path(log).write_text("step 1\nstep 2\nstep 3, which comes again\n")
    session = make_session()
    session.mode = SimpleNamespace(is_live=False, is_alone=False)  # type: ignore[assignment]
    become(session)
    opened = [open(path, "w") for path in (log, own)]  # noqa: SIM115 - as people write it
    for file in opened:
        file.write("a step that is undone\n")
    recorded = script_files.positions_again([[log, len("step 1\nstep 2\n")]])
    session.mode = LIVE
    script_files.unmute(session, recorded, 2, script_files.clock_ns())
    for file in opened:
        file.write("step 3\n")
        file.close()
    return {"log": read(log), "own": read(own), "recorded": str([size for _, size in recorded])}


def test_a_step_that_is_undone_writes_nothing_to_files_of_the_old_run_nor_to_new_ones(tmp_path: Any) -> None:
    found = run_alone(set_up_among_others, str(tmp_path))

    assert found == {"log": "step 1\nstep 2\nstep 3\n", "own": "step 3\n", "recorded": "[14, 0]"}
