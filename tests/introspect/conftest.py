"""Fixtures: those of the rank tests."""

from tests.rank.conftest import *  # noqa: F403
