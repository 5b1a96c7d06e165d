"""Small stand-ins with the real thing's interface, and a rank's session made of real parts."""

from __future__ import annotations

import socket
from typing import Any

from tests.options import OPTIONS
from ttprun.capture.recording import Rehearsal
from ttprun.capture.records.recorder import Recorder
from ttprun.groups.connection import Exchange
from ttprun.groups.journal import Journal
from ttprun.groups.results import Results
from ttprun.introspect import current_rank
from ttprun.introspect.current_rank import Parts, Rank
from ttprun.protocol.board import Board
from ttprun.protocol.channel import Channel
from ttprun.rank.bootstrap.hooks import observers_of
from ttprun.rank.proof import Alignment
from ttprun.rank.verification import Verifier
from ttprun.tensors import optimizer_registry
from ttprun.tensors.holdings import Holdings
from ttprun.tensors.mirror import Mirror
from ttprun.tensors.own_state import OwnState
from ttprun.tensors.replicated import PostStepWeights
from ttprun.tensors.shares import SnapshotPart

RECORD_BYTES = 1 << 20


class FakeChannel(Channel):
    """A rank's end of the line that notes what is sent, with nobody at the other end."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        super().__init__(ours)
        self.sent: list[Any] = []

    def send(self, message: Any, fds: Any = ()) -> None:
        self.sent.append(message)

    def close(self) -> None:
        super().close()
        self._theirs.close()


def make_session(
    run_dir: str = "/tmp", channel: Channel | None = None, board: Board | None = None, **known: Any
) -> Rank:
    """A session of rank 0 of two, unless `known` says otherwise; it is not made the process's own."""
    recorder = Recorder(Recorder.create(RECORD_BYTES), RECORD_BYTES)
    line = FakeChannel() if channel is None else channel
    world_size = known.pop("world_size", 2)
    journal = known.pop("journal", Journal(64 << 20))
    page = Board.create(world_size)[1] if board is None else board
    session = Rank(
        rank=known.pop("rank", 0),
        local_rank=known.pop("local_rank", 0),
        world_size=world_size,
        run_dir=run_dir,
        options=OPTIONS,
        channel=line,
        board=page,
        parts=Parts(
            {
                SnapshotPart: SnapshotPart(page, 0, [], 0, recorder),
                Recorder: known.pop("recorder", recorder),
                Journal: journal,
                Holdings: Holdings(),
                Rehearsal: Rehearsal(),
                PostStepWeights: PostStepWeights(optimizer_registry.newest, lambda text: None),
                OwnState: OwnState(page, 0, [], recorder),
                Mirror: known.pop("mirror", Mirror(page, 0, [])),
                Alignment: Alignment(),
                Verifier: Verifier(line, journal, every=0, nan_limit_s=None),
                Results: known.pop("results", Results(recorder)),
                Exchange: known.pop("exchange", Exchange(line)),
            }
        ),
        **known,
    )
    session.observers = observers_of(session)
    return session


def become(session: Rank | None) -> None:
    """Make a session this process's own, without the hooks at fork."""
    current_rank.begin(session)
