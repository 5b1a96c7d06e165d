"""What differs between torch releases, and which of them were tried. Read OLDEST and NEWEST first.

The launcher, the ranks and the tests all ask here, and nobody compares a version anywhere else. Where possible the
question is what a release has and not which number it bears: a build of a vendor's (torch_npu) may have either. Imports
no torch.
"""

from __future__ import annotations

import re
from typing import Any

OLDEST = (2, 6)  # in which a killed rank was seen to be replaced; so for all in TRIED
NEWEST = (2, 15)
TRIED = ("2.6", "2.9", "2.13", "2.14", "2.15")  # of each an entry in tests/results/versions.json

# The first in which C++ keeps the Python part of a process group's work alive as long as it holds the work.
_KEEPS_WORKS = (2, 9)
# The first in which NCCL's and XCCL's groups return None for a synchronous operation.
_GIVES_NO_WORKS = (2, 8)
# The first in which libuv's store was seen to listen on a socket that it is given.
_TAKES_SOCKETS = (2, 9)
# What torchrun does where it has no such option (or LaunchConfig no such field).
_DEFAULTS: dict[str, Any] = {
    "event_log_handler": "null",
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "shutdown_timeout": None,
}
GRACE_S = 30  # torch's default grace period for the ranks of a job that ends


def launch_option(options: Any, name: str) -> Any:
    """An option of torchrun, or a field of its LaunchConfig; in a release that has none, what that does anyway."""
    return getattr(options, name, _DEFAULTS[name])


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as 2.13.0+cpu; (0, 0) if it is none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def why_untried(version: str) -> str:
    """One line on a release that is newer or older than those that were tried; "" for one between them."""
    release = release_of(version)
    if OLDEST <= release <= NEWEST:
        return ""
    tried = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    return (
        f"torch {version} was not tried with this ttprun (tried: {tried}); 'ttprun doctor' repairs a rank on it to see"
    )


def loses_works(version: str) -> bool:
    """Whether C++ may hold a process group's work whose Python part is gone: it then waits for ever (seen in 2.6)."""
    return release_of(version) < _KEEPS_WORKS


def gives_works(version: str) -> bool:
    """Whether NCCL's groups return a work for a synchronous operation too, and not None."""
    return release_of(version) < _GIVES_NO_WORKS


def takes_socket(version: str) -> bool:
    """Whether libuv's TCPStore listens on a socket that it is given; if not (2.6), it prints an error and raises."""
    return release_of(version) >= _TAKES_SOCKETS


def still_holds(node: Any, name: str, saved: Any, has_hooks: bool) -> bool | None:
    """Whether a SavedTensor holds its tensor still, or a backward() has freed it; None if that cannot be seen.

    node, name   the node of the graph, and its attribute (_raw_saved_...) in which `saved` was found
    has_hooks    the script packs saved tensors by hooks of its own: to unpack one may run code of the script

    From 2.13 on (not in 2.9) a SavedTensor can be asked itself.
    """
    if hasattr(saved, "data"):
        return saved.data is not None
    if has_hooks:
        return None
    is_of_function = name == "_raw_saved_tensors" and hasattr(type(node), "saved_tensors")
    try:
        value = getattr(node, "saved_tensors" if is_of_function else name.replace("_raw_saved_", "_saved_", 1))
    except RuntimeError:
        return False
    return value is not None


def fsdp_param_groups(state: Any) -> list[Any]:
    """The groups of parameters of a module that fully_shard was given; before 2.13 (seen in 2.9) it has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
