"""A simulated Ascend NPU under the name of the real library: no device is there, and nothing here shows that one works.

Tensors are on `npu:0` and so on, in memory that is the host's in truth; what takes them for the CPU's fails. PYTHONPATH
with the folder above this one is all that a script needs: `import torch` loads it as it loads an installed torch_npu
(an entry point), unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. What it has of torch_npu was taken from the documented
interface and what its sources say of it. csrc/operators.cpp says how work runs late, breaking.py what can go wrong.
Begin with npu.py.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch

torch.utils.rename_privateuse1_backend("npu")

from torch_npu import npu  # noqa: E402 - the name comes first

torch._register_device_module("npu", npu)
sys.modules["torch.npu"] = npu
torch.utils.generate_methods_for_privateuse1_backend()

from torch_npu import breaking, hccl  # noqa: E402, F401 - registers the backend

__version__ = "2.13.0+simulated"
version = SimpleNamespace(cann="simulated")


def _autoload() -> None:
    """`import torch` calls this: all was done above."""
