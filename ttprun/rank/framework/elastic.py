"""Whether this rank can train on in a smaller group (MindIO's ZIT): switched on wherever it starts, and handled.

What is done then is `Handlers.rebuild_group`; which ranks leave is for the agent to say (`ttprun.recovery.resize`).
"""

from __future__ import annotations

from ttprun.protocol import from_rank
from ttprun.rank.framework.handlers import DOWNGRADE_REBUILD, Handlers
from ttprun.rank.session import Session


class Elastic:
    """What this rank's framework has said of it.

    is_on                    tft_init_processor: enable_zit
    is_on_in_the_controller  tft_init_controller: enable_zit; True where there is none in this process
    """

    def __init__(self, session: Session, handlers: Handlers) -> None:
        self._session, self._handlers = session, handlers
        self.is_on = False
        self.is_on_in_the_controller = True

    def tell(self) -> None:
        """Tell the agent, once all is there that it takes."""
        if self.is_on and self.is_on_in_the_controller and self._handlers.has(DOWNGRADE_REBUILD):
            self._session.channel.send(from_rank.ElasticDeclared())
