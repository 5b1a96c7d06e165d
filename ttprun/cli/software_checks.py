"""What `ttprun doctor` makes of Python, torch and the accelerators. Begin with `Probe`, which asks them.

That is done in a process of its own (`main`), which prints a line of JSON: torch may take seconds to import, may fail,
and may crash in a driver; none of that is to end the doctor. Versions of drivers are read from where vendors leave
them, so that they are reported even where torch cannot use them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ttprun
from ttprun import mindio, torch_versions
from ttprun.cli.machine_checks import Finding, judged
from ttprun.device import cuda, npu
from ttprun.device.device_errors import in_one_line
from ttprun.device.interface import Device, DeviceMissingError
from ttprun.device.npu import AUTOLOAD


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
        management = cuda.load_nvml()
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


PROBE_LIMIT_S = 60.0
SHIM = Path(ttprun.__file__).resolve().parent / "shim"
NVIDIA = Path("/proc/driver/nvidia/version")
ASCEND = Path("/usr/local/Ascend")
TOOLKIT_INFO = "ascend_toolkit_install.info"
PROBE = "import sys; sys.path.append({!r}); from ttprun.cli.software_checks import main; main()"


class Probe:
    """The probe in its own process, begun at once and read when it is needed; `answer` is {} if it has not come."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._environment = dict(environment)
        paths = (str(SHIM), self._environment.get("PYTHONPATH", ""))
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", PROBE.format(str(SHIM.parents[1]))],
            env=self._environment | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def read(self, limit_s: float = PROBE_LIMIT_S) -> dict[str, Any]:
        """Wait for the answer. If torch could not be imported but for a backend, what it says without it is added."""
        try:
            answer, errors = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {"error": f"it has not answered within {limit_s:.0f} s"}
        try:
            probed: dict[str, Any] = json.loads(answer.splitlines()[-1])
        except (IndexError, ValueError):
            last = errors.strip().splitlines()[-1:] or [f"exit code {self._process.returncode}"]
            return {"error": f"the process that imported it has ended: {last[0]}"}
        if AUTOLOAD in probed.get("error", "") and self._environment.get(AUTOLOAD) != "0":
            return Probe(self._environment | {AUTOLOAD: "0"}).read(limit_s) | {"autoload_error": probed["error"]}
        return probed


def software(probed: Mapping[str, Any]) -> Iterator[Finding]:
    """Python, torch and ttprun's own hooks.

    probed  what `Probe.read` has returned
    """
    implementation = platform.python_implementation()
    found, means = f"{implementation} {platform.python_version()}", "the variables of frames cannot be restored"
    is_known, cure = implementation == "CPython", "use CPython 3.11 or later"
    yield judged("software", "Python", found, is_known, means, cure, "fails")
    yield Finding("software", "ttprun", f"{installed('ttprun') or 'not installed'}, in {SHIM.parent}")
    yield from _torch(probed)
    if "error" in probed:
        return
    reach = probed.get("hooks") == str(SHIM / "sitecustomize.py")
    found = "reach a rank's Python" if reach else f"sitecustomize is {probed.get('hooks')}"
    means = "ranks run unprotected: their Python does not load ttprun's sitecustomize"
    cure = "make sure that Python reads PYTHONPATH: no wrapper that adds -I, -E or -S, no python._pth beside it"
    yield judged("software", "hooks", found, reach, means, cure, "fails")


def _torch(probed: Mapping[str, Any]) -> Iterator[Finding]:
    if "autoload_error" in probed:
        means = "'import torch' fails, so no script can start"
        cure = f"install CANN and 'source set_env.sh', or uninstall torch_npu, or set {AUTOLOAD}=0"
        yield Finding("software", "torch's backends", probed["autoload_error"], "fails", means, cure)
    if "error" in probed:
        is_absent = "No module named 'torch'" in probed["error"]
        cure = "pip install torch" if is_absent else "make sure that 'python -c \"import torch\"' works"
        yield Finding("software", "torch", probed["error"], "fails", "nothing can run", cure)
        return
    release, untried = torch_versions.release_of(probed["torch"]), torch_versions.why_untried(probed["torch"])
    version = f"{probed['torch']}, imported in {probed['import_s']:.1f} s"
    if release < torch_versions.OLDEST:
        needed = ".".join(map(str, torch_versions.OLDEST))
        means = "ttprun's process group does not fit it"
        yield Finding("software", "torch", version, "fails", means, f"pip install 'torch>={needed}'")
    else:
        means = "it was not tried with this ttprun"
        yield judged("software", "torch", version, not untried, means, "see 'repair' below")
    backends, means = ", ".join(probed["backends"]) or "none", "ranks are repaired over gloo only"
    cure = "install a torch that was built with gloo"
    yield judged("software", "backends", backends, "gloo" in probed["backends"], means, cure, "fails")


