"""Training loops that a run meets in a package: their files are followed from the next run on."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rank.processes import run_alone
from ttprun.capture.position import call_site, disk_cache, user_code
from ttprun.introspect import ownership

LOOP = "def fit(look):\n    for _ in range(1):\n        found = look()\n    return found\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ttprun" / "followed"


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """The file of an installed package that trains."""
    file = tmp_path / "site-packages" / "their_trainer" / "loop.py"
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").write_text("")
    file.write_text(LOOP)
    return file


def said_of(site: str, seen_before: list[str] | None, home: str) -> tuple[str, bool]:
    """Why a step in that loop cannot be replayed, in a run that knows of these files; and if the loop is followed."""
    os.environ["XDG_CACHE_HOME"] = home
    sys.path.append(site)
    user_code.install((), seen_before)
    loop: Any = importlib.import_module("their_trainer.loop")
    said: str = loop.fit(lambda: call_site.why_not(sys._getframe(1)))
    return said, user_code.LOOP in loop.fit.__code__.co_names


# pytest itself has loops around its tests: each is run in a process of its own.
def test_a_loop_that_a_run_meets_is_followed_in_the_next_one(trainer: Path) -> None:
    site, home = str(trainer.parent.parent), os.environ["XDG_CACHE_HOME"]

    first = run_alone(said_of, site, disk_cache.files(), home)
    second = run_alone(said_of, site, disk_cache.files(), home)

    assert first[0].endswith(f"which is met for the first time: {disk_cache.NEXT_RUN}")
    assert not first[1]
    assert second == ("", True)


def test_where_nothing_can_be_kept_or_files_may_differ_the_line_to_write_is_named(trainer: Path) -> None:
    site = str(trainer.parent.parent)

    on_several_nodes, _ = run_alone(said_of, site, None, os.environ["XDG_CACHE_HOME"])
    without_a_folder, _ = run_alone(said_of, site, [], "/proc/nowhere")

    for said in (on_several_nodes, without_a_folder):
        assert said.endswith("try this line in the configuration: follow: [their_trainer.loop]")


def test_another_version_of_a_package_is_met_anew(trainer: Path) -> None:
    disk_cache.note(str(trainer))
    known = disk_cache.files()

    trainer.write_text(f"{LOOP}# improved\n")

    assert known == [str(trainer)]
    assert disk_cache.files() == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"file": 7}', "no JSON", '{"file": "/etc/passwd", "sha256": ""}'])
def test_what_is_damaged_is_not_followed(trainer: Path, cache: Path, content: str) -> None:
    disk_cache.note(str(trainer))
    (kept,) = cache.iterdir()

    kept.write_text(content)

    assert disk_cache.files() == []


def test_what_somebody_else_could_have_written_is_not_followed(trainer: Path, cache: Path) -> None:
    disk_cache.note(str(trainer))
    (kept,) = cache.iterdir()
    modes = (kept.stat().st_mode & 0o777, cache.stat().st_mode & 0o777)
    plain = json.loads(kept.read_text())

    kept.chmod(0o644)

    assert modes == (0o600, 0o700)
    assert plain.keys() == {"file", "sha256"}
    assert disk_cache.files() == []


def test_only_the_file_is_followed_and_not_the_whole_package(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_seen_before", None)
    ownership.follow_files([str(trainer.parent / "__init__.py")])
    finder = user_code._Finder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])

    package = finder.find_spec("their_trainer", [str(trainer.parent.parent)])
    loop = finder.find_spec("their_trainer.loop", [str(trainer.parent)])

    assert package is not None
    assert isinstance(package.loader, user_code.NamedLoader)
    assert loop is None
