"""Whether this rank can continue in a smaller group (MindIO's ZIT): it is switched on, and has a handler.

The handler is called by `Handlers.rebuild_group`; the agent decides which ranks leave (`ttprun.recovery.resize`).
"""

from __future__ import annotations

from ttprun.protocol import mindio
from ttprun.rank.framework.handlers import DOWNGRADE_REBUILD, Handlers
from ttprun.rank.session import Session


class Elastic:
    """The framework's switches.

    is_on                    tft_init_processor: enable_zit
    is_on_in_the_controller  tft_init_controller: enable_zit; True if this process has no controller
    """

    def __init__(self, session: Session, handlers: Handlers) -> None:
        self._session, self._handlers = session, handlers
        self.is_on = False
        self.is_on_in_the_controller = True

    def report(self) -> None:
        """Report to the agent if both switches are on and there is a handler."""
        if self.is_on and self.is_on_in_the_controller and self._handlers.has(DOWNGRADE_REBUILD):
            self._session.channel.send(mindio.ElasticDeclared())
