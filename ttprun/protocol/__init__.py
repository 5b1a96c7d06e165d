"""Shared memory and messages between the agent and its ranks."""
