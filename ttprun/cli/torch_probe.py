"""What torch and the devices say, as one line of JSON: run by `ttprun doctor` in a process of its own.

torch may take seconds to import, may fail, and may crash in a driver; none of that is to end the doctor. It also says
which `sitecustomize` this Python has loaded. Begin with `main`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from ttprun.device import cuda, npu, nvml
from ttprun.device.device_errors import in_one_line
from ttprun.device.interface import Device, DeviceMissingError


def main() -> None:
    """Print what is found; the last line of stdout is the answer."""
    answer: dict[str, Any] = {"hooks": getattr(sys.modules.get("sitecustomize"), "__file__", None)}
    started = time.monotonic()
    try:
        import torch
    except BaseException as error:  # torch_npu without CANN: RuntimeError; a broken build: OSError, ImportError
        answer["error"] = in_one_line(error)
    else:
        answer |= {"import_s": time.monotonic() - started, "torch": torch.__version__, "cuda": torch.version.cuda}
        distributed = torch.distributed
        answer["backends"] = [
            name
            for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
            if distributed.is_available() and getattr(distributed, f"is_{name}_available", bool)()
        ]
        answer["devices"], answer["missing"] = [], []
        for device in devices(torch, answer["missing"]):
            answer["devices"].append(described(device))
    print(json.dumps(answer), flush=True)


def devices(torch: Any, missing: list[str]) -> Iterator[Device]:
    """The accelerators that torch can use; why a library that is installed finds none goes to `missing`."""
    with contextlib.suppress(Exception):
        management = nvml.load()
        for index in range(torch.cuda.device_count()):
            yield cuda.CudaDevice(torch, index, management)
    try:
        module = npu.load()
        reinit = getattr(torch.distributed, "reinit_process_group", None)
        for index in range(module.npu.device_count()):
            yield npu.NpuDevice(module, index, reinit)
    except DeviceMissingError as error:
        missing.append(str(error))
    except Exception as error:
        missing.append(npu.why_not_loaded(error))


def described(device: Device) -> dict[str, Any]:
    """One device, whatever it answers."""
    try:
        identity, health = device.identify(), device.health()
        facts = {"kind": identity.kind, "name": identity.name, "index": identity.index, "versions": identity.versions}
        facts |= {"is_usable": health.is_usable, "findings": list(health.findings)}
        with contextlib.suppress(Exception):
            facts["total_bytes"], facts["free_bytes"] = device.memory().total_bytes, device.memory().free_bytes
    except Exception as error:
        facts = {"kind": "unknown", "name": in_one_line(error), "index": 0, "versions": {}}
        facts |= {"is_usable": False, "findings": []}
    return facts


if __name__ == "__main__":
    main()
