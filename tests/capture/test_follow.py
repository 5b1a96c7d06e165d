"""Modules that are followed by their names: frameworks with the training loop in them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ttprun import frameworks
from ttprun.capture.data import loaders
from ttprun.capture.position import disk_cache, user_code
from ttprun.capture.values import objects
from ttprun.introspect import ownership
from ttprun.rank.bootstrap import reset

LOOP = "def fit(run):\n    for step in range(3):\n        run(step)\n"


@pytest.fixture(autouse=True)
def nothing_else_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(ownership, "_named", set())
    monkeypatch.setattr(ownership, "_followed_files", set())
    monkeypatch.setattr(ownership, "_followed_packages", ())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    finder = user_code._Finder()
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    ownership._forget_answers()
    yield
    sys.meta_path.remove(finder)  # type: ignore[arg-type]
    ownership._forget_answers()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A package like one from PyPI, with a file that trains and others."""
    package = tmp_path / "site-packages" / "their_framework"
    (package / "loops").mkdir(parents=True)
    for name in ("__init__", "trainer", "logs", "loops/__init__", "loops/fit"):
        (package / f"{name}.py").write_text(LOOP)
    return package


def loader_of(module: str, folder: Path) -> Any:
    spec = next(finder for finder in sys.meta_path if isinstance(finder, user_code._Finder)).find_spec(
        module, [str(folder)]
    )
    return spec and spec.loader


def test_a_module_is_followed_by_its_name_and_the_rest_of_its_package_is_not(installed: Path) -> None:
    ownership.follow(["their_framework.trainer"])

    assert isinstance(loader_of("their_framework.trainer", installed), user_code.NamedLoader)
    assert loader_of("their_framework.logs", installed) is None
    assert loader_of("their_framework.not_there", installed) is None


def test_a_package_stands_for_all_of_its_modules(installed: Path) -> None:
    ownership.follow(["their_framework.loops"])

    assert isinstance(loader_of("their_framework.loops", installed), user_code.NamedLoader)
    assert isinstance(loader_of("their_framework.loops.fit", installed / "loops"), user_code.NamedLoader)
    assert loader_of("their_framework.trainer", installed) is None


def test_a_followed_module_is_in_loops_frames_and_state_and_its_whole_package_in_effects(installed: Path) -> None:
    ownership.follow(["their_framework.trainer"])
    trainer, logs = str(installed / "trainer.py"), str(installed / "logs.py")

    loader_of("their_framework.trainer", installed).get_code("their_framework.trainer")

    assert (ownership.is_script_code(trainer), ownership.has_muted_effects(trainer)) == (True, True)
    assert (ownership.is_script_code(logs), ownership.has_muted_effects(logs)) == (False, True)
    assert not ownership.has_muted_effects(str(installed.parent / "other.py"))
    assert not ownership.is_of_user(trainer)


def test_what_a_package_writes_for_a_loop_of_the_scripts_own_is_muted_too() -> None:
    folder = "/usr/lib/python3/site-packages"

    assert ownership.has_muted_effects(f"{folder}/peft/utils/save_and_load.py")
    assert not ownership.is_script_code(f"{folder}/peft/utils/save_and_load.py")
    assert not ownership.has_muted_effects(f"{folder}/datasets/arrow_writer.py")


def test_a_module_that_is_a_file_by_itself_mutes_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for name in ("mytrainer", "other"):
        (folder / f"{name}.py").write_text(LOOP)
    ownership.follow(["mytrainer"])

    loader_of("mytrainer", folder).get_code("mytrainer")

    assert ownership.has_muted_effects(str(folder / "mytrainer.py"))
    assert not ownership.has_muted_effects(str(folder / "other.py"))


def test_what_belongs_to_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = os.stat(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: found.st_uid + 1)

    with pytest.raises(PermissionError):
        disk_cache._refuse_others(found, stat.S_ISDIR)


def test_what_a_framework_makes_in_its_steps_for_others_is_left_to_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler:
        pass

    monkeypatch.setitem(frameworks.LEFT_OUT, f"{__name__}:{Handler.__qualname__}", "eval_dataloader")

    assert "eval_dataloader" in objects.left_out(type("OfUser", (Handler,), {}))


class Shared:
    state: dict[str, Any] = {}  # noqa: RUF012 - as accelerate has it


def test_what_a_frameworks_objects_share_is_empty_when_the_script_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "SHARED", (f"{__name__}:Shared.state", "not_imported.state:Shared.state"))
    Shared.state["is_set_up"] = True

    reset._empty_shared_states()

    assert Shared.state == {}


def test_a_loader_that_is_made_in_the_steps_has_the_name_that_the_lost_ranks_would_have() -> None:
    init = loaders.wrap_init(DataLoader.__init__)
    loader, later = DataLoader.__new__(DataLoader), DataLoader.__new__(DataLoader)
    loaders.forget()
    init(loader, [1])
    ((place, count),) = loaders.made().items()

    loaders.count_on({place: count + 3})
    loaders.count_on(loaders.made())  # it is said at two boundaries
    init(later, [1])

    assert vars(later)["_ttprun_name"] == [place, count + 4]
    loaders.forget()
