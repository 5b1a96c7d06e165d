"""What the script is answered by the file system is kept, and a replacement is answered alike."""

from __future__ import annotations

import glob
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from tests.rank.fakes import become, make_session
from tests.rank.processes import run_alone
from ttprun.capture.effects import file_answers, file_system
from ttprun.capture.effects.file_answers import WRITTEN_AGAIN
from ttprun.introspect import ownership
from ttprun.introspect.current_rank import LIVE
from ttprun.rank.bootstrap import patch_table

Question = Callable[[str], Any]
QUESTIONS: dict[str, Question] = {
    "exists": lambda folder: [os.path.exists(f"{folder}/{name}") for name in ("old", "new")],
    "isdir": lambda folder: [os.path.isdir(f"{folder}/{name}") for name in ("sub", "newer")],
    "listdir": lambda folder: sorted(os.listdir(folder)),
    "walk": lambda folder: sorted(name for _, *found in os.walk(folder) for names in found for name in names),
    "glob": lambda folder: sorted(glob.glob(f"{folder}/**/*", recursive=True)),
    "newest": lambda folder: max(glob.glob(f"{folder}/*"), key=os.path.getmtime),
    "sizes": lambda folder: sorted((one.name, one.is_file(), one.stat().st_size) for one in os.scandir(folder)),
    "stat": lambda folder: os.stat(f"{folder}/old")[6:9],
    "access": lambda folder: os.access(f"{folder}/new", os.R_OK),
    "link": lambda folder: os.readlink(f"{folder}/link"),
    "pathlib": lambda folder: sorted(
        one.name for one in pathlib.Path(folder).iterdir() if one.is_dir() or one.exists()
    ),
    "content": lambda folder: pathlib.Path(f"{folder}/old").read_text(),
    "twice": lambda folder: pathlib.Path(f"{folder}/new").exists() or pathlib.Path(f"{folder}/new").is_file(),
    "missing": lambda folder: failure(lambda: pathlib.Path(f"{folder}/new").read_text()),
    "remove": lambda folder: failure(lambda: os.remove(f"{folder}/new")),
    "make": lambda folder: [failure(lambda: os.mkdir(f"{folder}/newer")) for _ in "twice"],
    "make new": lambda folder: failure(lambda: pathlib.Path(f"{folder}/newest").touch(exist_ok=False)),
    "write new": lambda folder: failure(lambda: open(f"{folder}/written", "x").close()),
}


def failure(act: Callable[[], Any]) -> str:
    try:
        act()
    except OSError as error:
        return type(error).__name__
    return "none"


def ask_all(folder: str) -> dict[str, Any]:
    return {name: ask(folder) for name, ask in QUESTIONS.items()}


def lives(folder: str) -> list[dict[str, Any]]:
    """What the script is answered without ttprun, with it, in a replay, and in a replacement from the top."""
    ownership.add_user_directory(os.path.dirname(__file__))
    kept: list[Any] = []

    def keep(entry: Any) -> int:
        packed: bytes = msgpack.packb(entry)
        kept.append(msgpack.unpackb(packed))
        return len(packed)

    found = [ask_all(begin_in(folder, "plain"))]
    patch_table.apply_all(with_replay=False)
    file_system.watch()
    session = make_session()
    become(session)
    for is_replay in (None, True, False):
        file_answers.begin(list(kept), keep if is_replay is None else len)
        replay: Any = SimpleNamespace(is_live=False, is_alone=True, newest_step=0) if is_replay else LIVE
        session.mode = replay
        if is_replay is None:
            begin_in(folder, "run")
        found.append(ask_all(f"{folder}/run"))
        session.mode = LIVE
        if is_replay is None:
            file_answers.end()
            go_on(f"{folder}/run")
    return [{name: str(value).replace("/plain", "/run") for name, value in one.items()} for one in found]


def begin_in(folder: str, name: str) -> str:
    path = pathlib.Path(folder) / name
    (path / "sub").mkdir(parents=True)
    (path / "old").write_text("at first")
    (path / "sub" / "deep").write_text("")
    for one in ("sub/deep", "old", "sub"):
        os.utime(path / one, (1_000, 1_000))
    (path / "link").symlink_to("old")
    return str(path)


