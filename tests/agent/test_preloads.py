"""A copy of a standby that imports what the ranks have imported: what it may import, and what it leaves alone."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.agent.starting import LIMIT_S, ROOT, wait_until_ready
from tests.waits import becomes_ready
from ttprun.agent.node import preloads as preloads_module
from ttprun.agent.node.preloads import Preloaded, Preloads, plan_of
from ttprun.agent.node.rank_processes import Standby
from ttprun.protocol.standby_messages import Imported, PreloadPlan

SAY = "import os\nopen(os.path.join({folder!r}, 'imported'), 'a').write(f'{{__name__}}\\n')\n"


class Site:
    """A folder of packages of the test's own, and a standby that finds them."""

    def __init__(self, folder: Path, standby: Standby) -> None:
        self.folder = folder
        self.names: list[str] = []
        self.preloads = Preloads()
        self.rounds: list[Preloaded] = []
        self.standby = standby

    def write(self, name: str, source: str) -> None:
        """A module, which says when its code runs."""
        path = self.path_of(name)
        for parent in accumulate(name.split(".")[:-1], "{}.{}".format):
            (self.folder / parent.replace(".", os.sep)).mkdir(exist_ok=True)
            self.path_of(f"{parent}.__init__").touch()
            self.names.append(f"{parent}.__init__")
        path.write_text(SAY.format(folder=str(self.folder)) + source)
        self.names.append(name)

    def path_of(self, name: str) -> Path:
        """The file of a module."""
        return self.folder / f"{name.replace('.', os.sep)}.py"

    def report(self, changes: dict[str, dict[str, str]] | None = None) -> Imported:
        """What a rank would say that has imported all of them."""
        changes = changes or {}
        modules = [
            (name.removesuffix(".__init__"), str(self.path_of(name)), {**changes.get(name, {})}) for name in self.names
        ]
        return Imported(modules, os.getcwd())

    def settle(self, **changes: dict[str, str]) -> Preloaded | None:
        """The copy that can be used in the end, after as many rounds as it takes."""
        wait_until_ready(self.standby)
        self.preloads.note(0, self.report(changes), [{"args": ("script.py", "--lr", "1"), "env": {}}])
        while not self.preloads.why_not:
            self.preloads.look(self.standby, self.rounds.append)
            if self.preloads.why_not:
                break
            current = self.rounds[-1]
            if not becomes_ready(current.channel.sock.fileno(), 0.1):
                continue
            try:
                current.read()
            except (EOFError, OSError):
                self.preloads.lost(current)
                current.bury()
                continue
            if self.preloads.came(current):
                break
        return self.preloads.ready

    def imported(self) -> list[str]:
        """Names of the modules whose code has run, since this was asked last."""
        path = self.folder / "imported"
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standby]:
    """One standby for all tests: what is imported is imported by its copies."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "site-packages").mkdir()
    path = os.pathsep.join((str(folder / "site-packages"), ROOT))
    variables = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    found = Standby(str(folder), variables)
    found.hurry()
    found.folder = folder / "site-packages"  # type: ignore[attr-defined]
    yield found
    found.end()


@pytest.fixture
def site(base: Standby) -> Iterator[Site]:
    found = Site(base.folder, base)  # type: ignore[attr-defined]
    yield found
    found.preloads.end()
    for path in found.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_module_that_is_imported_beforehand_is_not_imported_again_by_the_script_of_a_replacement(
    site: Site, become_rank: Callable[..., tuple[int, str]]
) -> None:
    site.write("slow", "import sys\nARGUMENTS = list(sys.argv)\n")
    preloaded = site.settle()
    before = site.imported()
    assert preloaded is not None

    code, written = become_rank(preloaded.copy(), "import slow\nprint(slow.ARGUMENTS)\n")

    assert (code, written) == (0, "['script.py', '--lr', '1']\n")
    assert (before, site.imported()) == (["slow"], [])
    assert site.standby.process.poll() is None


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_while_the_launcher_can_open_no_more_files_no_copy_is_made_and_later_one_is(site: Site, left: int) -> None:
    site.write("quick", "")
    wait_until_ready(site.standby)
    site.preloads.note(0, site.report(), [{"args": ("script.py",), "env": {}}])
    opened = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)

    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, hard))
    try:
        site.preloads.look(site.standby, site.rounds.append)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert site.rounds == []
    assert os.listdir("/proc/self/fd") == opened
    assert site.settle() is not None


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import os\nRANK = os.environ.get('RANK')", "it reads RANK"),
        ("import os\nBY_ALL = dict(os.environ)", "it reads RANK"),
        ("import os\nNAMED = [os.environ[name] for name in os.environ if 'RANK' in name]", "it reads RANK"),
        ("import os\nos.environ['PATH'] += ':/more'", "its import changes environment variables"),
        ("import os\nPID = os.getpid()", "it keeps the process id"),
        ("import os\nNAME = f'file-{os.getpid()}'", "it keeps the process id"),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "the threads"),
        ("FILE = open('/dev/null')", "the open files"),
        ("import random\nrandom.seed(0)", "the random state of python"),
        ("import torch\ntorch.rand(1)", "the random state of torch"),
        ("import torch\ntorch.set_grad_enabled(False)", "settings of torch"),
        ("import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)", "the signal handlers"),
        ("import mmap\nSHARED = mmap.mmap(-1, 4096)", "shared memory or a child process"),
        ("import subprocess\nCHILD = subprocess.Popen(['sleep', '30'])", "shared memory or a child process"),
        ("raise RuntimeError('not here')", "its import fails here: RuntimeError: not here"),
        ("import os\nos._exit(3)", "its import ends the process"),
    ],
)
def test_a_module_whose_import_would_not_be_the_same_in_a_rank_is_left_to_the_replay_and_others_are_not(
    site: Site, source: str, why: str
) -> None:
    site.write("harmless", "")
    site.write("odd", source)
    site.write("needs_odd", "try:\n    import odd\nexcept RuntimeError:\n    raise\n")

    preloaded = site.settle()

    assert preloaded is not None
    assert why in site.preloads.refused["odd"]
    assert set(site.preloads.refused) == {"odd", "needs_odd"}
    assert site.imported()[-1] == "harmless"
    assert "odd (" in site.preloads.state


RANK_OF_FABRIC = """import os

