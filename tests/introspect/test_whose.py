"""Which files are the user's own code, however a project is laid out, and which are not."""

from __future__ import annotations

import importlib
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from ttprun.capture.position import user_code
from ttprun.introspect import ownership

LOOP = "def fit(run):\n    for step in range(3):\n        run(step)\n"
FINDER = """\
import importlib.util

class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        place = {place!r} if fullname == "their_own" else None
        return place and importlib.util.spec_from_file_location(fullname, place)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's project: the script is in `tools`."""
    for name in ("_user_directories", "_own_installed", "_libraries", "_named", "_followed_files"):
        monkeypatch.setattr(ownership, name, type(getattr(ownership, name))())
    monkeypatch.setattr(sys, "meta_path", [user_code._Finder(), *sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_code, "loaded", loaded := ["__main__"])
    monkeypatch.setattr(user_code.FollowedLoader, "names", loaded)
    before = set(sys.modules)
    (tmp_path / "project" / "tools").mkdir(parents=True)
    ownership.add_user_directory(str(tmp_path / "project" / "tools"))
    yield tmp_path / "project"
    for name in set(sys.modules) - before:
        del sys.modules[name]
    ownership._forget_answers()


def written(path: Path, text: str = LOOP) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def follows(module: str) -> bool:
    """Whether the loops of a module are followed once it is imported."""
    code: CodeType = importlib.import_module(module).fit.__code__
    return user_code.LOOP in code.co_names


@pytest.mark.parametrize(
    ("place", "is_own"),
    [
        ("tools/helpers.py", True),
        ("src/package/loop.py", True),
        ("../elsewhere/package/loop.py", True),  # by PYTHONPATH, or an editable installation
        ("site_packages_of_mine/loop.py", True),
        ("tools/.venv/lib/python3.11/site-packages/theirs/loop.py", False),
        ("../conda/envs/it/lib/python3.12/site-packages/theirs.py", False),
        ("../usr/lib/python3/dist-packages/theirs/loop.py", False),
        ("../.cache/huggingface/modules/theirs/loop.py", False),
        ("../tmp/torchinductor_me/ab/cab.py", False),
        ("../tmp/tmp1x2y/_remote_module_non_scriptable.py", False),
    ],
)
def test_what_is_not_installed_nor_cached_is_the_users(project: Path, place: str, is_own: bool) -> None:
    file = str(written(project / place))

    assert (ownership.is_script_code(file), ownership.has_muted_effects(file)) == (is_own, is_own)


@pytest.mark.parametrize("module", ["json", "torch", "torch.nn.functional", "numpy", "pytest", "ttprun.config"])
def test_pythons_and_other_libraries_are_not_the_users(module: str) -> None:
    assert not ownership.is_of_user(str(importlib.import_module(module).__file__))


def test_a_name_that_is_no_file_is_nobodys(project: Path) -> None:
    assert not ownership.is_of_user(str(project / "template.html"))
    assert not ownership.is_of_user("<string>")


def test_a_project_in_a_hidden_folder_is_the_users_as_a_whole(tmp_path: Path) -> None:
    tool = written(tmp_path / ".worktrees" / "mine" / "tools" / "train.py")
    beside = written(tmp_path / ".worktrees" / "mine" / "package" / "loop.py")
    ownership.add_user_directory(str(tool.parent))

    assert ownership.is_of_user(str(beside))


def test_a_package_linked_into_site_packages_is_the_users_and_one_with_linked_files_is_not(tmp_path: Path) -> None:
    mine, cached = written(tmp_path / "mine" / "loop.py"), written(tmp_path / "archive" / "loop.py")
    site = tmp_path / "site-packages"
    (site / "theirs").mkdir(parents=True)
    (site / "mine").symlink_to(mine.parent)
    (site / "theirs" / "loop.py").symlink_to(cached)
    (tmp_path / "linked").symlink_to(site)

    assert ownership.is_of_user(str(site / "mine" / "loop.py"))
    assert not ownership.is_of_user(str(site / "theirs" / "loop.py"))
    assert not ownership.is_of_user(str(tmp_path / "linked" / "theirs" / "loop.py"))


def test_what_pip_has_put_into_a_folder_of_the_path_is_not_the_users_and_what_lies_beside_is(project: Path) -> None:
    theirs, single, mine = (written(project / "deps" / name) for name in ("theirs/loop.py", "single.py", "mine.py"))
    written(project / "deps" / "theirs-1.0.dist-info" / "RECORD", "theirs/loop.py,sha256=x,1\nsingle.py,,\n")
    sys.path.append(str(project / "deps"))

    assert [ownership.is_of_user(str(one)) for one in (theirs, single, mine)] == [False, False, True]


def test_torch_in_its_developers_folder_is_no_code_of_the_users_and_a_package_beside_it_is(project: Path) -> None:
    torch = written(project / ".." / "pytorch" / "torch_npu" / "__init__.py")
    ownership.note_library("torch_npu", str(torch))

    assert not ownership.is_of_user(str(torch))
    assert ownership.is_of_user(str(written(torch.parent.parent / "mine.py")))


def test_modules_by_pythonpath_a_namespace_package_a_zip_file_and_an_editable_installation_are_followed(
    project: Path, tmp_path: Path
) -> None:
    written(project / "src" / "by_path" / "__init__.py")
    written(project / "src" / "of_namespace" / "part.py")
    with zipfile.ZipFile(project / "zipped.zip", "w") as archive:
        archive.writestr("in_zip/__init__.py", "")
        archive.writestr("in_zip/loop.py", LOOP)
    sys.path += [str(project / "src"), str(project / "zipped.zip")]
    scope: dict[str, Any] = {}
    exec(FINDER.format(place=str(written(tmp_path / "editable" / "their_own.py"))), scope)
    sys.meta_path.append(scope["Finder"])
    names = ["by_path", "of_namespace.part", "in_zip.loop", "their_own"]

    followed = [name for name in names if follows(name)]

    assert followed == names
    assert set(names) <= set(user_code.loaded)
    assert ownership.is_script_code(str(project / "zipped.zip" / "in_zip" / "loop.py"))
