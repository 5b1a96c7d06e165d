"""Fixtures: a rank with a framework, made of real parts, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank.fakes import FakeChannel, become, make_session
from ttprun.groups.journal import Journal
from ttprun.introspect.current_rank import Rank
from ttprun.mindio.framework import Framework
from ttprun.protocol.board import FINISHED, Field


@pytest.fixture
def session() -> Iterator[Rank]:
    """Rank 0 of 2, with a framework, and nobody at the other end of its line; the other rank holds nobody up."""
    found = make_session(world_size=2)
    found.board.set(1, Field.RECORDED, FINISHED)
    found.framework = Framework(found, None)
    found[Journal].admit = found.framework.admit
    become(found)
    yield found
    become(None)
    assert isinstance(found.channel, FakeChannel)
    found.channel.close()


@pytest.fixture
def framework(session: Rank) -> Framework:
    """The framework of that rank."""
    assert session.framework is not None
    return session.framework
