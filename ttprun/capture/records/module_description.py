"""The part of a module's node that hardly ever changes, and is packed once."""

from __future__ import annotations

import msgspec

from ttprun.capture.records.nodes import Node


class ModuleDescription(msgspec.Struct, frozen=True, gc=False):
    """What hardly ever changes of a module.

    modules     [path, type] of each part
    tensors     [path, shape] of each that no optimizer updates
    sharded     paths of those that are sharded
    frozen      of each parameter, whether it is learnt
    hooks       how many there are on each part, by kind, and on each parameter
    passing     paths of buffers that are not in a state_dict
    attributes  the settled ones, by the path of the part
    """

    modules: list[list[str]]
    tensors: list[tuple[str, list[int]]]
    sharded: list[str]
    frozen: list[bool]
    hooks: list[int]
    passing: list[str]
    attributes: dict[str, dict[str, Node]]
