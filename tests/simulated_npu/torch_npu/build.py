"""Compile the device once for each text of its sources, torch and Python, and load it; others wait while one compiles.

The result lies in ~/.cache/ttprun-simulated-npu (TTPRUN_SIMULATED_NPU_CACHE names another folder).
`python build.py` compiles and prints where the result is; exit code 3: there is no compiler. Begin with `load`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

NAME = "simulated_npu_c"
HERE = Path(__file__).resolve().parent
FLAGS = ["-O1", "-g0"]


def built() -> Path:
    """Where the compiled module for this torch and this Python belongs."""
    sources = b"".join(path.read_bytes() for path in sorted((HERE / "csrc").iterdir()))
    named = f"{FLAGS} {torch.__version__} {sys.version_info[:2]} {torch._C._GLIBCXX_USE_CXX11_ABI}"
    key = hashlib.sha256(sources + named.encode()).hexdigest()[:16]
    cache = os.environ.get("TTPRUN_SIMULATED_NPU_CACHE") or Path.home() / ".cache" / "ttprun-simulated-npu"
    return Path(cache) / key / f"{NAME}.so"


def why_not() -> str:
    """Why it cannot be compiled here; "" if it can, or has been."""
    if built().exists():
        return ""
    missing = [tool for tool in (os.environ.get("CXX", "g++"), "ninja") if shutil.which(tool) is None]
    return f"the simulated NPU needs {' and '.join(missing)} to be compiled, which is not on PATH" if missing else ""


def compiled() -> Path:
    """The compiled module; takes a minute or two the first time. Raises ImportError if there is no compiler."""
    target = built()
    if target.exists():
        return target
    if why_not():
        raise ImportError(why_not())
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile(target)
    return target


def _compile(target: Path) -> None:
    from torch.utils import cpp_extension

    folder = target.parent / f"build-{os.getpid()}"
    folder.mkdir()
    sources = [str(path) for path in sorted((HERE / "csrc").glob("*.cpp"))]
    cpp_extension.load(NAME, sources, FLAGS, build_directory=str(folder), is_python_module=False)
    os.replace(folder / f"{NAME}.so", target)
    shutil.rmtree(folder)


@cache
def load() -> Any:
    """The compiled module, imported."""
    spec = importlib.util.spec_from_file_location(NAME, compiled())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    if reason := why_not():
        print(reason, file=sys.stderr)
        sys.exit(3)
    print(compiled())
