"""torch's registry of process groups, restored if making a managed group fails."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d


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
