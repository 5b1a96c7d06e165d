"""Random generators that the script has in variables; the global ones are recorded with each boundary anyhow."""

from __future__ import annotations

import _random
import random
from typing import Any

import numpy
import torch

from ttprun.capture.records.nodes import NumpyRandomNode, RandomNode, SameNode
from ttprun.capture.values.restore import Restore
from ttprun.capture.values.snapshot import Snapshot
from ttprun.capture.values.tensors import raw_bytes
from ttprun.capture.values.type_names import MISSING, name_of
from ttprun.introspect import random_state
from ttprun.introspect.looks import dictionary_of, is_a

OF_NUMPY = (numpy.random.Generator, numpy.random.BitGenerator, numpy.random.RandomState)


def record_torch(snapshot: Snapshot, value: torch.Generator, depth: int) -> Any:
    """torch.Generator."""
    if value is torch.default_generator:
        return SameNode("torch:Generator", "the default one")
    return RandomNode(snapshot.number(value), "torch", raw_bytes(value.get_state()))


def record_python(snapshot: Snapshot, value: random.Random, depth: int) -> Any:
    """random.Random."""
    if type(value).getstate is random.Random.getstate:
        words = _random.Random.getstate(value)
        version, gauss = random.Random.VERSION, (dictionary_of(value) or {}).get("gauss_next")
    else:
        version, words, gauss = value.getstate()
    return RandomNode(snapshot.number(value), "python", [version, list(words), gauss])


def record_numpy(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """numpy.random's Generator, BitGenerator, and RandomState over any bit generator."""
    is_legacy = is_a(value, numpy.random.RandomState)
    state = value.get_state(legacy=False) if is_legacy else getattr(value, "bit_generator", value).state
    return NumpyRandomNode(snapshot.number(value), snapshot.node(state, depth + 1))


def record_numpy_seeds(snapshot: Snapshot, value: Any, depth: int) -> Any:
    """numpy.random.SeedSequence: how many children it has had cannot be set, only compared."""
    return SameNode(name_of(type(value)), repr(value.state))


def restore_random(restore: Restore, live: Any, node: RandomNode | NumpyRandomNode, name: str) -> Any:
    """Put the state into the replacement's own generator."""
    if not restore.claim_or_refuse(node.number, live, name):
        return live
    state: Any = node.state
    try:
        if isinstance(node, NumpyRandomNode):
            state = restore.value(MISSING, state, name)
            if isinstance(live, numpy.random.RandomState):
                live.set_state(state)
            else:
                getattr(live, "bit_generator", live).state = state
        elif node.kind == "torch":
            live.set_state(random_state.tensor_from_bytes(state))
        else:
            live.setstate((state[0], tuple(state[1]), state[2]))
    except (AttributeError, TypeError, ValueError):
        return restore.refuse(live, f"{name} is another random generator than in the lost rank")
    return live