def accelerators(probed: Mapping[str, Any]) -> Iterator[Finding]:
    """GPUs and NPUs: what torch can use, and what is there that it cannot."""
    usable = list(probed.get("devices", ()))
    kinds = {device["kind"] for device in usable}
    for device in usable:
        versions = ", ".join(f"{name} {number}" for name, number in device["versions"].items() if number)
        memory = ""
        if "total_bytes" in device:
            memory = f"{device['total_bytes'] / (1 << 30):.0f} GiB ({device['free_bytes'] / (1 << 30):.0f} free)"
        described = ", ".join(filter(None, (device["name"], memory, versions)))
        subject = f"{device['kind']} {device['index']}"
        means, cure = "; ".join(device["findings"]), ""
        if not device["is_usable"]:
            means, cure = means or "it does not answer", "exclude it, or reset it with the vendor's tool"
        yield Finding("devices", subject, described, "note" if means else "ok", means, cure)
    yield from _nvidia(probed, "cuda" in kinds)
    yield from _ascend(probed, "npu" in kinds)
    if not usable:
        found_none = "none that torch can use: training uses the CPU, and nothing of NCCL or HCCL was tried"
        yield Finding("devices", "accelerators", found_none)


def _nvidia(probed: Mapping[str, Any], is_used: bool) -> Iterator[Finding]:
    driver = first_match(NVIDIA, r"Kernel Module.*?\s(\d+(?:\.\d+)+)")
    if driver is None:
        return
    if is_used:
        yield Finding("devices", "NVIDIA driver", driver)
        if installed("nvidia-ml-py") is None:
            means = "Xid events and ECC errors are not reported"
            yield Finding("devices", "NVML", "pynvml is not here", "note", means, "pip install 'ttprun[cuda]'")
        return
    is_built = bool(probed.get("cuda"))
    cure = "see CUDA_VISIBLE_DEVICES and 'nvidia-smi'" if is_built else "install a torch that was built for CUDA"
    yield Finding("devices", "NVIDIA driver", driver, "note", "a GPU may be here, and torch does not use it", cure)


def _ascend(probed: Mapping[str, Any], is_used: bool) -> Iterator[Finding]:
    nodes = sorted(path.name for path in Path("/dev").glob("davinci[0-9]*"))
    driver = first_match(ASCEND / "driver" / "version.info", r"^Version=(\S+)")
    cann = cann_version(os.environ)
    library = installed("torch_npu")
    if nodes:
        yield Finding("devices", "Ascend", f"{len(nodes)} devices, driver {driver or 'not found'}")
    if cann:
        yield Finding("devices", "CANN", cann)
    elif nodes or library:
        yield Finding("devices", "CANN", "not found", "note", "no NPU can be used", "install CANN, 'source set_env.sh'")
    if library is None and nodes:
        yield Finding("devices", "torch_npu", "not installed", "note", "torch does not use the NPUs",
                      "pip install 'ttprun[npu]', in the release that fits torch")  # fmt: skip
    elif library is not None and not is_used:
        what, _, cure = next(iter(probed.get("missing", ())), "no NPU; see 'npu-smi info'").partition("; ")
        yield Finding("devices", "torch_npu", library, "note", what, cure)
    elif library is not None:
        yield Finding("devices", "torch_npu", library)
    if is_used and os.environ.get("PYTORCH_NO_NPU_MEMORY_CACHING"):
        means = "a memory error of an NPU cannot be repaired: torch_npu does not know whose memory it is"
        yield Finding("devices", "PYTORCH_NO_NPU_MEMORY_CACHING", "set", "note", means, "unset it")


def mindio_variables(environment: Mapping[str, str]) -> Iterator[Finding]:
    """MindIO's variables that are set, and what becomes of them with --mindio."""
    for name, variable in mindio.VARIABLES.items():
        value = environment.get(name)
        wrong = mindio.why_not(name, value) if value else None
        if wrong is not None:
            yield Finding("mindio", name, str(value), "note", "ttprun --mindio does not start", wrong.cure)
        elif value:
            yield Finding("mindio", name, value, "ok", variable.means)
    for name, why in mindio.NOT_NEEDED.items():
        if name in environment:
            yield Finding("mindio", name, environment[name], "note", f"it has no effect: {why}", "unset it")


def cann_version(environment: Mapping[str, str]) -> str | None:
    """Version of CANN where the environment says that it is, else where it is mostly installed; None: there is none."""
    named = [environment[name] for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if environment.get(name)]
    for home in (*map(Path, named), ASCEND / "ascend-toolkit" / "latest", ASCEND / "cann"):
        running = first_match(home / "version.cfg", r"^toolkit_running_version=\[[^:]*:([^]]+)\]")
        for number in (
            running,
            *(first_match(file, r"^version=(\S+)") for file in home.glob(f"*-linux/{TOOLKIT_INFO}")),
        ):
            if number:
                return number
    return None


def first_match(path: Path, pattern: str) -> str | None:
    """The first group of a pattern in a file, None if there is no such file or match."""
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None


def installed(package: str) -> str | None:
    """Version of an installed package, None if it is not; nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
