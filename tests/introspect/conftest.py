"""Fixtures: those of the rank tests."""

from tests.rank.conftest import gloo_and_ours, no_hooks_are_left

__all__ = ["gloo_and_ours", "no_hooks_are_left"]
