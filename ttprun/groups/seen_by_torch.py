"""What torch asks of a process group beside its operations: its names, and the device that it is bound to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import ProcessGroup

if TYPE_CHECKING:
    from ttprun.groups.links import Links

INTERNAL_NAME = "ttprun"  # not "gloo": C++ would look for a native gloo backend in the group


class SeenByTorch(ProcessGroup):
    """That part of a `ManagedGroup`."""

    _name: str
    _description: str
    links: Links

    def getBackendName(self) -> str:
        return INTERNAL_NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name
        self.links.rename(name)

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc  # type: ignore[assignment]
    group_desc = property(getGroupDesc)

    _n_being_made = 0

    @staticmethod
    @contextlib.contextmanager
    def making() -> Iterator[None]:
        """The script makes a group: torch would split its communicator off a bound device's."""
        SeenByTorch._n_being_made += 1
        try:
            yield
        finally:
            SeenByTorch._n_being_made -= 1

    @property  # type: ignore[misc]
    def bound_device_id(self) -> torch.device | None:
        """The device that the script has given, as torch's own group has it."""
        member = self.links.member
        return member.device if member.is_given and not SeenByTorch._n_being_made else None