def go_on(folder: str) -> None:
    """What the run itself does later."""
    path = pathlib.Path(folder)
    (path / "old").write_text("and then much more")
    (path / "new").write_text("new")
    (path / "link").unlink()
    (path / "link").symlink_to("new")
    (path / "sub" / "more").write_text("more")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(lives, str(tmp_path_factory.mktemp("lives")))


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_replacement_is_answered_as_its_rank_was_and_that_as_without_ttprun(name: str, answers: Any) -> None:
    plain, first, replayed, again = (one[name] for one in answers)

    assert [first, replayed, again] == [plain] * 3


def ask_much(folder: str) -> tuple[int, list[str], int]:
    """One line that asks for many files, and another one after it."""
    ownership.add_user_directory(os.path.dirname(__file__))
    file_system.watch()
    kept: list[Any] = []
    become(make_session())
    file_answers.begin([], lambda entry: kept.append(entry) or 1)  # type: ignore[func-returns-value]
    for number in range(2 * file_answers.MOST_AT_ONE_LINE):
        os.path.exists(f"{folder}/{number}")
    many = len(kept)
    for _ in range(100):
        os.path.exists(folder)
    return many, [*map(str, file_answers.not_proved())], len(kept) - many


def test_a_line_that_asks_too_much_is_named_and_the_others_are_kept(tmp_path: Any) -> None:
    many, named, rest = run_alone(ask_much, str(tmp_path))

    assert many == file_answers.MOST_AT_ONE_LINE + 1
    assert ["test_file_answers.py:" in one for one in named] == [True]
    assert rest == 1 + file_answers.MOST_REPEATS


def looks_in_lives(folder: str, lives: int, script: Callable[[str], Any]) -> list[Any]:
    """What a script comes to in processes of a rank, each of which is lost in step 0."""
    ownership.add_user_directory(os.path.dirname(__file__))
    file_system.watch()
    file_system.was_written_in_gap = lambda path: True
    kept: list[Any] = []
    become(make_session())
    found = []
    for _ in range(lives):
        file_answers.begin(list(kept), lambda entry: kept.append(entry) or 1)  # type: ignore[func-returns-value]
        found.append(script(folder))
    return found


def end_once(folder: str) -> str:
    if os.path.exists(f"{folder}/ended"):
        return "goes on"
    pathlib.Path(f"{folder}/ended").touch()
    return "ends"


def take_once(folder: str) -> str:
    try:
        os.close(os.open(f"{folder}/taken", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "goes on"
    return "ends"


@pytest.mark.parametrize("script", [end_once, take_once])
def test_a_script_that_ends_itself_once_is_answered_as_at_first_in_each_second_life(
    tmp_path: Any, script: Callable[[str], Any]
) -> None:
    assert run_alone(looks_in_lives, str(tmp_path), 5, script) == ["ends", "ends", "goes on", "ends", "goes on"]


def wait_for_a_file(folder: str) -> list[bool]:
    path = pathlib.Path(f"{folder}/gate")
    was_there = [path.exists()]
    if not was_there[0]:
        with open(f"/proc/self/fd/{os.open(folder, os.O_RDONLY)}/gate", "w"):  # another process writes it now
            pass
        was_there.append(path.exists())
    return was_there


def test_a_rank_lost_while_it_waited_for_a_file_sees_it_in_its_next_life(tmp_path: Any) -> None:
    assert run_alone(looks_in_lives, str(tmp_path), 2, wait_for_a_file) == [[False, True], [False, True]]


@pytest.mark.parametrize(
    ("name", "head", "flags", "kind"),
    [
        ("log.db", b"SQLite format 3\0", os.O_RDWR, "sqlite3"),
        ("log.db", b"SQLite format 3\0", os.O_RDONLY, ""),
        ("log.db", b"", os.O_RDWR, ""),
        ("curves.h5", b"\x89HDF\r\n\x1a\n", os.O_RDWR, "HDF5"),
        ("grid.nc", b"CDF\x01", os.O_RDWR, "netCDF"),
        ("data.mdb", b"", os.O_RDWR, "lmdb"),
        ("loss.txt", b"0.5", os.O_RDWR, ""),
    ],
)
def test_stores_that_compiled_code_may_write_to_are_named(
    name: str, head: bytes, flags: int, kind: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(head)
    descriptor = os.open(tmp_path / name, flags)

    found = file_answers._open_stores()

    os.close(descriptor)
    assert [store for store in found if name in store] == ([f"{name} ({kind}): {WRITTEN_AGAIN}"] if kind else [])
