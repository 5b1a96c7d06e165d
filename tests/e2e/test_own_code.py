"""Own code that does not lie beside the script: found by PYTHONPATH, or installed editable."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS, TRAINER, Run, assert_only_replaced, assert_same_outcome

KILL = "kill:rank=1,step=20,phase=backward"
TOOL = "from trainer import loop\n\nloop.main()\n"
# As pip writes it, for a project without a `src` folder.
FINDER = """\
import sys
from importlib.util import spec_from_file_location
from pathlib import Path

class Finder:
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        parent, _, rest = fullname.partition(".")
        if parent != "trainer" or rest:
            return None
        folder = Path({folder!r})
        return spec_from_file_location(fullname, folder / "__init__.py", submodule_search_locations=[str(folder)])

def install():
    if not any(finder is Finder for finder in sys.meta_path):
        sys.meta_path.append(Finder)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A project with a script in `tools` and its code in `src`; a virtual environment is inside, too."""
    source = tmp_path / "project" / "src" / "trainer"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    shutil.copy(SCRIPTS / TRAINER, source / "loop.py")
    (tmp_path / "project" / "tools").mkdir()
    (tmp_path / "project" / "tools" / "train.py").write_text(TOOL)
    for folder in ("src", "tools"):
        shutil.copy(SCRIPTS / "around_the_loop.py", tmp_path / "project" / folder)
    return tmp_path / "project"


def editable(repository: Path, pth: str) -> str:
    """PYTHONPATH with a site-packages, in whose .pth file that line stands, as if it were the interpreter's own."""
    site = repository / "tools" / ".venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "__editable__.trainer.pth").write_text(f"{pth}\n")
    (site / "__editable___trainer_finder.py").write_text(FINDER.format(folder=str(repository / "src" / "trainer")))
    (site / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    return str(site)


def editable_by_finder(repository: Path) -> str:
    return editable(repository, "import __editable___trainer_finder; __editable___trainer_finder.install()")


@pytest.mark.parametrize("lay_out", [editable_by_finder])
def test_a_rank_whose_loop_lies_in_own_code_beside_the_scripts_folder_is_replaced_and_nothing_differs(
    run_ttprun: Callable[..., Run],
    undisturbed: Callable[..., Run],
    repository: Path,
    lay_out: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", lay_out(repository))

    result = run_ttprun(str(repository / "tools" / "train.py"), 2, faults=[KILL])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(TRAINER, 2))


def test_a_rank_of_a_module_in_a_source_folder_is_replaced_and_nothing_differs(
    run_ttprun: Callable[..., Run], undisturbed: Callable[..., Run], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.relpath(repository / "src", repository.parent / "0"))

    result = run_ttprun("trainer.loop", 2, faults=[KILL], options=["-m"])

    assert_only_replaced(result)
    assert_same_outcome(result, undisturbed(TRAINER, 2))
