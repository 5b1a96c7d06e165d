"""What tests of whole runs share: cases that say `arguments of the script: fault`, and both runs of one."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.e2e.harness import Run, RunTtprun, Undisturbed, assert_recovered_by

RETRY = ("--retry-on", "^InjectedFaultError: injected")


def needs(package: str, extra: str = "test-frameworks") -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed (the extra {extra})"
    )


def recovered_and_undisturbed(
    run_ttprun: RunTtprun,
    undisturbed: Undisturbed,
    script: str,
    case: str,
    rung: str = "replace",
    options: Sequence[str] = (),
    ranks: int = 2,
) -> tuple[Run, Run]:
    """The run in which ranks are lost, each fault recovered by that rung, and the same without a fault.

    case      "arguments of the script: fault fault"
    options   of ttprun
    """
    words, _, faults = case.partition(": ")
    reference = undisturbed(script, ranks, words.split())
    result = run_ttprun(script, ranks, faults=faults.split(), script_args=words.split(), options=options)
    assert_recovered_by(result, [rung] * len(faults.split()))
    return result, reference


def plain(value: Any) -> Any:
    """Tensors as bytes, objects as their attributes, all else as it is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), list(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tobytes"):
        return value.tobytes()
    held = getattr(value, "__dict__", None)
    return (type(value).__name__, plain(held)) if held else value
