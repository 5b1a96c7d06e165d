"""Appends to a rank's trace after each optimizer step: the digest of all that the optimizer works with.

On the PYTHONPATH of every launch alike, by torchrun and by ttprun, and the only thing that is added to a program. It
works by torch's own hook, reads only, and keeps nothing. A line is "PID DIGEST": a replacement adds to the lost rank's
lines. What a program leaves to the system's random numbers is seeded, or no two runs of it could be compared.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
import sys
from typing import Any

FOLDER = os.environ.get("STRANGERS_TRACE", "")


class AfterTorch:
    """A finder that lets the later ones find torch, and acts when its code has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Only for torch; to ask where it is loads nothing."""
        if fullname != "torch" or self not in sys.meta_path:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in later)), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    begin()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def begin() -> None:
    """torch is imported."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if torch.version.cuda is None:  # torchvision of the registry is built for CUDA, and beside this torch lacks these
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    random.seed(20)
    torch.manual_seed(20)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(20)
    register_optimizer_step_post_hook(after_step)


def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Add a line. A standby becomes a rank when it is needed, so the rank is asked for here."""
    if "RANK" not in os.environ:
        return
    hasher = hashlib.blake2b(digest_size=16)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            digest(parameter, hasher)
            for value in optimizer.state.get(parameter, {}).values():
                if hasattr(value, "data_ptr"):
                    digest(value, hasher)
    fd = os.open(os.path.join(FOLDER, f"rank{os.environ['RANK']}"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{os.getpid()} {hasher.hexdigest()}\n".encode())  # not `open`, whose appends ttprun writes once
    os.close(fd)


def digest(tensor: Any, hasher: Any) -> None:
    """Add a tensor's form and bytes; of a sharded one this rank's part."""
    elements = getattr(tensor, "_local_tensor", tensor).detach()
    elements = elements.to_dense() if elements.is_sparse else elements
    elements = elements.cpu().contiguous()
    hasher.update(f"{elements.dtype} {list(tensor.shape)}".encode())
    hasher.update(ctypes.string_at(elements.data_ptr(), elements.nbytes) if elements.nbytes else b"")


if FOLDER:
    sys.meta_path.insert(0, AfterTorch())
