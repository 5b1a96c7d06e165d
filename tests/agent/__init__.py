"""Tests of what the agent finds out about its processes."""
