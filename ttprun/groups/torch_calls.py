"""What torch itself calls and keeps of process groups: its registry, a group's names and device, the operations.

Read `operation` first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ProcessGroup

from ttprun.groups import collectives
from ttprun.groups.operations import positional
from ttprun.groups.work import LOSES_WORKS, ManagedWork, hold, is_called_by_python
from ttprun.introspect import fail_open
from ttprun.introspect.signal_handlers import gate_from_c

if TYPE_CHECKING:
    from ttprun.groups.links import Links

# torch's registry of process groups, restored if making a managed group fails.


class GroupRegistry:
    """torch's registry of groups at one moment; `restore` removes the groups made since.

    They are kept alive: a store in them may serve the other ranks.
    """

    _removed: list[Any] = []  # noqa: RUF012 - of the process

    def __init__(self) -> None:
        self._default = c10d._world.default_pg
        self._count = c10d._world.group_count
        self._hook = sys.excepthook  # init_process_group installs its own, which prefixes the rank
        self._tables = [(table, _copy(table)) for table in _tables()]

    def restore(self) -> None:
        """Remove the groups that were made since."""
        names = set(c10d._world.pg_names.values())
        for table, content in self._tables:
            GroupRegistry._removed.append(_copy(table))
            table.clear()
            table.update(content) if isinstance(table, dict) else table.extend(content)
        c10d._world.group_count = self._count
        c10d._update_default_pg(self._default)
        sys.excepthook = self._hook
        for name in names - set(c10d._world.pg_names.values()):
            with contextlib.suppress(RuntimeError):  # it was not registered yet
                torch._C._distributed_c10d._unregister_process_group(name)


def _tables() -> list[Any]:
    """The dictionaries and lists of torch's `_World`, which vary by version."""
    kind = type(c10d._world)
    names = [name for name, member in vars(kind).items() if isinstance(member, property) and name != "pg_config_info"]
    tables = [getattr(c10d._world, name) for name in names]
    return [table for table in tables if isinstance(table, dict | list)]


def _copy(table: Any) -> Any:
    if isinstance(table, dict):
        return {key: list(value) if isinstance(value, list) else value for key, value in table.items()}
    return list(table)


# What torch asks of a process group beside its operations: its names, and the device that it is bound to.

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


def operation(op: str) -> Callable[..., Any]:
    """The method for a collective. It returns what torch's own group would: a work, or None."""

    @gate_from_c
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = positional(op, args, kwargs)
        gives_work = not self.links.is_late or self.links.gives_work(given)
        work: Any = fail_open.run(op, self.issue, self.links.issue_plainly, (op, given), {})
        # C++ code takes a None that a Python group returns for a work.
        if not gives_work and work is not None and is_called_by_python(sys._getframe(2), op):
            work.wait()
            return None
        return hold(work) if LOSES_WORKS and isinstance(work, ManagedWork) else work

    call.__name__ = op
    return call


def point_to_point(op: str) -> Callable[..., Any]:
    """The method for a message between two ranks."""

    @gate_from_c
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        issue = partial(collectives.issue_message, self.session, self)
        return fail_open.run(op, issue, self.links.issue_plainly, (op, (*args, *kwargs.values())), {})

    call.__name__ = op
    return call
