"""The methods of `ManagedGroup` by which torch issues operations: one for each name in `operations.py`.

Read `operation` first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ttprun.groups import held_works, messages
from ttprun.groups.operations import positional
from ttprun.groups.work import ManagedWork, is_called_by_python
from ttprun.introspect import fail_open
from ttprun.introspect.signal_handlers import gate_from_c


def operation(op: str) -> Callable[..., Any]:
    """The method for a collective. It returns what torch's own group would: a work, or None."""

    @gate_from_c
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = positional(op, args, kwargs)
        gives_work = self.links.gives_work(given)
        work: Any = fail_open.run(op, self.issue, self.links.issue_plainly, (op, given), {})
        # C++ code takes a None that a Python group returns for a work.
        if not gives_work and work is not None and is_called_by_python(sys._getframe(2), op):
            work.wait()
            return None
        return held_works.hold(work) if held_works.IS_NEEDED and isinstance(work, ManagedWork) else work

    call.__name__ = op
    return call


def point_to_point(op: str) -> Callable[..., Any]:
    """The method for a message between two ranks."""

    @gate_from_c
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        issue = partial(messages.issue, self.session, self)
        return fail_open.run(op, issue, self.links.issue_plainly, (op, (*args, *kwargs.values())), {})

    call.__name__ = op
    return call