def rank_zero_only():
    pass

def _get_rank():
    return int(os.environ["RANK"])

rank_zero_only.rank = getattr(rank_zero_only, "rank", _get_rank() or 0)
"""
IDS_OF_RICH = """from itertools import count
from random import getrandbits

_id_generator = count(getrandbits(24))
"""
ALL_VARIABLES = """import os

KEPT = {key: value for key, value in dict(os.environ).items() if key.startswith("FSSPEC")}
"""


def test_what_a_known_module_asks_of_its_rank_at_import_is_asked_again_by_each_copy(
    site: Site, become_rank: Callable[..., tuple[int, str]]
) -> None:
    site.write("lightning.fabric.utilities.rank_zero", RANK_OF_FABRIC)
    site.write("rich.style", IDS_OF_RICH)
    site.write("fsspec.config", ALL_VARIABLES)
    preloaded = site.settle()
    assert preloaded is not None
    assert site.preloads.refused == {}
    site.imported()

    code, written = become_rank(
        preloaded.copy(),
        """
import os, random, sys
from lightning.fabric.utilities.rank_zero import rank_zero_only
import fsspec.config, rich.style
print(rank_zero_only.rank, "_id_generator" in vars(rich.style), fsspec.config.KEPT)
""",
        RANK="7",
    )

    assert (code, written) == (0, "7 True {}\n")
    assert site.imported() == []


@pytest.mark.parametrize(
    ("name", "source", "why"),
    [
        (
            "lightning.fabric.utilities.rank_zero",
            "import os\nRANK = os.environ.get('RANK')\n" + RANK_OF_FABRIC,
            "it reads RANK",
        ),
        (
            "lightning.fabric.utilities.rank_zero",
            RANK_OF_FABRIC.replace("_get_rank() or 0", "_get_rank()"),
            "it reads RANK",
        ),
        ("rich.style", IDS_OF_RICH + "OTHER = getrandbits(24)\n", "the random state of python"),
    ],
)
def test_another_version_of_a_known_module_is_left_to_the_replay(site: Site, name: str, source: str, why: str) -> None:
    site.write("harmless", "")
    site.write(name, source)

    preloaded = site.settle()

    assert preloaded is not None
    assert why in site.preloads.refused[name]


def test_a_module_that_asks_a_known_one_for_its_rank_at_import_is_left_to_the_replay(site: Site) -> None:
    site.write("lightning.fabric.utilities.rank_zero", RANK_OF_FABRIC)
    site.write("asks", "from lightning.fabric.utilities.rank_zero import rank_zero_only\nRANK = rank_zero_only.rank\n")

    preloaded = site.settle()

    assert preloaded is not None
    assert site.preloads.refused.keys() == {"asks"}


def test_a_module_in_which_the_copy_hangs_is_left_to_the_replay(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloads_module, "HANG_S", 3.0)
    site.write("endless", "import time\ntime.sleep(600)\n")
    site.write("harmless", "")

    preloaded = site.settle()

    assert preloaded is not None
    assert site.preloads.refused == {"endless": "its import does not end"}
    assert site.imported() == ["endless", "harmless"]


def test_a_module_sees_the_variables_as_the_script_had_set_them_before_its_import(
    site: Site, become_rank: Callable[..., tuple[int, str]]
) -> None:
    read = "import os\nSEEN = os.environ.get('MODE')\n"
    site.write("first", read)
    site.write("second", read + "os.environ.setdefault('MODE', 'slow')\nos.environ.setdefault('ADDED', 'by second')\n")
    preloaded = site.settle(second={"MODE": "fast"})
    assert preloaded is not None

    code, written = become_rank(
        preloaded.copy(),
        "import os, first, second\nprint(first.SEEN, second.SEEN, os.environ.get('MODE'), os.environ['ADDED'])\n",
    )

    assert (code, written) == (0, "None fast None by second\n")


def test_a_module_that_prints_is_not_heard_and_what_the_ranks_do_not_have_is_not_brought_along(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site.write("talks", "print('welcome', flush=True)\n")
    site.write("only_here", "")
    site.write("brings", "import only_here\n")
    site.names.remove("only_here")

    preloaded = site.settle()

    assert preloaded is not None
    assert site.preloads.refused.keys() == {"only_here", "brings"}
    assert "welcome" not in capfd.readouterr().out


def test_a_copy_that_is_killed_is_made_again_and_blames_no_module(site: Site) -> None:
    site.write("slow", "")
    first = site.settle()
    assert first is not None
    first.process.poll()
    os.kill(first.process.pid, 9)
    first.process.wait(LIMIT_S)
    assert site.preloads.ready is None

    again = site.settle()

    assert again is not None
    assert again is not first
    assert site.preloads.refused == {}


def report(*modules: tuple[str, str, dict[str, str | None]], directory: str | None = None) -> Imported:
    return Imported(list(modules), directory or os.getcwd())


def start(rank: int, *arguments: str) -> dict[str, Any]:
    return {"args": ("-u", "script.py", *arguments), "env": {"RANK": str(rank), "COLOUR": "red" if rank else "blue"}}


def test_only_what_all_ranks_have_imported_from_the_same_file_is_imported_and_their_own_variables_are_watched() -> None:
    logger, moved = ("wandb", "/w", {}), ("yaml", "/a", {})
    shared = ("numpy", "/n", {"SEED": "1", "HOME": "/r"})
    theirs = ("numpy", "/n", {"SEED": "2", "HOME": "/r"})

    plan = plan_of([report(logger, shared, moved), report(theirs, ("yaml", "/b", {}))], [start(0), start(1)])

    assert isinstance(plan, PreloadPlan)
    assert plan.modules == (("wandb", "", {}), ("numpy", "/n", {"HOME": "/r"}), ("yaml", "", {}))
    assert {"RANK", "COLOUR", "SEED"} <= set(plan.own)
    assert "HOME" not in plan.own
    assert plan.arguments == ["script.py"]


@pytest.mark.parametrize(
    ("reports", "starts", "why"),
    [
        ([report(), report()], [start(0, "--local-rank=0"), start(1, "--local-rank=1")], "different arguments"),
        ([report(), report(directory="/elsewhere")], [start(0), start(1)], "its working directory"),
    ],
)
def test_nothing_is_imported_where_it_could_see_something_else(reports: Any, starts: Any, why: str) -> None:
    assert why in str(plan_of(reports, starts))


def test_a_rank_reports_its_packages_in_order_with_what_the_script_has_set_between_them(tmp_path: Path) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "early.py").write_text("")
    (package / "late.py").write_text("import early\n")
    (tmp_path / "mine.py").write_text("")
    program = f"""
