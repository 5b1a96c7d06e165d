"""Our `mindio_ttp` is found with `--mindio` only, and never in the place of MindIO's own."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from ttprun import mindio
from ttprun.errors import ConfigError


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another package of that name, found before ours."""
    package = tmp_path / "mindio_ttp"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "mindio_ttp"]:
        monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    return package


def test_another_package_of_that_name_is_left_in_place_and_the_run_is_refused(foreign: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        mindio.check_that_none_is_there()

    assert f"a package mindio_ttp is installed in '{foreign}'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_our_own_package_on_the_path_is_no_other() -> None:
    mindio.check_that_none_is_there()


def test_our_package_comes_behind_whatever_is_found_now() -> None:
    first = mindio.put_on_path({"PYTHONPATH": "/a:/b"})["PYTHONPATH"]

    assert first == os.pathsep.join(["/a", "/b", mindio.PATH])
    assert mindio.put_on_path({"PYTHONPATH": first})["PYTHONPATH"] == first
    assert mindio.put_on_path({})["PYTHONPATH"] == mindio.PATH
