"""Checks: which moments, where a run writes, and what a kill came to."""