import os, sys
sys.path[:0] = [{str(package)!r}, {str(tmp_path)!r}]
from ttprun.introspect import ownership
from ttprun.capture.position import user_code
ownership.add_user_directory({str(tmp_path)!r})
user_code.install()
import early
os.environ["MODE"] = "fast"
import mine
import late
for name, file, changes in user_code.modules():
    if name in ("early", "late", "mine", "__main__"):
        print(name, os.path.basename(file), changes)
"""

    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)

    assert printed.stdout.splitlines() == [
        "__main__  {}",
        "early early.py {}",
        "mine  {'MODE': 'fast'}",
        "late late.py {}",
    ]


def test_a_rank_leaves_a_device_that_is_suspect_twice_if_another_one_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    preloads, starts = Preloads(), [{"local_rank_id": rank, "env": {}} for rank in (0, 1)]
    slots: Any = [
        SimpleNamespace(local_rank=one["local_rank_id"], handler=SimpleNamespace(start=one)) for one in starts
    ]
    preloads.devices = {0: 0, 1: 1}

    said = [preloads.note_suspect(slots[rank], slots).partition(":")[2] for rank in (1, 1, 0, 0)]

    assert said == ["", " the rank uses device 2 from now on", "", " take device 0 out of the job"]
    assert [preloads.start_of(start)["env"] for start in starts] == [{}, {"CUDA_VISIBLE_DEVICES": "0,2,1"}]
    assert [preloads.give(slots[0], slots, wanted) for wanted in ("2", "1", "")] == ["", "", ""]
