"""What is done after an import is done once, however the module is asked for, imported, or fails to be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).resolve().parents[2])
BEGIN = """
import importlib, importlib.util, sys, threading
from ttprun.introspect.patching import after_import, is_overdue
done = []
after_import("waited", lambda: done.append(sys.modules["waited"].value))
"""

WAYS = {
    "import": "import waited",
    "probe": "importlib.util.find_spec('waited'); importlib.util.find_spec('waited'); import waited",
    "lazily": (
        "spec = importlib.util.find_spec('waited'); spec.loader = importlib.util.LazyLoader(spec.loader)\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['waited'] = module\n"
        "spec.loader.exec_module(module); module.value"
    ),
    "the first one fails": (
        "import flag; flag.fails = True\n"
        "try: import waited\n"
        "except KeyError: pass\n"
        "assert not done; flag.fails = False; import waited"
    ),
    "in a thread": "t = threading.Thread(target=importlib.import_module, args=('waited',)); t.start(); t.join()",
    "while another thread is importing it": (
        "import flag; flag.began.clear(); flag.slow = True\n"
        "t = threading.Thread(target=importlib.import_module, args=('waited',)); t.start(); flag.began.wait()\n"
        "importlib.util.find_spec('json'); import waited; t.join()"
    ),
    "by a finder before ours, then any other import": (
        "class First:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        return importlib.machinery.PathFinder.find_spec(name, path, target) if name == 'waited' else None\n"
        "sys.meta_path.insert(0, First()); import waited; assert is_overdue('waited'); import wave"
    ),
    "by a hook that wraps the loader": (
        "class Loader:\n"
        "    def __init__(self, inner): self.inner = inner\n"
        "    def create_module(self, spec): return None\n"
        "    def exec_module(self, module): self.inner.exec_module(module)\n"
        "class Hook:\n"
        "    busy = False\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name != 'waited' or self.busy: return None\n"
        "        self.busy = True; spec = importlib.util.find_spec(name); self.busy = False\n"
        "        spec.loader = Loader(spec.loader); return spec\n"
        "sys.meta_path.insert(0, Hook()); import waited"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_done_once_when_the_module_is_whole(way: str, tmp_path: Path) -> None:
    (tmp_path / "flag.py").write_text("import threading\nfails = slow = False\nbegan = threading.Event()\n")
    (tmp_path / "outer.py").write_text("import waited, importlib.util\nimportlib.util.find_spec('waited')\n")
    package = tmp_path / "waited"
    package.mkdir()
    (package / "part.py").write_text("")
    (package / "__init__.py").write_text(
        "import flag, importlib.util, time\nflag.began.set()\nif flag.slow: time.sleep(0.3)\n"
        "if flag.fails: raise KeyError('waited')\nimport json.tool\nvalue = 'whole'\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}{WAYS[way]}\nprint(done, is_overdue('waited'))"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": ROOT}, text=True, capture_output=True, timeout=60, check=False,
    )  # fmt: skip

    assert (done.stdout, done.stderr) == ("['whole'] False\n", "")


def test_it_is_done_at_once_if_the_module_is_there() -> None:
    script = (
        "import json\nfrom ttprun.introspect.patching import after_import\nafter_import('json', lambda: print('done'))"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": ROOT}, text=True, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip

    assert (done.stdout, done.stderr) == ("done\n", "")
